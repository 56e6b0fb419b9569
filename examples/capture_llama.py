"""Llama 3 for `zpasses capture`, with 70B parameters by default: shows what the passes do for 512
ranks on a machine that has none of them.

    zpasses capture examples/capture_llama.py:llama --arg seq=4096 --world 512 --target mi300x \\
        --zero-stage 3 -o llama-dump
    zpasses capture examples/capture_llama.py:llama --arg layers=2 --world 64 --target h100 \\
        -o small-dump
    zpasses html llama-dump -o report.html

A function to capture returns a model and its inputs. It runs on fake tensors, so nothing of the
model's size is allocated.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama(
    layers: int = 80,
    hidden: int = 8192,
    intermediate: int = 28672,
    heads: int = 64,
    kv_heads: int = 8,
    vocab: int = 128256,
    seq: int = 128,
):
    """Returns a model, and one sample of `seq` tokens as keyword arguments. The model returns its
    loss.
    """
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        num_hidden_layers=layers,
        use_cache=False,
    )
    tokens = torch.zeros(1, seq, dtype=torch.long)
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}
