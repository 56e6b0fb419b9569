"""The option `tuned`, and the part of `zpasses tune` within a training process."""

import json
import logging
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from tests.cases import some_quick
from tests.zpasses.backend.test_memory_budget import Blocks, X
from zpasses import OptionError
from zpasses.backend import step_trials, tuned, tuning
from zpasses.backend.tuning import REQUEST_FILE, read_reports
from zpasses.graph.tags import tagged
from zpasses.pipeline.observers import observe_graphs
from zpasses.pipeline.options import Options
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


@pytest.fixture(scope="module")
def plain():
    return regathered(target="h100")


@pytest.fixture(scope="module")
def entry(tmp_path_factory):
    """The file's content for the model of these tests, with a pipeline that `captured` shows."""
    keys = []
    original = tuned.graph_key

    def note_key(capture):
        keys.append(original(capture))
        return keys[-1]

    path = tmp_path_factory.mktemp("entry") / "tuned.json"
    tuned.remember(path, ["another graph"], {"world": 2}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "graph_key", note_key)
        regathered(tuned=path, target="h100")
    place = {
        "world": 2,
        "target": "h100",
        "stage": 3,
        "codegen": "eager",
        "torch": torch.__version__,
        "zpasses": zpasses.__version__,
    }
    return {"graph": keys[-1], "place": place, "options": {"pipeline": LEAN}}


def written(tmp_path, content):
    path = tmp_path / "some.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.slow(quick="test_file_that_does_not_match_is_named_and_ignored")
def test_options_of_the_entry_replace_the_stage(plain, entry, tmp_path):
    path = written(tmp_path, {"format": 1, "entries": [entry]})
    assert regathered(target="h100", tuned=path) > plain
    path = written(tmp_path, changed(entry, options={"memory_budget": "100MiB"}))
    assert regathered(target="h100", tuned=path) == 0 < plain


def changed(entry, **changes):
    return {"format": 1, "entries": [{**entry, **changes}]}


MISMATCHES = [
    (lambda entry: "{", "it is no file of tuned options"),
    (lambda entry: [], "it is no file of tuned options"),
    (lambda entry: {"format": 2}, r"got format 2; this release reads 1"),
    (lambda entry: {"format": 1, "entries": [{"graph": 1}]}, "it is no file of tuned"),
    (lambda entry: changed(entry, graph="x"), "it was tuned for other graphs"),
    (
        lambda entry: changed(entry, place={**entry["place"], "world": 64}),
        "world was 64 and is 2. Run `zpasses tune` again",
    ),
    (
        lambda entry: changed(entry, place={**entry["place"], "torch": "2.0"}),
        "torch was 2.0 and is",
    ),
    (lambda entry: changed(entry, options={"verify": "off"}), "its entry sets verify"),
    (
        lambda entry: changed(entry, options={"pipeline": "no-such-pass"}),
        "its entry has options that do not work: .*no-such-pass",
    ),
    (None, "there is no such file"),
]


@pytest.mark.parametrize(
    ("content", "reason"),
    some_quick(MISMATCHES, [MISMATCHES[at] for at in (0, 5, 8)]),
)
def test_file_that_does_not_match_is_named_and_ignored(
    plain, entry, tmp_path, caplog, content, reason
):
    path = tmp_path / "missing.json" if content is None else written(tmp_path, content(entry))
    with caplog.at_level(logging.WARNING, "zpasses"):
        assert regathered(target="h100", tuned=path) == plain
    (message,) = [text for text in caplog.messages if "is ignored on all ranks" in text]
    assert str(path) in message
    assert re.search(reason, message)


@pytest.mark.parametrize("other", [{"pipeline": "zero2"}, {"memory_budget": "1GiB"}])
def test_what_the_file_chooses_cannot_be_given(other):
    with pytest.raises(OptionError, match=f"chooses {next(iter(other))}"):
        Options.parse({"tuned": "a.json", **other})


def test_remember_keeps_the_entries_of_other_graphs_and_places(tmp_path):
    path = tmp_path / "tuned.json"
    tuned.remember(path, ["a", "b"], {"world": 2}, {"memory_budget": "1GiB"})
    tuned.remember(path, ["a"], {"world": 4}, {"memory_budget": "2GiB"})
    tuned.remember(path, ["a"], {"world": 2}, {"memory_budget": "3GiB"})
    entries = json.loads(path.read_text())["entries"]
    found = {(each["graph"], each["place"]["world"]): each["options"] for each in entries}
    assert found == {
        ("a", 2): {"memory_budget": "3GiB"},
        ("b", 2): {"memory_budget": "1GiB"},
        ("a", 4): {"memory_budget": "2GiB"},
    }


# --- real ranks -----------------------------------------------------------------------------------
def train(paths=None, steps=3):
    """Trains a small model, and returns the number of gathers in its backward."""
    torch.manual_seed(0)
    model = zpasses.shard(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), mesh=world_mesh())
    options = {"codegen": "eager", "target": "h100", "agreement_timeout_s": 20}
    if paths is not None:
        options["tuned"] = paths[dist.get_rank()]
    step = torch.compile(model, backend="zpasses", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe_graphs(backwards := Backwards()):
        for _ in range(steps):
            step(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return backwards.gathers


def run_ranks(*args, **options):
    outcomes = run_in_fresh_ranks(train, *args, **options)
    assert all(each.ok for each in outcomes), outcomes
    return [each.result for each in outcomes]


@pytest.mark.processes
@pytest.mark.slow(quick="test_file_that_does_not_match_is_named_and_ignored")
def test_tune_measures_a_run_and_all_ranks_follow_the_first_reading(tmp_path):
    request = {"options": {"pipeline": LEAN}, "warmup": 1, "steps": 2, "budgets": 0}
    (tmp_path / REQUEST_FILE).write_text(json.dumps(request))
    gathers = run_ranks(env={tuning.ENVIRONMENT_VARIABLE: str(tmp_path)})
    assert min(gathers) > 0  # a model this small keeps everything otherwise
    reports = read_reports(tmp_path)
    assert [each.rank for each in reports] == [0, 1]
    assert all(0 < each.spread_us[0] <= each.step_us <= each.spread_us[1] for each in reports)
    assert all(each.world == 2 and each.stage == 3 for each in reports)

    path = str(tmp_path / "tuned.json")
    first = reports[0]
    tuned.remember(tmp_path / "tuned.json", list(first.graphs), first.place, request["options"])
    missing = str(tmp_path / "missing.json")
    assert run_ranks([path, missing]) == gathers
    assert run_ranks([missing, path]) == [0, 0]


@pytest.mark.slow(quick="test_file_that_does_not_match_is_named_and_ignored")
def test_plans_that_the_next_runs_try(tmp_path, monkeypatch):
    request = {"options": None, "warmup": 1, "steps": 1, "budgets": 6}
    (tmp_path / REQUEST_FILE).write_text(json.dumps(request))
    monkeypatch.setenv(tuning.ENVIRONMENT_VARIABLE, str(tmp_path))
    monkeypatch.setattr(tuning, "_sessions", {})
    monkeypatch.setattr(step_trials, "_observers", [])
    regathered(target="h100")
    (session,) = tuning._sessions.values()
    found = session.candidates
    assert len(found) > 1
    peaks = [each.peak_bytes for each in found]
    assert peaks == sorted(peaks)
    for each in found:
        assert Options.parse({"memory_budget": each.budget}).memory_budget == each.budget
