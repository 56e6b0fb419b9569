"""Llama 3 for `zpasses capture`, with 70B parameters by default, and a mixture of 512 experts. Show
what the passes do for 512 ranks on a machine that has none of them.

    zpasses capture examples/capture_llama.py:llama --arg seq=4096 --world 512 --target mi300x \\
        --zero-stage 3 -o llama-dump
    zpasses capture examples/capture_llama.py:llama --arg seq=4096 --mesh dp=64,tp=8 \\
        --target h100 -o tp-dump
    zpasses capture examples/capture_llama.py:llama --arg layers=2 --world 64 --target h100 \\
        -o small-dump
    zpasses capture examples/capture_llama.py:mixture --world 1024 --target h100 \\
        --compile-blocks "model.layers.*" -o mixture-dump
    zpasses plan examples/capture_llama.py:llama --arg seq=4096 --mesh dp=128,tp=8 --target h100 \\
        --compile-blocks "model.layers.*,model.embed_tokens,lm_head" --memory 60GiB
    zpasses html llama-dump -o report.html

A function to capture returns a model and its inputs. It runs on fake tensors, so nothing of the
model's size is allocated. With `--mesh`, it gets the device mesh. It applies tensor parallelism
over dimension "tp", and the command shards the model over "dp" afterwards.
"""

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig


def llama(
    layers: int = 80,
    hidden: int = 8192,
    intermediate: int = 28672,
    heads: int = 64,
    kv_heads: int = 8,
    vocab: int = 128256,
    seq: int = 128,
    mesh=None,
):
    """Returns a model, and one sample of `seq` tokens as keyword arguments. The model returns its
    loss. If `mesh` has a dimension "tp", the model is parallel over it.
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
    model = LlamaForCausalLM(config)
    if mesh is not None and "tp" in mesh.mesh_dim_names:
        tensor_parallel(model, mesh["tp"])
    return model, {"input_ids": tokens, "labels": tokens}


def mixture(layers: int = 48, experts: int = 512, hidden: int = 2048, seq: int = 4096, mesh=None):
    """Returns a mixture of stacked experts, and one sample. Its widths are those of Qwen3-Next
    80B-A3B, with plain attention.
    """
    config = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=hidden // 4,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=151936,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=10,
        experts_implementation="grouped_mm",
        use_cache=False,
    )
    tokens = torch.zeros(1, seq, dtype=torch.long)
    # transformers 5.20 compiles products of stacked experts in bfloat16 only.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model, {"input_ids": tokens, "labels": tokens}


def tensor_parallel(model, mesh):
    """Cuts embedding, attention, MLP and head over `mesh`. The activations between are equal on all
    of its ranks.
    """
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"{attention}.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        f"{attention}.o_proj": RowwiseParallel(),
        **{f"{mlp}.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
        f"{mlp}.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
