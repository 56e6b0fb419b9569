"""What profiled code allocates."""

import bisect

from zpasses.cost.memory.liveness import (
    liveness,
)
from zpasses.cost.time.fused_kernels import use_fusion


def allocated(profiled, name):
    """(bytes allocated when the code with this mark started, peak above them).

    What a convolution allocates and frees itself depends on its library, and does not count.
    """
    events = profiled.profiler.kineto_results.events()
    step = next(event for event in events if event.name() == name)
    calls = [(event.start_ns(), event) for event in events if "aten::convolution" in event.name()]
    calls.sort(key=lambda call: call[0])
    starts = [start for start, _ in calls]
    ends = [max((event.end_ns() for _, event in calls[: i + 1])) for i in range(len(calls))]
    live = resting = peak = inside = 0
    allocations = (event for event in events if event.name() == "[memory]")
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        at = event.start_ns()
        if inside and at > inside:
            peak, inside = max(peak, live), 0
        live += event.nbytes()
        if at < step.start_ns():
            resting = peak = live
        elif at <= step.start_ns() + step.duration_ns():
            call = bisect.bisect_right(starts, at) - 1
            if call >= 0 and at <= ends[call]:
                inside = ends[call]
            else:
                peak = max(peak, live)
    return resting, peak - resting


def one_by_one(graph):
    with use_fusion(False):
        return liveness(graph).peak_bytes
