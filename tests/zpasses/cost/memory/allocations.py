"""What profiled code allocates."""

from zpasses.cost.memory.liveness import (
    liveness,
)
from zpasses.cost.time.fused_kernels import use_fusion


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
