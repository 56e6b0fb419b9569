"""The part of `zpasses tune` within a training process."""

import pytest
import torch
from torch import nn

import zpasses
from tests.zpasses.backend.budgets import X
from tests.zpasses.models import Blocks
from zpasses.backend import tuning
from zpasses.backend.tuning import step_reports
from zpasses.graph.tags import tagged
from zpasses.pipeline import events
from zpasses.pipeline.events import observe_graphs
from zpasses.pipeline.options import Options
from zpasses.probe import ENVIRONMENT_VARIABLE, TuningRequest, write_request
from zpasses.testing import fake_world, run_in_fresh_ranks, world_mesh

LEAN = "merge-reads,gather-params,reduce-grads,reshard-after-forward{keep=nothing}"


def regathered(**options):
    """Compiles a step, and returns the number of gathers in its backward."""
    torch._dynamo.reset()
    with fake_world(2):
        model = zpasses.shard(Blocks(), mesh=world_mesh())
        step = torch.compile(model, backend="zpasses", options={"codegen": "eager", **options})
        with observe_graphs(backwards := Backwards()):
            step(X).backward()
    return backwards.gathers


class Backwards:
    gathers = None

    def __call__(self, graph):
        if graph.kind == "backward":
            self.gathers = len(list(tagged(graph.graph, "gather")))


# --- real ranks -----------------------------------------------------------------------------------
def train(steps=3):
    """Trains a small model, and returns the number of gathers in its backward."""
    torch.manual_seed(0)
    model = zpasses.shard(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), mesh=world_mesh())
    options = {"codegen": "eager", "target": "h100", "agreement_timeout_s": 20}
    step = torch.compile(model, backend="zpasses", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe_graphs(backwards := Backwards()):
        for _ in range(steps):
            step(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return backwards.gathers


@pytest.mark.processes
def test_tune_measures_a_run_on_all_ranks(tmp_path):
    request = TuningRequest({"pipeline": LEAN}, warmup=1, steps=2, budgets=0)
    outcomes = run_in_fresh_ranks(train, env=write_request(tmp_path, request))
    assert all(each.ok for each in outcomes), outcomes
    # A model this small keeps everything otherwise.
    assert min(each.result for each in outcomes) > 0
    reports = step_reports(tmp_path)
    assert [each.rank for each in reports] == [0, 1]
    assert all(0 < each.spread_us[0] <= each.step_us <= each.spread_us[1] for each in reports)
    assert all((each.world, each.stage, each.target) == (2, 3, "h100") for each in reports)


@pytest.mark.slow(quick="test_tune_measures_a_run_on_all_ranks")
def test_plans_that_the_next_runs_try(tmp_path, monkeypatch):
    write_request(tmp_path, TuningRequest(None, warmup=1, steps=1, budgets=6))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path))
    monkeypatch.setattr(tuning, "_sessions", {})
    monkeypatch.setattr(events, "_listeners", [])
    regathered(target="h100")
    (session,) = tuning._sessions.values()
    found = session.candidates
    assert len(found) > 1
    peaks = [each.peak_bytes for each in found]
    assert peaks == sorted(peaks)
    for each in found:
        assert Options.parse({"memory_budget": each.budget}).memory_budget == each.budget
