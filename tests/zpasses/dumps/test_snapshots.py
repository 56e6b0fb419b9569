"""Tests of snapshots: from graphs to files and back."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from tests.graphs import Param, few_examples, joint
from tests.roundtrip import round_trip, write_snapshot
from zpasses.cost.time.step_time import Timeline
from zpasses.cost.time.target import TARGETS, use_target
from zpasses.dumps import DamagedDumpError
from zpasses.dumps.describe import Describer
from zpasses.dumps.limits import Limits
from zpasses.dumps.nodes import Items, Ref, Repr
from zpasses.dumps.snapshots import SnapshotFiles
from zpasses.pipeline.events import observe_graphs
from zpasses.pipeline.pipeline import Pipeline
from zpasses.testing import capture_graphs, fake_world
from zpasses.testing.strategies import param_lists

ZERO3 = Pipeline.parse("merge-reads,gather-params,reduce-grads,reshard-after-forward")


@given(params=param_lists(), rank=st.integers(0, 2))
@few_examples
def test_drawn_graphs_round_trip_before_and_after_every_pass(tmp_path_factory, params, rank):
    folder = tmp_path_factory.mktemp("snapshots")
    with fake_world(3, rank):
        gm = joint([*params, Param((4, 2))], rank, 3)
        trace = Describer(TARGETS["h100"]).graph("joint")
        written = [trace.snapshot(gm.graph, 0)]
        paths = {0: write_snapshot(folder, written[0])}
        for number, each in enumerate(ZERO3, start=1):
            each(gm.graph)
            written.append(trace.snapshot(gm.graph, number))
            paths[number] = write_snapshot(folder, written[-1], written[-2])
    files = SnapshotFiles(paths, Limits())
    for number in reversed(range(len(written))):
        assert files.load(number) == written[number]


def test_every_graph_of_a_model_round_trips(tmp_path):
    model = nn.Sequential(
        nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 5, bias=False), nn.GELU()
    )
    seen = []
    with observe_graphs(
        lambda log: seen.append(round_trip(log.graph, tmp_path, modelled=log.kind != "captured"))
    ):
        for stage in (2, 3):
            for train in (True, False):
                capture_graphs(
                    model,
                    (torch.zeros(3, 2, dtype=torch.long),),
                    world_size=3,
                    pipeline=f"zero{stage}",
                    train=train,
                )
    assert len(seen) == 2 * (4 + 3)  # inference has a joint and a forward level
    places = [
        node.source for snapshot in seen for node in snapshot.nodes if node.source is not None
    ]
    assert {"1", "2"} <= {place.module for place in places}


def test_dynamic_shapes_slices_and_unusual_values_round_trip(tmp_path):
    graph = fx.Graph()
    x = graph.placeholder("x")
    odd = graph.call_function(
        torch.narrow_copy,
        (x, float("nan"), 1 << 80, {"deep": [slice(x, None, 2)]}),
        {"dtype": torch.bfloat16},
    )
    graph.call_method("to", (odd, torch.device("cpu")), {"text": "\u2028 <b> \n"})
    graph.output((odd,))
    read = round_trip(graph, tmp_path, modelled=False)
    args = read.by_name["narrow_copy"].args
    assert args[0] == Ref(0)
    assert args[1:3] == (Repr("nan"), Repr(str(1 << 80)))
    assert args[3] == Items({"deep": (Items({"start": Ref(0), "stop": None, "step": 2}),)})
    assert read.by_name["narrow_copy"].kwargs == {"dtype": Repr("torch.bfloat16")}
    assert read.by_name["to"].inputs == (1,)


def test_nodes_keep_their_ids_and_only_changed_nodes_are_written(tmp_path):
    with fake_world(2, 0):
        gm = joint([Param((4, 2)), Param((4,))], 0, 2)
        trace = Describer(TARGETS["h100"]).graph("joint")
        before = trace.snapshot(gm.graph, 0)
        ZERO3.passes[1](gm.graph)
        after = trace.snapshot(gm.graph, 1)
    stayed = before.by_id.keys() & after.by_id.keys()
    assert len(stayed) == len(before.nodes) - 2  # two unshards became gathers
    assert all(before.by_id[id].name == after.by_id[id].name for id in stayed)
    header, *lines = write_snapshot(tmp_path, after, before).read_text().splitlines()
    assert json.loads(header)["base"] == 0
    assert {json.loads(line)["id"] for line in lines} >= after.by_id.keys() - before.by_id.keys()
    assert len(lines) < len(after.nodes)


def test_collectives_have_sizes_and_waits():
    with fake_world(4, 0):
        gm = joint([Param((8, 2)), Param((6, 3))], 0, 4)
        Pipeline.parse("gather-params,reduce-grads{form=reduce_scatter}")(gm.graph)
        snapshot = Describer(TARGETS["h100"]).graph("joint").snapshot(gm.graph, 0)
    gather, padded, *reductions = [node for node in snapshot.nodes if node.collective is not None]
    assert (gather.collective.kind, gather.params, gather.stream) == (
        "all_gather_into_tensor",
        ("p0",),
        "communication",
    )
    assert (gather.collective.nbytes, gather.collective.full_bytes, gather.collective.ranks) == (
        2 * 2 * 4,
        8 * 2 * 4,
        4,
    )
    assert padded.collective.full_bytes == 8 * 3 * 4  # two rows a rank
    assert [node.collective.kind for node in reductions] == ["reduce_scatter_tensor"] * 2
    assert (
        reductions[0].collective.full_bytes
        == 4 * snapshot.by_id[reductions[0].collective.waits[0]].nbytes
    )
    assert [snapshot.by_id[id].target for id in gather.collective.waits] == [
        "_c10d_functional.wait_tensor.default"
    ]
    assert gather.cost_us > 0
    assert {buffer.kind for node in snapshot.nodes for buffer in node.buffers} == {
        "parameter",
        "gradient",
        "activation",
    }


def test_a_graph_of_unknown_groups_has_no_times_and_the_log_says_why(caplog):
    with fake_world(2, 0):
        gm = joint([Param((4, 2))], 0, 2)
        known = Describer(TARGETS["h100"]).graph("joint").snapshot(gm.graph, 0)
    assert known.spans[-1][1] > 0
    unknown = Describer(TARGETS["h100"]).graph("joint").snapshot(gm.graph, 0)
    assert unknown.spans == ((0.0, 0.0),) * len(unknown.nodes)
    assert any("the dump has no times for a graph" in text for text in caplog.messages)


def test_copy_engine_gathers_have_the_route_and_the_times_that_the_pass_compared():
    with fake_world(8, 0):
        gm = joint([Param((1 << 15, 64)), Param((1 << 15, 64))], 0, 8)
        Pipeline.parse("gather-params,reduce-grads{form=reduce_scatter}")(gm.graph)
        target = TARGETS["mi300x"]
        trace = Describer(target).graph("joint")
        before = trace.snapshot(gm.graph, 0)
        with use_target(target):
            Pipeline.parse("sdma{gathers=all}")(gm.graph)
        after = trace.snapshot(gm.graph, 1)
        expected = Timeline(gm.graph, target).run().collective_us
    replaced = [
        node
        for node in after.nodes
        if node.collective and node.collective.kind == "sdma_all_gather"
    ]
    assert replaced
    assert {node.collective.route for node in replaced} == {"mori"}
    assert all("sdma replaced" in node.collective.decision for node in replaced)
    assert {
        before.by_id[node.id].collective.route for node in replaced if node.id in before.by_id
    } <= {""}
    assert sum(node.cost_us for node in after.nodes if node.collective) == pytest.approx(
        expected, abs=0.01
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[0].update(number=7), "the number in the file's name"),
        (lambda rows: rows[0].update(base=0), "not an earlier one"),
        (lambda rows: rows[0].update(written=99), "expected 99"),
        (lambda rows: rows[0].update(live_bytes=[1]), "expected one for each"),
        (lambda rows: rows[0].update(spans=[]), "expected one for each"),
        (lambda rows: rows[0]["spans"].__setitem__(0, [2, 1]), "0 <= start <= end"),
        (lambda rows: rows[0].update(order=[0, 0]), "each node exactly once"),
        (lambda rows: rows[1].update(id=-1), r"line 2: 'id': expected `int` >= 0"),
        (lambda rows: rows[1].update(id=rows[2]["id"]), "expected unique ids"),
        (lambda rows: rows[1].update(source_index=5000), "a number below"),
        (lambda rows: rows[1].update(tag={"role": "full", "params": [1]}), r"'tag.params\[0\]'"),
        (lambda rows: rows[1].update(args=[{"node": 4711}]), "refers to node 4711"),
        (lambda rows: rows[1].update(args=[{"node": 1, "more": 2}]), "is invalid"),
        (
            lambda rows: rows[1].update(
                buffers=[{"nbytes": 1, "first": 0, "last": 999, "kind": "other"}]
            ),
            "refers to node 999",
        ),
        (lambda rows: rows.pop(), "truncated"),
    ],
)
def test_inconsistent_snapshots_are_refused_with_the_reason(tmp_path, change, message):
    with fake_world(2, 0):
        snapshot = (
            Describer(TARGETS["h100"])
            .graph("joint")
            .snapshot(joint([Param((4, 2))], 0, 2).graph, 0)
        )
    path = write_snapshot(tmp_path, snapshot)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DamagedDumpError, match=message) as caught:
        SnapshotFiles({0: path}, Limits()).load(0)
    assert str(path) in str(caught.value)
