"""Sizes of small models of transformers, by the names that their configurations have."""

VOCABULARY = 61  # prime, so not divisible by the number of ranks
LAYERS = {"hidden_size": 16, "num_hidden_layers": 1}
WIDTHS = {**LAYERS, "intermediate_size": 24, "num_attention_heads": 2}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CODERS = {f"{each}_layers": 1 for each in ("encoder", "decoder")}
HEADS = {f"{each}_attention_heads": 2 for each in ("encoder", "decoder")}
FEED_FORWARD = {f"{each}_ffn_dim": 24 for each in ("encoder", "decoder")}
ENCODER_DECODER = {"d_model": 16, "dropout": 0.0, **CODERS, **HEADS, **FEED_FORWARD}
