"""Traces of runs over gloo, joined to a small dump."""

from tests.zpasses.inspect.graphs import small_dump
from tests.zpasses.inspect.traces import graph_run, span, write
from zpasses.inspect.find import select_graphs
from zpasses.inspect.measured import measure
from zpasses.inspect.traces import read_trace

NAMES = ["gather_w", "gather_v"]
GATHER = "zpasses::gloo_all_gather"
WAIT = "_c10d_functional::wait_tensor"


def gloo_run(at=0.0):
    """One run of the graph with `early`, 1,000 us long: the second gather ends before its wait."""
    mark = "user_annotation"
    first, second = int(at), int(at) + 1
    return [
        graph_run("forward", NAMES, at, 1000),
        span(GATHER, at + 10, 40),
        span("gloo:recv", at + 30, 100, mark),
        span(f"zpasses.launch:{first}", at + 45, 1, mark),
        span(WAIT, at + 60, 90),  # 20 after the arrival, to put the data in place
        span(f"zpasses.wait:{first}", at + 65, 80, mark),
        span(GATHER, at + 200, 30),
        span("gloo:recv", at + 220, 200, mark),
        span(f"zpasses.launch:{second}", at + 225, 1, mark),
        span("aten::mm", at + 250, 300),
        span("aten::inner", at + 260, 100),
        span(WAIT, at + 600, 10),
        span(f"zpasses.wait:{second}", at + 601, 8, mark),
        span("aten::mm", at + 700, 200),
    ]


def measured(tmp_path, events, dump=None, **fields):
    dump = dump or small_dump()
    trace = read_trace(write(tmp_path / "trace.json", events, **fields))
    return measure(trace, select_graphs(dump))
