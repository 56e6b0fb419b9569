"""Compile a training step for 8 x MI300X on any machine: which gathers would copy engines take, and what is that predicted to gain?

    python examples/sdma_mi300/dry_run.py
    python examples/sdma_mi300/dry_run.py --model gpt-7b --gathers

Nothing is allocated, computed or communicated: the ranks are fake, and so are the tensors. The whole model is captured, which takes
minutes; --layers 4 captures four layers, and says nothing about the reported times.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch
from model import MODELS, Decoder, Shape
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import zpasses
from zpasses.backend import GraphLog, observe_graphs
from zpasses.passes import ZERO3_SDMA, Sdma
from zpasses.route_figures import known_figures
from zpasses.step_time import StepTime, step_time
from zpasses.tags import tagged
from zpasses.target import Target, planning_for
from zpasses.testing import copy_graph, fake_world


def step_graphs(shape: Shape, ranks: int, target: Target) -> dict[str, fx.GraphModule]:
    """Forward and backward graph of one rank, before the last pass; to be called in a fake world."""
    graphs: dict[str, fx.GraphModule] = {}

    def keep(log: GraphLog) -> None:
        if log.kind in ("forward", "backward"):
            graphs[log.kind] = copy_graph(log.graph)

    options = {"pipeline": zpasses.Pipeline(ZERO3_SDMA.passes[:-1]), "codegen": "eager", "agreement": False, "target": str(target)}
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), observe_graphs(keep):
            model = Decoder(shape)
            zpasses.shard(model, mesh=mesh)
            step = torch.compile(model, backend="zpasses", fullgraph=True, options=options)
            tokens = torch.zeros(1, shape.seq, dtype=torch.long)
            step(tokens, tokens).backward()
    finally:
        torch.set_default_dtype(before)
    return graphs


def predict(
    shape: Shape, target: Target, ranks: int = 8, each: Sdma = ZERO3_SDMA.passes[-1]
) -> tuple[StepTime, StepTime, dict[str, list[str]]]:
    """Step times without and with the swap, and the verdict on every gather of each graph."""
    with fake_world(ranks), planning_for(target):
        torch._dynamo.reset()
        graphs = step_graphs(shape, ranks, target)
        plain = step_time([gm.graph for gm in graphs.values()], target)
        verdicts = {}
        for kind, gm in graphs.items():
            each(gm.graph)
            verdicts[kind] = [
                f"{', '.join(tag.params[:2])}{' ...' if len(tag.params) > 2 else ''}: {tag.note}" for _, tag in tagged(gm.graph, "gather")
            ]
        return plain, step_time([gm.graph for gm in graphs.values()], target), verdicts


def show(name: str, shape: Shape, times: tuple[StepTime, StepTime]) -> None:
    plain, swapped = times
    for what, each in (("RCCL", plain), ("SDMA", swapped)):
        parts = f"kernels {each.compute_us / 1e3:.1f}, slowed by {each.slowed_us / 1e3:.1f}, waiting {each.waited_us / 1e3:.1f}"
        print(f"{name}: predicted with {what} {each.total_us / 1e3:8.1f} ms ({parts}; collectives {each.collective_us / 1e3:.1f})")
    gain = 1 - swapped.total_us / plain.total_us
    print(f"{name}: predicted gain {gain:6.1%} of a step")
    if shape == MODELS[name]:
        before, after = shape.reported_ms
        reported = 1 - after / before
        print(f"{name}: reported  gain {reported:6.1%} ({before} -> {after} ms); the prediction is off by {gain - reported:+.1%} of a step")
        print(f"{name}: and the predicted step with RCCL is {plain.total_us / 1e3 / before:.2f} of the reported one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="one of the models; both by default")
    parser.add_argument("--target", default="mi300x", help='hardware to plan for, e.g. "mi300x,tflops=600"')
    parser.add_argument("--layers", type=int, help="capture so many layers instead of all")
    parser.add_argument("--gathers", action="store_true", help="list the verdict on every gather")
    options = parser.parse_args()
    target = Target.parse(options.target)
    for route, figures in known_figures(target).items():
        speed = f"{figures.gb_s:.0f} GB/s after {figures.latency_us:.0f} us"
        print(f"{route}: {speed}, slows compute {figures.compute_slowdown} x ({figures.source})")
    for name in options.model or MODELS:
        shape = dataclasses.replace(MODELS[name], layers=options.layers or MODELS[name].layers)
        plain, swapped, verdicts = predict(shape, target)
        for kind, notes in verdicts.items():
            taken = [note for note in notes if "sdma swapped" in note]
            print(f"{name}: {kind}: {len(taken)} of {len(notes)} gathers would be swapped")
            for note in notes if options.gathers else ():
                print(f"  {note}")
        show(name, shape, (plain, swapped))


if __name__ == "__main__":
    main()
