"""Predictions: what is achieved, what is possible, and the bound, for the graphs of a compile."""

import logging

import pytest
import torch
from torch import nn

from tests.zpasses.backend.budgets import X
from tests.zpasses.models import Blocks
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.plan.schedule_problem import problem_of
from zpasses.cost.time.step_time import step_time
from zpasses.cost.time.target import Target
from zpasses.dumps import read
from zpasses.inspect import open as open_dump
from zpasses.passes import ZERO3, Schedule
from zpasses.pipeline import predictor as predictor_module
from zpasses.pipeline.base_pass import Level
from zpasses.pipeline.events import Events, run_reported_passes
from zpasses.pipeline.predictor import Predictor
from zpasses.testing import capture_graphs, fake_world

H100 = Target.parse("h100")
UNMERGED = Schedule("one-ahead", cap_mb=0)


def dumped(folder, pipeline, model=None, **options):
    """The graphs of the dump of a step."""
    options = {"target": "h100", "dump": folder, **options}
    capture_graphs(model or Blocks(), (X,), world_size=2, pipeline=pipeline, options=options)
    (found,) = read(folder).ranks[0].compiles
    return found.graphs


UNMOVED = "gather-params,reduce-grads,reshard-after-forward"


@pytest.mark.parametrize("pipeline", ["zero2-one-ahead", UNMOVED])
def test_pipelines_could_be_faster_and_no_schedule_beats_the_bound(tmp_path, pipeline):
    graphs = dumped(tmp_path, pipeline)
    for name in ("forward", "backward"):
        found = graphs[name].prediction
        assert found.bound_us <= found.possible_us <= found.total_us
        assert found.peak_bytes <= found.limit_bytes
        assert found.number == graphs[name].last.number
        assert 0 < found.exposed_us < found.total_us
    assert graphs["joint"].prediction is None
    if pipeline == UNMOVED:
        assert found.possible_us < found.total_us


def test_figures_are_those_of_the_graph_after_its_passes():
    pipeline = ",".join(str(each) for each in ZERO3.at(Level.JOINT))
    graph = capture_graphs(Blocks(), (X,), world_size=2, pipeline=pipeline).after.backward.graph
    with fake_world(2):
        lean = problem_of(graph, H100)
        predictor = Predictor(H100)
        run_reported_passes(Events((predictor,)), "backward", "backward", graph, (UNMERGED,))
        found = predictor.predicted(graph)
        time = step_time([graph], H100)
        assert (found.total_us, found.exposed_us) == (time.total_us, time.exposed_us)
        assert found.peak_bytes == liveness(graph).peak_bytes
        assert found.collectives == len(lean.jobs)


def test_a_model_that_fails_ends_no_compile_and_only_a_dump_needs_it(tmp_path, caplog, monkeypatch):
    def fails(*_, **__):
        raise ValueError("an odd graph")

    monkeypatch.setattr(predictor_module, "problem_of", fails)
    capture_graphs(Blocks(), (X,), world_size=2, pipeline="zero3", options={"target": "h100"})
    failed = "no prediction for a graph: ValueError: an odd graph"
    assert failed not in caplog.text
    graphs = dumped(tmp_path, "zero3")
    assert graphs["forward"].prediction is None
    assert failed in caplog.text


def test_dynamic_shapes_are_dumped(tmp_path):
    options = {"target": "h100", "dump": tmp_path}
    step = {"world_size": 2, "pipeline": "zero3", "dynamic": True, "options": options}
    capture_graphs(nn.Linear(8, 8), (torch.ones(4, 8),), **step)
    (found,) = read(tmp_path).ranks[0].compiles
    assert found.info.state == "done"


# --- readers -------------------------------------------------------------------------------------
def test_predictions_are_logged_and_pages_show_them(tmp_path, caplog):
    """A scheduled graph achieves what is possible."""
    with caplog.at_level(logging.INFO, "zpasses"):
        graphs = dumped(tmp_path, "zero3", memory_budget="1MiB")
    for name in ("forward", "backward"):
        found = graphs[name].prediction
        assert found.total_us == found.possible_us
        assert found.limit_bytes == 1 << 20
    lines = [text for text in caplog.messages if "achieved" in text]
    assert len(lines) == 2
    assert all(" possible within " in line and ", bound " in line for line in lines)
    dump = open_dump(tmp_path)
    overview = dump.overview()
    assert "Predicted time\ngraph       achieved" in str(overview)
    (compiled,) = overview.data["compiles"]
    values = {each["name"]: each["prediction"] for each in compiled["graphs"]}
    assert values["backward"]["bound_us"] == found.bound_us
    assert values["joint"] is None
    last = dump.collectives("backward")
    assert "Achieved " in str(last)
    assert "possible within the budget (" in str(last)
    assert last.data[0]["prediction"]["possible_us"] == found.possible_us
    first = dump.collectives("backward", 0)
    assert "Achieved" not in str(first), "the prediction is not about the graph before its passes"
    assert first.data[0]["prediction"] is None
    (events,) = tmp_path.glob("rank0/*/events.jsonl")
    kept = [line for line in events.read_text().splitlines() if '"prediction"' not in line]
    events.write_text("\n".join(kept) + "\n")
    assert "Predicted" not in str(open_dump(tmp_path).overview())
