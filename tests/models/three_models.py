"""Three small models of transformers, which differ in how they tie, fuse and route."""

import functools

from tests.models.families import of_transformers
from tests.models.sizes import VOCABULARY

WIDTHS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def model_of(name, **config):
    """A function that builds a model of transformers."""
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    return functools.partial(of_transformers, name, **tokens, **config)


MODELS = {
    "llama": model_of("LlamaForCausalLM", **WIDTHS),
    "gpt2": model_of("GPT2LMHeadModel", **GPT2, **NO_DROPOUT),
    "mixtral": model_of("MixtralForCausalLM", **WIDTHS, num_local_experts=4),
}
