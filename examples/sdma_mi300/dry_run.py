"""Compile a training step for 8 x MI300X on any machine, to predict which gathers copy engines
take and how much time that saves.

    python examples/sdma_mi300/dry_run.py
    python examples/sdma_mi300/dry_run.py --model gpt-7b --gathers

Nothing is allocated, computed or communicated: the ranks and the tensors are fake. Capturing the
whole model takes minutes. --layers 4 captures only four layers, which cannot be compared with the
reported times.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping

import torch
from model import MODELS, Decoder, Shape
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from zpasses.cost.time.route_figures import route_figures
from zpasses.cost.time.step_time import StepTime, step_time
from zpasses.cost.time.target import Target, use_target
from zpasses.graph.tags import tagged
from zpasses.passes import ZERO3, Schedule
from zpasses.pipeline.base_pass import Level
from zpasses.pipeline.events import ObservedGraph, observe_graphs
from zpasses.testing import copy_graph, fake_world
from zpasses.testing.step_graphs import capture_step

SHARES = (1.0, 0.5, 0.25)
"""Fractions of the data sheet's peak operations per second. The fraction that matrix products reach
is not known, so several are tried.
"""


def step_graphs(shape: Shape, ranks: int, target: Target) -> dict[str, fx.GraphModule]:
    """Returns the forward and backward graph of one rank, before its collectives are scheduled.
    Call it in a fake world.
    """
    graphs: dict[str, fx.GraphModule] = {}

    def keep(log: ObservedGraph) -> None:
        if log.kind in ("forward", "backward"):
            graphs[log.kind] = copy_graph(log.graph)

    options = {
        "pipeline": zpasses.Pipeline(tuple(each for each in ZERO3 if each.level is Level.JOINT)),
        "target": str(target),
    }
    mesh = init_device_mesh("cpu", (ranks,))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), observe_graphs(keep):
            model = Decoder(shape)
            zpasses.shard(model, mesh=mesh)
            tokens = torch.zeros(1, shape.seq, dtype=torch.long)
            capture_step(model, (tokens, tokens), options=options, fullgraph=True)
    finally:
        torch.set_default_dtype(before)
    return graphs


def scheduled(
    graphs: Mapping[str, fx.GraphModule], target: Target, schedule: Schedule
) -> dict[str, fx.GraphModule]:
    """Returns copies of the graphs after the pass `schedule`."""
    copies = {kind: copy_graph(gm) for kind, gm in graphs.items()}
    with use_target(target):
        for gm in copies.values():
            schedule(gm.graph)
    return copies


def decisions(graph: fx.Graph) -> list[str]:
    """Returns the decision on each gather, with the parameters that it gathers."""
    return [
        f"{', '.join(tag.params[:2])}{' ...' if len(tag.params) > 2 else ''}: {tag.note}"
        for _, tag in tagged(graph, "gather")
    ]


def time_of(graphs: Mapping[str, fx.GraphModule], target: Target) -> StepTime:
    return step_time([gm.graph for gm in graphs.values()], target)


def describe(what: str, each: StepTime) -> str:
    total, kernels, slowed, waiting, collectives = (
        us / 1e3
        for us in (
            each.total_us,
            each.compute_us,
            each.slowed_us,
            each.exposed_us,
            each.collective_us,
        )
    )
    parts = f"kernels {kernels:.1f}, slowed by {slowed:.1f}, waiting {waiting:.1f}"
    return f"  {what} {total:7.1f} ms: {parts}; collectives take {collectives:.1f}"


def show(name: str, shape: Shape, target: Target, list_gathers: bool) -> None:
    """Print the predictions for one model, at each fraction of the peak."""
    with fake_world(8):
        graphs = step_graphs(shape, 8, target)
        for share in SHARES:
            slower = dataclasses.replace(target, tflops=share * target.tflops)
            before = scheduled(graphs, slower, Schedule(copy_engines="off"))
            after = scheduled(graphs, slower, Schedule())
            print(f"{name}, products at {share:.0%} of {target.tflops:.0f} TFLOPS")
            for kind, gm in after.items():
                notes = decisions(gm.graph)
                taken = sum(": by mori: " in note for note in notes)
                print(f"  {kind}: {taken} of {len(notes)} gathers by copy engines")
                for note in notes if list_gathers else ():
                    print(f"    {note}")
            plain, engines = time_of(before, slower), time_of(after, slower)
            print(describe("RCCL", plain))
            print(describe("SDMA", engines))
            gain = 1 - engines.total_us / plain.total_us
            print(f"  predicted gain {gain:.1%}{compared(name, shape, gain, plain)}")


def compared(name: str, shape: Shape, gain: float, plain: StepTime) -> str:
    """Compares the prediction with the reported times; "" if only a part of the model was
    captured.
    """
    if shape != MODELS[name]:
        return ""
    before, after = shape.reported_ms
    reported = 1 - after / before
    ratio = plain.total_us / 1e3 / before
    return (
        f"; reported {reported:.1%} ({before} -> {after} ms): off by {gain - reported:+.1%} of a "
        f"step; the step with RCCL is {ratio:.2f} x the reported one"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=MODELS, action="append", help="model to compile (default: both)"
    )
    parser.add_argument(
        "--target",
        default="mi300x",
        help='hardware to plan for, e.g. "mi325x" or "mi300x,link_gb_s=400"',
    )
    parser.add_argument("--layers", type=int, help="number of layers to capture (default: all)")
    parser.add_argument("--gathers", action="store_true", help="list the decision on every gather")
    options = parser.parse_args()
    target = Target.parse(options.target)
    for route, figures in route_figures(target).items():
        speed = f"{figures.gb_s:.0f} GB/s after {figures.latency_us:.0f} us"
        slowdown = f"{figures.collective_slowdown:.2f} x as long during compute"
        print(
            f"{route}: {speed}, {slowdown}, slows compute {figures.compute_slowdown:.2f} x "
            f"({figures.source})"
        )
    for name in options.model or MODELS:
        show(
            name,
            dataclasses.replace(MODELS[name], layers=options.layers or MODELS[name].layers),
            target,
            options.gathers,
        )


if __name__ == "__main__":
    main()
