"""Traces joined to the nodes of a dump: times, exposed time, memory, and what is not joined."""

import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.zpasses.inspect.graphs import replace, small_dump, two_gathers
from tests.zpasses.inspect.measured_runs import GATHER, NAMES, WAIT, gloo_run, measured
from tests.zpasses.inspect.traces import graph_run, memory, span, write
from zpasses.dumps.dump_errors import DumpError, NotATraceError
from zpasses.dumps.limits import Limits
from zpasses.inspect import CollectiveRows, Inspection
from zpasses.inspect.launches import length, union
from zpasses.inspect.measured import _Busy
from zpasses.inspect.measured_page import joined_lines, module_times
from zpasses.inspect.traces import read_trace


def by_name(found):
    nodes = found.snapshot.by_id
    return {nodes[key].name: each for key, each in found.collectives.items()}


def test_collectives_over_gloo_last_until_their_data_have_arrived(tmp_path):
    found = measured(tmp_path, [*gloo_run(), *gloo_run(5000.0)])
    (graph,) = found.graphs
    times = by_name(graph)
    assert (graph.runs, graph.total_us) == (2, 1000)
    assert (times["gather_w"].time_us, times["gather_w"].exposed_us) == (140, 130)
    # It has arrived long before its wait, which takes 10 us.
    assert (times["gather_v"].time_us, times["gather_v"].exposed_us) == (230, 40)
    assert graph.exposed_us == 170
    assert found.joined_us == 2 * 370
    assert found.joined_share == 1.0
    assert graph.unjoined_compute_us == 1000 - 170 - 500


def test_operators_are_nodes_if_they_are_called_as_often(tmp_path):
    (graph,) = measured(tmp_path, gloo_run()).graphs
    nodes = graph.snapshot.by_name
    assert graph.operators == {nodes["mm"].id: 300, nodes["mm_1"].id: 200}
    fewer = [each for each in gloo_run() if (each["name"], each["ts"]) != ("aten::mm", 250)]
    (graph,) = measured(tmp_path, fewer).graphs
    assert graph.operators == {}
    assert graph.unjoined_compute_us == 1000 - 170


def test_waits_without_number_follow_the_order_of_the_graph(tmp_path):
    events = [each for each in gloo_run() if not each["name"].startswith("zpasses.w")]
    events = [each for each in events if not each["name"].startswith("zpasses.l")]
    times = by_name(measured(tmp_path, events).graphs[0])
    assert (times["gather_w"].exposed_us, times["gather_v"].exposed_us) == (130, 40)


def test_collectives_of_torchs_own_gloo_end_on_other_threads(tmp_path):
    events = [
        span("c10d::allreduce_", 10, 20),
        {**span("gloo:all_reduce", 15, 85, "user_annotation"), "tid": 2},
        span("c10d::allreduce_", 200, 20),
        {**span("gloo:all_reduce", 215, 35, "user_annotation"), "tid": 3},
    ]
    found = measured(tmp_path, [*events, *gloo_run(1000.0)])
    assert found.unjoined == {"c10d::allreduce_": 90 + 50}
    assert found.joined_share == pytest.approx(370 / 510)


def test_collectives_outside_of_graphs_are_told_apart_and_wrapping_is_none(tmp_path):
    outside = [
        span("_c10d_functional::all_reduce", 10, 20),
        span("_c10d_functional::_wrap_tensor_autograd", 30, 50),
    ]
    found = measured(tmp_path, [*outside, *gloo_run(1000.0)])
    assert found.unjoined == found.outside == {"_c10d_functional::all_reduce": 20}
    assert found.joined_share == pytest.approx(370 / 390)
    assert found.joined_share_of_graphs == 1.0
    text = " ".join(joined_lines(found))
    assert "94.9% of the measured time of collectives" in text
    assert "Outside of graphs, so no node: _c10d_functional::all_reduce 20 us." in text
    assert "In graphs, but not joined" not in text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda events: events[1:2] + events[2:], None),
        (
            lambda events: [each for each in events if (each["name"], each["ts"]) != (GATHER, 200)],
            "a run of 0/0 forward has 1 collectives, and the graph 2",
        ),
        (
            lambda events: [graph_run("forward", ["other"], 0, 1000), *events[1:]],
            "the dump has no forward graph 0/0 of these collectives",
        ),
        (
            lambda events: [graph_run("forward", NAMES, 0, 1000, "1/0"), *events[1:]],
            "the dump has no forward graph 1/0 of these collectives",
        ),
    ],
    ids=["no range", "too few", "another graph", "another compile"],
)
def test_runs_that_do_not_fit_are_counted_and_not_joined(tmp_path, change, reason):
    found = measured(tmp_path, change(gloo_run()))
    assert found.graphs == ()
    assert found.joined_us == 0
    assert found.unjoined_us > 0
    assert dict(found.reasons) == ({reason: 1} if reason else {})


def kernel(name, ts, dur, correlation, stream):
    found = span(name, ts, dur, "kernel", args={"correlation": correlation})
    return {**found, "pid": 0, "tid": stream}


def cuda_run():
    launch = "_c10d_functional::all_gather_into_tensor"

    def started(ts, correlation):
        return span("cudaLaunchKernel", ts, 2, "cuda_runtime", args={"correlation": correlation})

    gather, product = "ncclDevKernel_AllGather", "aten::mm"
    first = [span(launch, 10, 10), span("c10d::_allgather_base_", 11, 8), started(12, 1)]
    second = [span(WAIT, 22, 2), span(launch, 25, 10), started(27, 2)]
    third = [span(product, 40, 10), started(42, 3), span(WAIT, 52, 2)]
    fourth = [span(product, 60, 10), started(62, 4)]
    gathers = [kernel(gather, 100, 50, 1, 20), kernel(gather, 160, 100, 2, 20)]
    products = [kernel("gemm", 150, 60, 3, 7), kernel("gemm", 260, 40, 4, 7)]
    run = graph_run("forward", NAMES, 0, 100)
    return [run, *first, *second, *third, *fourth, *gathers, *products]


def test_kernels_of_an_accelerator_belong_to_the_launch_that_started_them(tmp_path):
    (graph,) = measured(tmp_path, cuda_run()).graphs
    times, nodes = by_name(graph), graph.snapshot.by_name
    assert (times["gather_w"].time_us, times["gather_w"].exposed_us) == (50, 50)
    assert (times["gather_v"].time_us, times["gather_v"].exposed_us) == (100, 50)
    assert graph.operators == {nodes["mm"].id: 60, nodes["mm_1"].id: 40}
    assert graph.exposed_us == 100


def test_exposed_time_counts_overlaps_once(tmp_path):
    events = cuda_run()
    events[-3] = kernel("ncclDevKernel_AllGather", 120, 140, 2, 21)
    (graph,) = measured(tmp_path, events).graphs
    times = by_name(graph)
    assert (times["gather_w"].exposed_us, times["gather_v"].exposed_us) == (50, 80)
    assert graph.exposed_us == 100


def test_memory_rises_above_what_is_allocated_when_a_run_starts(tmp_path):
    allocated = {50: 1000, 300: 5000, 400: 3000, 2000: 90000}
    events = [*gloo_run(100.0), *(memory(at, nbytes) for at, nbytes in allocated.items())]
    events.append(memory(350, 77, device=-1))
    (graph,) = measured(tmp_path, events).graphs
    assert graph.rise_bytes == 4000
    assert graph.predicted_rise_bytes == max(two_gathers(early=True).live_bytes)
    (without,) = measured(tmp_path, gloo_run()).graphs
    assert without.rise_bytes is None


def test_modules_share_the_time_of_a_collective_by_bytes(tmp_path):
    (graph,) = measured(tmp_path, gloo_run()).graphs
    rows = {row.name: row for row in module_times(graph)}
    assert rows["layers.0.up"].measured_compute_us == 300
    assert rows["w"].measured_collectives_us == 140
    assert rows["v"].measured_exposed_us == 40
    assert sum(row.measured_collectives_us for row in rows.values()) == 370


# --- pages ----------------------------------------------------------------------------------------
def test_the_page_of_collectives_shows_both_times(tmp_path):
    trace = write(tmp_path / "t.json.gz", gloo_run(), zpasses={"peak_rss_bytes": 1 << 20})
    view = Inspection(small_dump()).collectives(show=CollectiveRows(sort="time"), trace=trace)
    text = str(view)
    parts = ["its exposed", "140 us", "0/0 forward by module", "Measured in 1 run"]
    parts += ["100.0% of the measured time of collectives"]
    for part in (*parts, "Peak of the process's memory: 1 MiB"):
        assert part in text
    (graph,) = view.data["graphs"]
    assert [row["measured_us"] for row in graph["collectives"]] == [140, 230]
    assert view.data["joined_share"] == 1.0


def test_a_trace_of_another_run_is_refused(tmp_path):
    trace = write(tmp_path / "t.json", [span("aten::mm", 0, 1)])
    with pytest.raises(NotATraceError, match="has no run of a graph of dump"):
        Inspection(small_dump()).collectives(trace=trace)


def test_the_rank_of_the_trace_is_shown_if_it_wrote(tmp_path):
    one, other = small_dump(rank=0), small_dump(rank=1)
    dump = replace(one, ranks={**one.ranks, **other.ranks})
    trace = write(tmp_path / "t.json", gloo_run(), distributedInfo={"rank": 1, "world_size": 2})
    (graph,) = Inspection(dump).measured(trace).graphs
    assert graph.graph.rank == 1
    (graph,) = Inspection(dump, rank=0).measured(trace).graphs
    assert graph.graph.rank == 0


# --- the reader -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"traceEvents": 3}',
        b'{"traceEvents": [3]}',
        b'{"traceEvents": [{"ph": "X"}]}',
        b'{"traceEvents": [{"ph": "X", "name": "a", "ts": NaN}]}',
        b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 1e400}]}',
        b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 0, "dur": -1}]}',
        b'{"traceEvents": [{"ph": "X", "name": 3, "ts": 0}]}',
        b'{"traceEvents": [{"ph": "X", "name": "a", "ts": 0, "tid": []}]}',
        b'{"traceEvents": [{"ph": "i", "name": "[memory]", "ts": 0}]}',
        b'{"traceEvents": [], "zpasses": {"steps": "x"}}',
        b"\xff\xfe",
        b"\x1f\x8bgarbage",
        gzip.compress(b"{}" * 1000, mtime=0)[:-9],
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(DumpError):
        read_trace(path)


def test_a_missing_trace_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(DumpError):
            read_trace(path)


def test_a_small_file_that_decompresses_to_a_large_one_is_refused(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * (1 << 22)))
    with pytest.raises(DumpError, match="decompresses to more bytes"):
        read_trace(path, Limits(file_bytes=1 << 20))


def test_a_trace_may_be_a_link(tmp_path):
    write(tmp_path / "trace.json", [span("a", 0, 1)])
    os.symlink(tmp_path / "trace.json", tmp_path / "link.json")
    assert len(read_trace(tmp_path / "link.json").events) == 1


# --- intervals ------------------------------------------------------------------------------------
INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12).map(
    lambda pairs: [(start, start + size) for start, size in pairs]
)


@given(INTERVALS, INTERVALS)
def test_time_outside_of_intervals_is_that_of_single_moments(one, other):
    def moments(intervals):
        return {at for start, end in intervals for at in range(start, end)}

    assert length(union(one)) == len(moments(one))
    assert _Busy(union(other)).outside(union(one)) == len(moments(one) - moments(other))


def test_the_data_are_json(tmp_path):
    trace = write(tmp_path / "t.json", gloo_run())
    json.dumps(Inspection(small_dump()).collectives(trace=trace).data)
