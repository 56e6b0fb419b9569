"""Gradient accumulation over micro-batches with one reduction per step, in the four ways to mark
the last backward.

    torchrun --nproc-per-node 2 examples/accumulate.py --way counted

| --way | the program says | gradients are reduced |
| --- | --- | --- |
| per-step | options={"backwards_per_step": N}, and nothing else | in every Nth backward |
| counted | coalesce_grad_reduction(model, backwards=N) | in the Nth backward |
| announced | window.last() before the last one | in that backward |
| flushed | coalesce_grad_reduction(model) | when the block ends |

All ways give the same gradients. With --way none every backward reduces. That gives the same
gradients too, with N times the communication.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zpasses

WAYS = ("none", "per-step", "counted", "announced", "flushed")


def build(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def train(
    way: str, steps: int, micro_batches: int, width: int, device: str, **options: Any
) -> list[float]:
    """Train a small autoencoder. Returns the loss of every step: the mean over its micro-batches on
    this rank.
    """
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = zpasses.shard(build(width).to(device), mesh=mesh)
    if way == "per-step":
        options["backwards_per_step"] = micro_batches
    step = torch.compile(model, backend="zpasses", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(steps):
        total = 0.0
        with window_of(model, way, micro_batches) as window:
            for number in range(micro_batches):
                if way == "announced" and number == micro_batches - 1:
                    window.last()
                x = torch.randn(8, width, generator=generator).to(device)
                loss = (step(x) - x).square().mean() / micro_batches
                loss.backward()
                total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def window_of(model: nn.Module, way: str, micro_batches: int) -> Any:
    if way in ("none", "per-step"):
        return contextlib.nullcontext()
    return zpasses.coalesce_grad_reduction(
        model, backwards=micro_batches if way == "counted" else None
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", default="counted", choices=WAYS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--zero-stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--codegen", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    if args.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    options = {"zero_stage": args.zero_stage, "codegen": args.codegen}
    losses = train(args.way, args.steps, args.micro_batches, args.width, args.device, **options)
    print(f"rank {dist.get_rank()}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
