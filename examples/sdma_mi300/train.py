"""Train one of the two models on 8 x MI300X, with gathers by RCCL or by SDMA engines, and print the
time per step.

    torchrun --nproc-per-node 8 examples/sdma_mi300/train.py --model gpt-7b --pipeline zero3
    torchrun --nproc-per-node 8 examples/sdma_mi300/train.py --model gpt-7b

Each run prints the loss of every step. The losses must be equal digit by digit. `run.sh` runs both,
and the calibration.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time

import torch
import torch.distributed as dist
from model import MODELS, Decoder, Shape
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zpasses


def initialise(module: nn.Module) -> None:
    """Initialise with small weights, equal on every rank. Runs on the shards."""
    for name, param in module.named_parameters(recurse=False):
        (
            nn.init.ones_
            if "norm" in type(module).__name__.lower() and name == "weight"
            else nn.init.zeros_
        )(param)
        if param.dim() > 1:
            nn.init.normal_(param, std=0.02)


def sharded(shape: Shape, device: torch.device) -> nn.Module:
    """Build the model without memory, shard it, and initialise the shards."""
    with torch.device("meta"):
        model = Decoder(shape)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    zpasses.shard(model, mesh=mesh, param_dtype=torch.bfloat16)
    model.to_empty(device=device)
    torch.manual_seed(0)
    model.apply(initialise)
    return model


def train(
    shape: Shape, pipeline: str, steps: int, device: torch.device, **options: object
) -> tuple[list[float], list[float]]:
    """Returns the losses, and the milliseconds of each step on this rank."""
    model = sharded(shape, device)
    step = torch.compile(model, backend="zpasses", options={"pipeline": pipeline, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses, times = [], []
    for _ in range(steps):
        tokens = torch.randint(shape.vocab, (1, shape.seq + 1), generator=generator).to(device)
        started = time.perf_counter()
        loss = step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        times.append((time.perf_counter() - started) * 1e3)
    return losses, times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="gpt-7b")
    parser.add_argument("--pipeline", default="zero3")
    parser.add_argument(
        "--steps", type=int, default=30, help="number of steps; the first five are not timed"
    )
    parser.add_argument("--layers", type=int, help="number of layers (default: all)")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    shape = dataclasses.replace(
        MODELS[options.model], layers=options.layers or MODELS[options.model].layers
    )
    losses, times = train(shape, options.pipeline, options.steps, device)
    if dist.get_rank() == 0:
        for number, loss in enumerate(losses):
            print(f"step {number}: loss {loss:.9g}")
        counted = times[5:] or times
        print(
            f"{options.model}, {options.pipeline}: {statistics.median(counted):.1f} ms per step, "
            f"{min(counted):.1f} at best"
        )
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        for choice in zpasses.sdma.report():
            print(choice)
    zpasses.sdma.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
