"""Tests of the inspector on the dump of a real compile."""

import itertools
import json

import pytest

import zpasses
from tests.zpasses.inspect.real import ExtraParameter, Layers, dump_training_step, real_dump
from zpasses.inspect import DumpError, compare
from zpasses.inspect import open as open_dump
from zpasses.inspect.report.payload import payload
from zpasses.inspect.units import time_text


@pytest.fixture(scope="module")
def dump():
    return zpasses.inspect.open(real_dump()[0])


@pytest.mark.parametrize("kind", ["joint", "forward", "backward"])
def test_memory_equals_the_liveness_model(dump, kind):
    expected = real_dump()[1][kind]
    shown = dump.memory_of(kind)
    assert shown.live_bytes == expected
    assert shown.peak_bytes == shown.nbytes == max(expected) == sum(shown.by_kind.values())
    for at, node in enumerate(shown.snapshot.nodes):
        assert dump.memory_of(kind, at=node.name).nbytes == expected[at]


def test_differences_of_passes_add_up(dump):
    joint = dump.dump.ranks[0].compiles[0].graphs["joint"]
    nodes = len(joint.steps[0].snapshot.nodes)
    for before, after in itertools.pairwise(joint.steps):
        counts = compare(before.snapshot, after.snapshot).counts
        nodes += counts.get("inserted", 0) - counts.get("removed", 0)
        assert nodes == len(after.snapshot.nodes)
    whole = dump.diff_of_steps("joint", 0, len(joint.steps) - 1)
    assert {change.node.target for change in whole.of_kind("removed")} == {
        "zpasses.unshard.default",
        "zpasses.reduce_grad.default",
    }


def test_reshard_after_forward_appears_as_recompute_marks(dump):
    difference = dump.diff_of("joint", "reshard-after-forward")
    assert set(difference.counts) == {"recompute-changed"}
    assert {change.detail for change in difference.changes} == {"no mark -> recomputed"}
    roles = {change.node.tag.role for change in difference.changes if change.node.tag}
    assert {"gather", "full"} <= roles
    assert len(difference.changes) == dump.step_of("joint", "reshard-after-forward").run.changes
    listed = str(dump.show("joint", "reshard-after-forward")).splitlines()
    assert sum(line.endswith(" recomputed") for line in listed) == len(difference.changes)
    assert "recomputed" not in str(dump.show("joint", "reduce-grads"))


def test_every_gather_has_a_row_with_its_parameters(dump):
    before, after = dump.collectives_of("forward", 0), dump.collectives_of("forward")
    assert [row.params for row in before.rows] == [(f"layers.{i}.weight",) for i in range(3)]
    (bucket,) = after.rows
    assert bucket.params == tuple(f"layers.{i}.weight" for i in range(3))
    assert (bucket.route, bucket.nbytes) == ("coalesced", 3 * 8192)
    assert after.schedule.exposed_us < before.schedule.exposed_us


def test_trace_has_two_tracks_per_graph_and_the_times_of_the_schedule(dump):
    events = json.loads(json.dumps(dump.timeline()))["traceEvents"]
    threads = [event for event in events if event["name"] == "thread_name"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in threads}
    assert sorted(names.values()) == ["communication", "communication", "compute", "compute"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["0/0 forward", "0/0 backward"]
    slices = [event for event in events if event["ph"] == "X"]
    for process, kind in ((1, "forward"), (2, "backward")):
        plan = dump.schedule_of(kind)
        took = dict.fromkeys(("compute", "communication", "exposed"), 0.0)
        for event in slices:
            if event["pid"] == process:
                of_track = names[process, event["tid"]]
                took["exposed" if event["cat"] == "exposed" else of_track] += event["dur"]
        assert took == pytest.approx({name: getattr(plan, f"{name}_us") for name in took})
    for track in names:  # slices of a track do not overlap
        of_track = [event for event in slices if (event["pid"], event["tid"]) == track]
        own = sorted((event["ts"], event["ts"] + event["dur"]) for event in of_track)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(own))


def test_a_folder_that_is_no_dump_is_refused(tmp_path):
    with pytest.raises(DumpError, match="is not a dump"):
        zpasses.inspect.open(tmp_path)


@pytest.mark.parametrize("graph", ["joint", "forward", "backward"])
def test_one_extra_parameter_is_a_short_difference(tmp_path_factory, graph):
    pipeline = "gather-params,reduce-grads"
    both = []
    for model in (Layers, ExtraParameter):
        folder = tmp_path_factory.mktemp(model.__name__)
        dump_training_step(folder, model=model, pipeline=pipeline)
        both.append(open_dump(folder))
    (found,) = both[0].diff_to(both[1], graph).data["graphs"]
    assert found["counts"].get("renamed", 0) == 0
    assert found["counts"].get("moved", 0) <= 1
    assert found["counts"].get("removed", 0) == 0
    assert sum(found["counts"].values()) <= 17


def test_exposed_time_is_one_number_in_list_collectives_and_on_the_page():
    dump = open_dump(real_dump()[0])
    (compiled,) = payload(dump.dump, 0, None)["compiles"]
    listed = [line.split("  ") for line in str(dump.overview()).splitlines()]
    graphs = dump.dump.ranks[0].compiles[0].graphs
    predicted = {name: graph for name, graph in graphs.items() if graph.prediction}
    assert set(predicted) == {"forward", "backward"}
    for name, graph in predicted.items():
        plan = dump.schedule_of(name)
        assert plan.exposed_us > 0
        assert graph.prediction.exposed_us == pytest.approx(plan.exposed_us, abs=0.01)
        assert graph.prediction.total_us == pytest.approx(plan.total_us, abs=0.01)
        text = time_text(plan.exposed_us)
        (row,) = [each for each in listed if each[0] == name and "█" in each[-1]]
        assert [cell.strip() for cell in row if cell.strip()][2] == text
        assert f"exposed {text}" in str(dump.collectives(name))
        rows = dump.collectives_of(name).rows
        assert sum(row.exposed_us for row in rows) == plan.exposed_us
        (steps,) = [each["steps"] for each in compiled["graphs"] if each["name"] == name]
        shown = next(each for each in steps if each["number"] == graph.last.number)
        assert shown["schedule"]["exposed"] == pytest.approx(plan.exposed_us, abs=0.001)
        assert shown["schedule"]["total"] == pytest.approx(plan.total_us, abs=0.001)
