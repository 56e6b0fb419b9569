"""The option `host_memory`: saved values rest on the host where that is the best way into the
memory budget, and the step has the same bits.
"""

import functools
import gc
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import zpasses
from tests.cases import some_quick
from tests.frozen_training import assert_same
from tests.on_ranks import on_ranks
from tests.zpasses.backend.budgets import peak, within_compile
from tests.zpasses.backend.values_on_host import TARGET, Net, X, copies
from tests.zpasses.cost.memory.allocations import allocated
from tests.zpasses.dumps.written import only_compile
from zpasses import AgreementError, MemoryBudgetError, OptionError, compat
from zpasses.cost.memory import device_memory
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.plan.leaving_values import rank_leaving
from zpasses.cost.time.fused_kernels import use_fusion
from zpasses.host import host_pool
from zpasses.host.host_pool import agreed_host_bytes, available_host_bytes
from zpasses.host.saved_arenas import HostBytes, SavedArenas, host
from zpasses.option_values import parse_size
from zpasses.pipeline.events import observe_graphs
from zpasses.pipeline.options import Options
from zpasses.testing import capture_graphs, world_mesh
from zpasses.tools.cli.main import cli


def model(layers=4):
    torch.manual_seed(0)
    return Net(64, layers)


@functools.cache
def captured(**options):
    return capture_graphs(
        model(), (X,), world_size=2, pipeline="zero3", options={"target": TARGET, **options}
    )


# --- what is chosen -------------------------------------------------------------------------------
def test_where_the_budget_has_room_graphs_are_the_same_node_for_node():
    with_host, without = (
        captured(memory_budget="1GiB", **more) for more in ({"host_memory": "1GiB"}, {})
    )
    for side in ("forward", "backward"):
        graphs = [getattr(each.after, side).graph for each in (with_host, without)]
        listed = [[(node.name, str(node.target)) for node in graph.nodes] for graph in graphs]
        assert listed[0] == listed[1]


def test_the_host_makes_room_and_each_copy_out_comes_back():
    whole = peak(captured(memory_budget="1GiB"))
    found = captured(memory_budget=f"{int(0.6 * whole)}B", host_memory="1GiB")
    out, back = (copies(each.graph) for each in (found.after.forward, found.after.backward))
    assert out
    assert sorted(each.nbytes for each in out) == sorted(each.nbytes for each in back)
    assert {each.direction for each in out} | {each.direction for each in back} == {"out", "in"}
    assert peak(found) <= int(0.6 * whole)


@pytest.mark.slow(quick="test_the_host_makes_room_and_each_copy_out_comes_back")
def test_plans_keep_to_both_memories_and_their_graphs_hold_what_they_say():
    def check(trials):
        assert trials.host_bytes == 8 << 20
        lean = trials.trial(1.0).step.peak_bytes()
        seen = set()
        for share in (0.9, 0.7, 0.5):
            plan = trials.fastest(int(share * lean))
            seen.add(plan.host_bytes)
            assert plan.host_bytes <= trials.host_bytes
            assert plan.fits
            graphs = trials.graphs(plan.choice)
            out = sum(each.nbytes for each in copies(graphs[0].graph))
            assert out == plan.host_bytes == sum(each.nbytes for each in copies(graphs[1].graph))
            # Where each copy is awaited at once, the graphs hold no more than the plan says.
            assert max(liveness(each.graph).peak_bytes for each in graphs) <= plan.limit_bytes
        assert len(seen) > 1
        with_host = trials.least_bytes()
        trials.host_bytes = 0
        trials._saved.clear()
        assert with_host < trials.least_bytes()

    within_compile(check, model(), target=TARGET, memory_budget="1GiB", host_memory="8MiB", x=X)


def test_values_that_are_not_idle_at_a_peak_above_the_limit_stay():
    def check(trials):
        trial = trials.trial(1.0)
        rich = trials._keeping_all(trial)
        values = trials.saved_values(1.0)
        assert len(values) > 5

        def leaving(limit, host_bytes=1 << 30):
            found = rank_leaving(trial.step, rich, values, {}, limit, host_bytes)
            assert all(each.on_host for each in found.ranked)
            return [each.value for each in found.ranked], found.fewest

        assert leaving(rich.peak_bytes()) == ([], 0)
        everything, _ = leaving(0)
        assert {each.name for each in everything} == {each.name for each in values}
        most = sum(each.nbytes for each in values) // 2
        some, _ = leaving(0, most)
        assert 0 < sum(each.nbytes for each in some) <= most
        limit = (trial.step.peak_bytes() + rich.peak_bytes()) // 3
        ranked, count = leaving(limit)
        assert 0 < count <= len(ranked)
        assert limit * 0.5 <= trials.offloading(trial, ranked[:count]).step.peak_bytes() <= limit
        assert trials.offloading(trial, ranked[: count - 1]).step.peak_bytes() > limit

    within_compile(check, model(), target=TARGET, memory_budget="1GiB", host_memory="1GiB", x=X)


# --- options --------------------------------------------------------------------------------------
def test_host_memory_is_a_size_beside_a_memory_budget():
    assert Options.parse({"memory_budget": "1GiB", "host_memory": "2GiB"}).host_memory == "2GiB"
    with pytest.raises(OptionError, match="needs memory_budget"):
        Options.parse({"host_memory": "2GiB"})
    with pytest.raises(OptionError, match="expected a size such as '2GiB'"):
        Options.parse({"memory_budget": "1GiB", "host_memory": "much"})
    assert Options.parse({"memory_budget": "1GiB", "host_memory": "2GiB", "prefetch": "auto"})


@pytest.mark.slow(quick="test_too_small_budget_says_what_is_missing_and_what_holds_the_memory")
def test_too_small_a_budget_names_values_that_come_back_by_their_shape():
    with pytest.raises(Exception, match="MemoryBudgetError") as caught:
        captured(memory_budget="40KiB", host_memory="1GiB")
    text = str(caught.value)
    assert " of them on the host," in text
    assert "[2048, 64] 512 KiB" in text
    assert "[1] " not in text


@pytest.mark.parametrize(("given", "said"), [(None, "', some of"), ("100KiB", " in place of ")])
def test_a_budget_that_fits_with_more_of_the_host_names_how_much(given, said):
    given = {} if given is None else {"host_memory": given}
    with pytest.raises(Exception, match="MemoryBudgetError") as caught:
        captured(memory_budget="7MiB", **given)
    (advice,) = re.findall(r"With host_memory='([^']*)'", str(caught.value))
    assert said in str(caught.value)
    assert " rests on the host, and a plan fits. Or raise the budget, " in str(caught.value)
    assert peak(captured(memory_budget="7MiB", host_memory=advice)) <= 7 << 20


@pytest.mark.slow(quick="test_a_budget_that_fits_with_more_of_the_host_names_how_much")
def test_where_the_host_helps_and_does_not_suffice_what_is_needed_then_is_said():
    with pytest.raises(Exception, match="MemoryBudgetError") as caught:
        captured(memory_budget="5MiB")
    assert re.search(
        r"With host_memory='\S+ MiB', .*and the leanest needs \S+ MiB\. Or raise", str(caught.value)
    )
    with pytest.raises(Exception, match=r"backward, the largest .*\. Raise the budget, ") as caught:
        captured(memory_budget="5MiB", host_memory="1GiB")
    assert "With host_memory" not in str(caught.value)


@on_ranks(2)
def test_what_is_free_on_the_host_does_not_depend_on_what_was_asked_before():
    group = compat.group_name(dist.group.WORLD)
    assert agreed_host_bytes([group], "1MiB", HostBytes()) == 1 << 20
    own = 1 + dist.get_rank()
    assert agreed_host_bytes([group], f"{own}MiB", HostBytes()) == own << 20
    with pytest.raises(MemoryBudgetError, match="is for each rank, and one of them has"):
        agreed_host_bytes([group], "1000000GiB", HostBytes())


def test_more_than_the_machine_has_for_each_rank_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 8 << 30)
    assert agreed_host_bytes([], "2GiB", HostBytes()) == 2 << 30
    assert agreed_host_bytes([], None, HostBytes()) == 0
    with pytest.raises(MemoryBudgetError, match=r"'3GiB'.* 2 GiB available") as error:
        agreed_host_bytes([], "3GiB", HostBytes())
    assert "The 4 ranks of this machine need 12 GiB together, and 8 GiB are" in str(error.value)


def test_what_is_promised_to_one_purpose_is_not_there_for_another(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 8 << 30)
    values, gradients = HostBytes(), HostBytes()
    arenas = SavedArenas(limit_bytes=1 << 30, pool=values)
    assert available_host_bytes() == 3 << 30
    with pytest.raises(MemoryBudgetError, match=r"'5GiB'.* 4 GiB available"):
        agreed_host_bytes([], "5GiB", values)
    owner = nn.Linear(1, 1)
    gradients.promise(2 << 30, owner)
    assert available_host_bytes() == 1 << 30
    with pytest.raises(MemoryBudgetError, match=r"'3GiB'.* 2 GiB available"):
        agreed_host_bytes([], "3GiB", values)
    assert agreed_host_bytes([], "1GiB", values) == 1 << 30
    with arenas.run(1 << 20, torch.device("cpu")):
        assert available_host_bytes() == (1 << 30) + (1 << 20)  # what is taken is not free any more
    del owner, arenas
    assert available_host_bytes() == 4 << 30


@on_ranks(2)
def test_all_ranks_refuse_what_one_machine_does_not_have():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        free = (4 << 30, 1 << 30)[dist.get_rank()]
        monkeypatch.setattr(device_memory, "free_bytes", lambda device: free)
        group = compat.group_name(dist.new_group())  # of which nothing is remembered
        with pytest.raises(MemoryBudgetError, match="one of them has 1 GiB"):
            agreed_host_bytes([group], "3GiB", HostBytes())


@on_ranks(2)
def test_a_rank_without_room_for_a_larger_limit_tells_the_others():
    """What was free at the vote is remembered, and may be taken on one rank by now."""
    group = compat.group_name(dist.group.WORLD)
    assert agreed_host_bytes([group], "1MiB", HostBytes()) == 1 << 20
    options = {"memory_budget": "1GiB", "host_memory": "2GiB", "agreement_timeout_s": 30.0}
    step = torch.compile(
        zpasses.shard(model(1), mesh=world_mesh()), backend="zpasses", options=options
    )
    free = 1 << 20 if dist.get_rank() else 1 << 40
    raised = "MemoryBudgetError" if dist.get_rank() else "AgreementError"
    with (
        mock.patch.object(device_memory, "free_bytes", return_value=free),
        mock.patch.object(host_pool, "_pools", []),
        pytest.raises(Exception, match=rf"{raised}[\s\S]*host_memory='2GiB'"),
    ):
        step(torch.ones(4, 64))


# --- on ranks -------------------------------------------------------------------------------------
def trained(stage, share=None, *, lean=None, layers=4, **options):
    """Trains two steps. Returns losses and gradients, the graphs, the bytes on the host between
    forward and backward, and the peaks of both that a profiler sees.

    Args:
        share: of the bytes of `lean`, which is the memory budget; None for no budget.
    """
    torch._dynamo.reset()
    if share is not None:
        options |= {"memory_budget": f"{int(share * lean)}B", "host_memory": "1GiB"}
    options = {"zero_stage": stage, "target": TARGET, **options}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        net = model(layers)
        zpasses.shard(net, mesh=world_mesh())
        step = torch.compile(net, backend="zpasses", fullgraph=True, options=options)
        x = X.repeat(4, 1).chunk(2)[dist.get_rank()].clone()
        graphs, results, held = {}, [], []
        with observe_graphs(lambda log: graphs.setdefault(log.kind, log.graph)):
            for _ in range(2):
                loss = step(x)
                held.append(host.live)
                loss.backward()
                results.append(loss.detach())
        results += [param.grad.to_local().clone() for param in net.parameters()]
        for param in net.parameters():
            param.grad = None
        del loss
        gc.collect()
        with record_function("measured forward"):
            loss = step(x)
        with record_function("measured backward"):
            loss.backward()
    assert host.live == 0
    resting, ahead = allocated(profiler, "measured forward")
    before, back = allocated(profiler, "measured backward")
    return results, graphs, held, (ahead, back + before - resting)


def modelled(graphs):
    """The peaks of forward and backward, with cached parameters that backward does not read."""
    ahead, back = (liveness(graphs[kind]) for kind in ("forward", "backward"))
    return ahead.peak_bytes, back.peak_bytes + ahead.live_bytes[-1] - back.live_bytes[0]


def counted(graphs):
    """The peak that the budget bounds."""
    return max(liveness(graphs[kind]).peak_bytes for kind in ("forward", "backward"))


SHARES = (0.85, 0.7, 0.57)
STAGES = [(3, (0.7,)), *((stage, SHARES) for stage in (1, 2, 3))]


def assert_falls_as_planned(stage, shares, expected, graphs, rich, **options):
    """Measures the same fall of both peaks as the plan says, at several budgets."""
    eager = options.get("codegen") == "eager"
    with use_fusion(not eager):
        plain, whole = modelled(graphs), counted(graphs)
    for share in shares:
        results, graphs, held, peaks = trained(stage, share, lean=whole, cache=False, **options)
        assert_same(results, expected)
        moved = sum(each.nbytes for each in copies(graphs["forward"]))
        assert held == [moved] * 2
        with use_fusion(not eager):
            lean = modelled(graphs)
            assert counted(graphs) <= share * whole
        assert max(peaks) < max(rich)  # the lower one may rise
        for at in range(2):
            assert peaks[at] <= lean[at] * 1.02
            assert rich[at] - peaks[at] == pytest.approx(plain[at] - lean[at], rel=0.02)
    assert moved > 0


@pytest.mark.parametrize(("stage", "shares"), some_quick(STAGES, STAGES[:1]))
@on_ranks(2, timeout_s=400)
def test_measured_bytes_of_the_device_fall_by_what_the_plan_says(stage, shares):
    expected, graphs, held, rich = trained(stage, codegen="eager", layers=3)
    assert held == [0, 0]
    with use_fusion(False):
        assert rich == pytest.approx(modelled(graphs), rel=0.02)
    assert_falls_as_planned(stage, shares, expected, graphs, rich, codegen="eager", layers=3)


@pytest.mark.inductor
@pytest.mark.slow(quick="test_measured_bytes_of_the_device_fall_by_what_the_plan_says")
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2, timeout_s=400)
def test_measured_bytes_of_generated_code_fall_by_what_the_plan_says(stage):
    expected, graphs, _, rich = trained(stage, layers=3, cache=False)
    # The first is the peak without a budget, which has room: plans with one take less.
    assert_falls_as_planned(stage, (1.0, *SHARES), expected, graphs, rich, layers=3)


# --- dynamic shapes -------------------------------------------------------------------------------
def trained_lengths(lengths, most, **options):
    """Trains steps of several lengths in one graph. Returns losses and gradients, the bytes on the
    host after each forward, and those of all arenas at the end.
    """
    torch._dynamo.reset()
    net = model()
    zpasses.shard(net, mesh=world_mesh())
    options = {"target": TARGET, "codegen": "eager", **options}
    step = torch.compile(net, backend="zpasses", fullgraph=True, options=options)
    results, held, graphs = [], [], {}
    with observe_graphs(lambda log: graphs.setdefault(log.kind, log.graph)):
        for length in lengths:
            x = X[:length].clone()
            torch._dynamo.mark_dynamic(x, 0, **({} if most is None else {"min": 2, "max": most}))
            loss = step(x)
            held.append(host.live)
            loss.backward()
            results.append(loss.detach())
    results += [param.grad.to_local().clone() for param in net.parameters()]
    return results, held, graphs


@pytest.mark.slow(quick="test_measured_bytes_of_the_device_fall_by_what_the_plan_says")
@pytest.mark.parametrize("most", [None, 2048])
@on_ranks(2, timeout_s=300)
def test_values_of_dynamic_sizes_leave_and_each_length_takes_what_it_needs(most):
    lengths = (1024, 512, 2048, 600)
    expected, held, graphs = trained_lengths(lengths, most)
    assert held == [0] * 4
    budget = {"memory_budget": f"{int(0.7 * counted(graphs))}B", "host_memory": "1GiB"}
    results, held, graphs = trained_lengths(lengths, most, **budget)
    assert_same(results, expected)
    assert held[0] > 0
    assert held == [held[0] * length // 1024 for length in lengths]
    if most is not None:
        assert counted(graphs) <= parse_size(budget["memory_budget"], "")
    gc.collect()
    assert host.live == 0
    assert held[2] <= host.reserved < held[2] + 64 * 20  # one arena, of the longest batch


@pytest.mark.slow(
    quick="test_runs_that_overlap_have_arenas_of_their_own_within_one_limit",
)
@on_ranks(2, timeout_s=300)
def test_a_longer_batch_than_the_host_has_room_for_is_refused_on_all_ranks():
    _, _, graphs = trained_lengths((512,), None)
    options = {"memory_budget": f"{int(0.7 * counted(graphs))}B", "agreement_timeout_s": 20.0}
    _, held, _ = trained_lengths((512,), None, **options, host_memory="1GiB")
    options["host_memory"] = f"{2 * held[0]}B"
    rank = dist.get_rank()
    wrong = MemoryBudgetError if rank == 0 else AgreementError
    with pytest.raises(wrong, match=r"host_memory=.*this forward puts .* on the host.* Raise"):
        trained_lengths((512, 2048 if rank == 0 else 512), None, **options)


@pytest.mark.slow(quick="test_the_host_makes_room_and_each_copy_out_comes_back")
def test_a_dump_shows_copies_beside_collectives(tmp_path):
    whole = peak(captured(memory_budget="1GiB"))
    budget = f"{int(0.6 * whole)}B"
    found = captured(memory_budget=budget, host_memory="1GiB", dump=str(tmp_path))
    for command in ("collectives", "show", "memory"):
        shown = CliRunner().invoke(cli, [command, str(tmp_path)])
        assert shown.exit_code == 0, shown.output
        assert "offload" in shown.output
    page = tmp_path / "page.html"
    made = CliRunner().invoke(cli, ["html", str(tmp_path), "-o", str(page)])
    assert made.exit_code == 0, made.output
    assert "host-out" in page.read_text()
    runs = [step.run for step in only_compile(tmp_path).graphs["forward"].steps if step.run]
    note = next(run.notes[0] for run in runs if run.name == "schedule")
    out = len(copies(found.after.forward.graph))
    assert f"of gathers and 0 of reductions, {out} copies to or from the host; " in note
