"""What profiled code allocates."""

import gc

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import zpasses
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.time.fused_kernels import use_fusion
from zpasses.graph.queries import copy_graph
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import fake_world
from zpasses.tools.bench.model import batches, build_model


def allocated(profiled, name):
    """(bytes allocated when the code with this mark started, peak above them)."""
    events = profiled.profiler.kineto_results.events()
    step = next(event for event in events if event.name() == name)
    live = resting = peak = 0
    allocations = (event for event in events if event.name() == "[memory]")
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        at = event.start_ns()
        live += event.nbytes()
        if at < step.start_ns():
            resting = peak = live
        elif at <= step.start_ns() + step.duration_ns():
            peak = max(peak, live)
    return resting, peak - resting


def one_by_one(graph):
    with use_fusion(False):
        return liveness(graph).peak_bytes


def measured_step(size, dtype=None, *, make=None, **options):
    """Returns the graphs of a step, and the bytes that its forward and its backward allocate."""
    graphs = {}

    def keep(log):  # a copy, because Inductor rewrites the graph that it compiles
        graphs.setdefault(log.kind, copy_graph(log.graph).graph)

    # Entered first: the profiler misses the release of memory whose allocation it has not seen.
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
        fake_world(2) as mesh,
    ):
        model, (warmup, measured) = make() if make else (build_model(size), batches(size, 2, 0))
        zpasses.shard(model, mesh=mesh, param_dtype=dtype, reduce_dtype=dtype)
        step = torch.compile(model, backend="zpasses", fullgraph=True, options=options)
        with observe_graphs(keep):
            step(*warmup).square().mean().backward()
        step(*warmup).square().mean().backward()
        for param in model.parameters():
            param.grad = None
        gc.collect()
        with record_function("measured forward"):
            made = step(*measured)
        loss = made.sum()  # which takes and saves nothing itself
        del made
        with record_function("measured backward"):
            loss.backward()
    resting, forward = allocated(profiled, "measured forward")
    before_backward, backward = allocated(profiled, "measured backward")
    return graphs, forward, backward + before_backward - resting  # with what outlives forward


def planned_peaks(graphs):
    """Returns the bytes that plans count for the forward and the backward of `measured_step`."""
    ahead, back = liveness(graphs["forward"]), liveness(graphs["backward"])
    left = sum(each.nbytes for each in ahead.alive_at(ahead.nodes[-1]) if not each.scratch)
    given = [
        live
        for node, live in zip(back.nodes, back.live_bytes, strict=True)
        if node.op == "placeholder"
    ]
    cached = max(0, left - max(given))  # what backward does not read
    return ahead.peak_bytes, back.peak_bytes + cached


def write_no_kernels(monkeypatch):
    """Has generated code call nothing in place of its kernels: what it allocates does not depend on
    what they compute, but for indices.
    """

    def kernel(*args):
        for each in args:
            if isinstance(each, torch.Tensor) and each.dtype == torch.int64:
                each.zero_()

    monkeypatch.setattr(
        "torch._inductor.async_compile.AsyncCompile.cpp_pybinding",
        lambda self, types, source: kernel,
    )
