"""Small models of transformers train sharded as they do unsharded, both compiled by Inductor."""

import functools

import pytest
import torch

from tests.models.families import Family, cases, of_transformers, train
from tests.models.sizes import (
    ENCODER_DECODER,
    LAYERS,
    NO_DROPOUT,
    TOKENS,
    VOCABULARY,
    WIDTHS,
)
from tests.on_ranks import on_ranks

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.processes, pytest.mark.inductor]

PIXELS = {**WIDTHS, "image_size": 8, "patch_size": 4}
DETECTED = {"image_size": [8, 8], "patch_size": 4, "num_detection_tokens": 3}
PLACES = {**NO_DROPOUT, "max_position_embeddings": 16, "max_image_length": 8}
STAGES = {"hidden_sizes": [8, 12], "depths": [1, 1]}
RELATIVE = {"relative_attention": True, "max_relative_positions": 8, "pos_att_type": ["p2c", "c2p"]}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
SIZES = {"num_key_value_heads": 2, "moe_intermediate_size": 8, "v_head_dim": 8}
DEEPSEEK = {**EXPERTS, **LATENT, **SIZES, "first_k_dense_replace": 0}
MERGING = {"depths": [1, 1], "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2]}
BLOCKS = {"hidden_sizes": [8, 8], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
SEGFORMER = {**MERGING, **BLOCKS, "num_encoder_blocks": 2, "decoder_hidden_size": 8}
CONVOLUTIONS = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2)}
POSITIONS = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
LENGTHS = {"max_source_positions": 8, "max_target_positions": 16}
HEARD = {**LENGTHS, "num_mel_bins": 6, "decoder_start_token_id": 2}
STRIDES = {"frequency_stride": 4, "time_stride": 4}
SPECTRUM = {**STRIDES, "patch_size": 4, "max_length": 12, "num_mel_bins": 8}
DROPOUTS = ("hidden_dropout", "attention_dropout", "activation_dropout", "final_dropout")
WAV2VEC2 = {
    **CONVOLUTIONS,
    **POSITIONS,
    **dict.fromkeys((*DROPOUTS, "layerdrop"), 0.0),
    "num_feat_extract_layers": 2,
    "apply_spec_augment": False,  # its masks are NumPy's random numbers; see docs/limits.md
}


def _words(length=8):
    return torch.randint(4, VOCABULARY, (2, length))


def _text():
    words = _words()
    return {"input_ids": words, "labels": words}


def _classes():
    return torch.randint(2, (2,))


def _pixels(size=8):
    return torch.randn(2, 3, size, size)


def _classified():
    return {"pixel_values": _pixels(), "labels": _classes()}


def _segmented():
    return {"pixel_values": _pixels(), "labels": torch.randint(2, (2, 8, 8))}


def _frames():
    return {"pixel_values": torch.randn(2, 2, 3, 8, 8), "labels": _classes()}


def _waves():
    return {"input_values": torch.randn(2, 96), "labels": _words(3)}


def _translated():
    return {"input_features": torch.randn(2, 6, 16), "labels": _words(6)}


def _spectrum():
    return {"input_values": torch.randn(2, 12, 8), "labels": _classes()}


def _captioned():
    return {"pixel_values": _pixels(), "input_ids": _words(6), "return_loss": True}


def _image_in_words():
    words = _words()
    words[:, 1:5] = 3  # where the image's patches go
    return {"pixel_values": _pixels(), "input_ids": words, "labels": words}


def _retrieved():
    seen = torch.ones(2, 8, 8, dtype=torch.long)
    return {"pixel_values": _pixels(), "pixel_mask": seen, "input_ids": _words(6)}


def _loss(output):
    return output.loss


def _boxes(output):
    """transformers computes the loss of detection with libraries that are not installed."""
    return output.logits.square().mean() + output.pred_boxes.square().mean()


def _logits(output):
    return (output.logits - 1).square().mean()


def _family(name, batch=_text, loss=_loss, rounding=0.0, **config):
    return Family(functools.partial(of_transformers, name, **config), batch, loss, rounding)


def _detr():
    backbone = transformers.ResNetConfig(
        embedding_size=8, layer_type="basic", out_features=["stage2"], **STAGES
    )
    return transformers.DetrForObjectDetection(
        transformers.DetrConfig(backbone_config=backbone, num_queries=3, **ENCODER_DECODER)
    )


def _clip():
    text = {**TOKENS, **WIDTHS, "projection_dim": 8, "max_position_embeddings": 8}
    vision = {**PIXELS, "projection_dim": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    return transformers.CLIPModel(config)


def _llava():
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**PIXELS),
        text_config=transformers.LlamaConfig(**TOKENS, **WIDTHS),
        image_token_index=3,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


FAMILIES = {
    # text
    "llama": _family("LlamaForCausalLM", **TOKENS, **WIDTHS, num_key_value_heads=1),
    "gpt2": _family("GPT2LMHeadModel", **TOKENS, n_embd=16, n_layer=1, n_head=2, n_positions=16),
    "bloom": _family("BloomForCausalLM", **TOKENS, hidden_size=16, n_layer=1, n_head=2),
    "mixtral": _family(
        "MixtralForCausalLM", **TOKENS, **WIDTHS, num_key_value_heads=1, num_local_experts=3
    ),
    "deepseek v3": _family("DeepseekV3ForCausalLM", **TOKENS, **WIDTHS, **DEEPSEEK),
    "mamba": _family("MambaForCausalLM", **TOKENS, **LAYERS, state_size=4, time_step_rank=2),
    "bert": _family("BertForMaskedLM", **TOKENS, **WIDTHS, **NO_DROPOUT),
    "albert": _family(
        "AlbertForMaskedLM",
        **{**TOKENS, **WIDTHS, **NO_DROPOUT, "num_hidden_layers": 2},
        embedding_size=8,
    ),
    "deberta v2": _family(
        "DebertaV2ForMaskedLM", rounding=1e-6, **TOKENS, **WIDTHS, **NO_DROPOUT, **RELATIVE
    ),
    "fnet": _family("FNetForMaskedLM", **TOKENS, **WIDTHS, hidden_dropout_prob=0.0),
    # encoder-decoder
    "t5": _family(
        "T5ForConditionalGeneration", **TOKENS, **T5, num_layers=1, decoder_start_token_id=0
    ),
    # vision
    "vit": _family("ViTForImageClassification", _classified, **PIXELS),
    "convnext": _family(
        "ConvNextForImageClassification", _classified, num_stages=2, patch_size=2, **STAGES
    ),
    "resnet": _family(
        "ResNetForImageClassification", _classified, embedding_size=8, layer_type="basic", **STAGES
    ),
    "segformer": _family("SegformerForSemanticSegmentation", _segmented, **SEGFORMER),
    "videomae": _family(
        "VideoMAEForVideoClassification", _frames, num_frames=2, tubelet_size=1, **PIXELS
    ),
    # detection
    "detr": Family(_detr, lambda: _pixels(16), _boxes),
    "yolos": _family("YolosForObjectDetection", _pixels, _boxes, **WIDTHS, **DETECTED),
    # speech
    "wav2vec2": _family("Wav2Vec2ForCTC", _waves, **TOKENS, **WIDTHS, **WAV2VEC2),
    "whisper": _family(
        "WhisperForConditionalGeneration", _translated, **TOKENS, **ENCODER_DECODER, **HEARD
    ),
    "audio spectrogram transformer": _family(
        "ASTForAudioClassification", _spectrum, rounding=1e-6, **WIDTHS, **SPECTRUM
    ),
    # several modalities
    "clip": Family(_clip, _captioned, _loss),
    "llava": Family(_llava, _image_in_words, _loss),
    "vilt": _family(
        "ViltForImageAndTextRetrieval", _retrieved, _logits, **TOKENS, **PIXELS, **PLACES
    ),
}


# Each takes half a minute of processor time or more.
@pytest.mark.slow(quick="test_a_module_trains_as_it_does_unsharded of test_families.py")
@pytest.mark.parametrize(("name", "stages"), cases(FAMILIES, {"fnet": 3}))
@on_ranks(2, timeout_s=600)
def test_a_model_trains_as_it_does_unsharded(name, stages):
    train(FAMILIES[name], *stages)
