"""The option `memory_budget`: what a step keeps, recomputes and moves within it."""

import copy
import logging
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from tests.on_ranks import on_ranks
from tests.zpasses.backend.budgets import SCHEDULED, X, peak
from tests.zpasses.models import Blocks
from zpasses import MemoryBudgetError, OptionError
from zpasses.cost.memory import device_memory
from zpasses.graph.queries import collectives
from zpasses.graph.tags import tagged
from zpasses.pipeline.events import observe_graphs
from zpasses.pipeline.options import Options
from zpasses.runtime.free_memory import agreed_free_bytes
from zpasses.runtime.gloo import STARTED
from zpasses.testing import (
    capture_graphs,
    run_in_fresh_ranks,
    run_on_ranks,
    world_mesh,
)

TARGET = {"target": "h100"}


@cache
def captured(budget):
    """Tests share captures and do not change them."""
    options = {**TARGET, "memory_budget": budget}
    return capture_graphs(Blocks(), (X,), world_size=2, pipeline=SCHEDULED, options=options)


def regathered(capture):
    """Bytes that backward gathers."""
    return sum(tag.nbytes for _, tag in tagged(capture.after.backward.graph, "gather"))


def test_percentage_counts_from_the_least_peak_with_overlap_and_more_memory_gathers_less():
    gathered = [regathered(captured(budget)) for budget in ("0%", "60%", "100MiB")]
    assert gathered[0] > gathered[1] >= gathered[2] == 0


def test_without_the_option_parameters_share_the_memory_of_the_schedule():
    def captured(pipeline):
        return capture_graphs(Blocks(), (X,), world_size=2, pipeline=pipeline, options=TARGET)

    lean, some, rich = (
        captured(f"zero3{{schedule.memory_budget={rise}}}") for rise in ("0%", "20%", "300%")
    )
    assert regathered(lean) > regathered(some) > regathered(rich) == 0
    assert peak(lean) < peak(some) <= 1.2 * peak(lean)
    unscheduled = captured("zero3{schedule.plan=one-ahead}")
    assert regathered(unscheduled) == regathered(lean)
    for ample in ("1GiB", "10% of 1GiB", "+1MiB of 1GiB"):
        assert regathered(captured(f"zero3{{schedule.memory_budget={ample}}}")) == 0


def test_two_schedules_keep_to_a_budget_each():
    both = "zero3,schedule{memory_budget=0%}"
    capture = capture_graphs(Blocks(), (X,), world_size=2, pipeline=both, options=TARGET)
    assert regathered(capture) == regathered(captured("0%"))
    ran = [each.text for each in capture.records if each.name == "schedule"]
    assert "schedule{memory_budget=0%}" in ran


@pytest.fixture(scope="module")
def lean_peak():
    return peak(captured("0%"))


@pytest.mark.slow(
    quick="test_percentage_counts_from_the_least_peak_with_overlap_and_more_memory_gathers_less"
)
def test_peak_stays_within_every_budget_and_more_memory_gathers_less(lean_peak):
    budgets = [int(lean_peak * factor) for factor in (0.9, 1.1, 3.0)]
    found = [captured(f"{budget}B") for budget in budgets]
    for budget, capture in zip(budgets, found, strict=True):
        assert peak(capture) <= budget
    gathered = [regathered(capture) for capture in found]
    assert gathered == sorted(gathered, reverse=True)
    assert gathered[0] > 0
    assert gathered[-1] == 0


def test_too_small_budget_says_what_is_missing_and_what_holds_the_memory():
    with pytest.raises(Exception, match="MemoryBudgetError") as caught:
        captured("40KiB")
    text = str(caught.value)
    assert "memory_budget='40KiB': the leanest plan" in text
    assert " more than the budget. At its peak, in " in text
    assert "the largest values are: " in text
    assert MemoryBudgetError.__name__ in text


def test_kept_parameters_are_noted_in_the_graph_and_the_log(caplog):
    with caplog.at_level(logging.INFO, "zpasses"):
        capture = captured.__wrapped__("100MiB")  # a capture that others share logs nothing
    kept = [tag.params for _, tag in tagged(capture.after.forward.graph, "full") if tag.kept]
    assert ("head.weight",) in kept
    (line,) = [text for text in caplog.messages if "until backward" in text]
    assert "predicted" in line
    assert "bound" in line


# --- graphs that are not a whole step ------------------------------------------------------------
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.rest = Blocks(), nn.Linear(32, 32)

    def forward(self, x):
        return self.part(x)


@pytest.mark.slow(quick="test_kept_parameters_are_noted_in_the_graph_and_the_log")
def test_a_part_of_the_model_keeps_nothing_by_itself():
    """Other parts run between its forward and its backward, and their peaks are not known."""
    how = {"world_size": 2, "pipeline": "zero3"}
    part = capture_graphs(
        Whole(), (X,), shard=lambda model, mesh: zpasses.shard(model, mesh=mesh), **how
    )
    assert regathered(part) > regathered(capture_graphs(Blocks(), (X,), **how))


KEEPS_NOTHING = (
    "gather-params,reduce-grads,reshard-after-forward{keep=nothing},schedule,defer-reduction"
)


@pytest.mark.slow(quick="test_too_small_budget_says_what_is_missing_and_what_holds_the_memory")
def test_budget_bounds_pipelines_that_keep_nothing_themselves(caplog):
    """They merge and start early within it, and recompute activations only if they must."""

    def captured(budget):
        options = {**TARGET, "memory_budget": budget}
        return capture_graphs(Blocks(), (X,), world_size=2, pipeline=KEEPS_NOTHING, options=options)

    def launches(capture):
        graphs = capture.after.forward.graph, capture.after.backward.graph
        return sum(len(list(collectives(graph))) for graph in graphs)

    rich = captured("100MiB")
    poor = captured(f"{int(0.9 * peak(rich))}B")
    assert launches(rich) <= launches(poor)
    assert (launches(rich), peak(poor)) < (launches(poor), peak(rich))
    least = int(peak(poor) * 0.9)
    assert peak(captured(f"{least}B")) <= least
    assert "bounds each graph by itself" not in caplog.text
    assert regathered(rich) == regathered(poor)


# --- options -------------------------------------------------------------------------------------
def test_budget_needs_a_pipeline_that_plans():
    with pytest.raises(OptionError, match="needs the pass 'schedule'"):
        Options.parse({"memory_budget": "1GiB", "pipeline": "gather-params,reduce-grads"})
    with pytest.raises(OptionError, match="got 'much'; expected how far the peak"):
        Options.parse({"memory_budget": "much"})
    for stage in (1, 2, 3):
        options = Options.parse({"memory_budget": "1GiB", "zero_stage": stage})
        assert "schedule" in [each.name for each in options.passes()]


# --- on ranks ------------------------------------------------------------------------------------
def _trained(budget, rows):
    torch.manual_seed(0)
    model = Blocks()
    zpasses.shard(model, mesh=world_mesh())
    gathers = []

    def observe(graph):
        if graph.kind == "backward":
            gathers.append([tag.params for _, tag in tagged(graph.graph, "gather")])

    with observe_graphs(observe):
        step = torch.compile(
            model, backend="zpasses", options={"codegen": "eager", "memory_budget": budget}
        )
        step(X[: rows[dist.get_rank()]]).backward()
    return gathers


@pytest.mark.processes
@pytest.mark.parametrize("budget", ["20%", "150KiB"])
@pytest.mark.slow(quick="test_auto_trains")
def test_ranks_with_uneven_shards_and_batches_agree(budget):
    """Their memory differs, so each would decide otherwise."""
    outcomes = run_in_fresh_ranks(_trained, budget, (8, 48, 16), ranks=3, timeout_s=100)
    assert all(each.ok for each in outcomes), "\n".join(map(str, outcomes))
    assert outcomes[0].result == outcomes[1].result == outcomes[2].result


def _step_by_default(pipeline):
    """Returns the gradients of a step with the defaults of stage 3 and Inductor's code, and the
    bytes that this rank sent to gather in backward.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Blocks()
    zpasses.shard(model, mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={**TARGET, "pipeline": pipeline})
    loss = step(X.chunk(2)[dist.get_rank()])
    before = STARTED.sent_bytes["all_gather"]
    loss.backward()
    sent = STARTED.sent_bytes["all_gather"] - before
    return [param.grad.to_local() for param in model.parameters()], sent


def _kept_by_default():
    (default, few), (kept_nothing, most) = map(
        _step_by_default, (None, "zero3{schedule.memory_budget=0%}")
    )
    same = all(torch.equal(a, b) for a, b in zip(default, kept_nothing, strict=True))
    return same, 0 < few < most


@pytest.mark.processes
@pytest.mark.inductor
def test_parameters_that_are_kept_by_default_change_no_bit_of_inductors_code():
    assert run_on_ranks(_kept_by_default, timeout_s=280) == [(True, True)] * 2


@on_ranks(2)
def test_auto_takes_what_is_free_on_the_rank_with_the_least():
    free = (1 << 20, 1 << 30)[dist.get_rank()]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setattr(device_memory, "free_bytes", lambda device: 2 * free)
        assert agreed_free_bytes(["0"], torch.device("cpu")) == int(0.9 * (1 << 20))


@on_ranks(2)
def test_auto_trains():
    (gathers,) = _trained("auto", (8, 8))
    assert gathers == []  # there is memory for everything


def test_auto_needs_a_device_that_can_tell(monkeypatch):
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: None)
    with pytest.raises(OptionError, match="torch cannot tell how much memory meta has free"):
        agreed_free_bytes([], torch.device("meta"))


def test_limit_of_the_container_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(device_memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1500000\n")
    assert device_memory.free_bytes(torch.device("cpu")) == 1500000
    (tmp_path / "memory.stat").write_text("anon 900000\nfile 600000\ninactive_file 500000\n")
    assert device_memory.free_bytes(torch.device("cpu")) == 2000000
    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory.free_bytes(torch.device("cpu")) > 2000000


# --- parameters that are cached throughout a step -------------------------------------------------
def _bytes_gathered(budget, backwards_per_step, frozen=()):
    """Trains two optimizer steps like the unsharded model.

    Returns the bytes that this rank sent to gather in each forward.
    """
    torch.manual_seed(0)
    model = Blocks()
    model.requires_grad_(True)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    plain = copy.deepcopy(model)
    zpasses.shard(model, mesh=world_mesh())
    # With slow links, every byte less is faster.
    target = "h100,link_gb_s=0.01,network_gb_s=0.01"
    options = {"codegen": "eager", "backwards_per_step": backwards_per_step, "target": target}
    if budget is not None:
        options["memory_budget"] = budget
    step = torch.compile(model, backend="zpasses", options=options)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (model, plain)]
    sent = []
    for _ in range(2):
        for number in range(backwards_per_step):
            rows = X[8 * number : 8 * number + 8].chunk(ranks)
            before = STARTED.sent_bytes["all_gather"]
            loss = step(rows[rank])
            sent.append(STARTED.sent_bytes["all_gather"] - before)
            loss.backward()
            for part in rows:
                (plain(part) / ranks).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = zpasses.full_state_dict(model, rank0_only=False)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(full[name], value, rtol=1e-6, atol=1e-7)
    return sent


@on_ranks(2)
@pytest.mark.slow(quick="test_auto_trains")
def test_windows_gather_once_per_step_what_the_budget_allows():
    lean = _bytes_gathered(None, 3)
    assert len(set(lean)) == 1
    rich = _bytes_gathered("100MiB", 3)
    assert rich[0] == rich[3] == lean[0]
    assert 0 <= rich[1] == rich[2] == rich[4] == rich[5] < 0.2 * lean[0]  # what only forward reads
    some = _bytes_gathered("60%", 3)
    assert some[0] == lean[0]
    assert rich[1] < some[1] < lean[0]


@on_ranks(2)
@pytest.mark.slow(quick="test_auto_trains")
def test_frozen_parameters_are_gathered_once_if_the_budget_allows():
    frozen = ("up.1", "down.2")
    sent = _bytes_gathered("100MiB", 1, frozen)
    assert sent[1] < sent[0]
    assert _bytes_gathered(None, 1, frozen)[1] == sent[0]
