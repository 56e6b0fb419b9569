import copy
import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs import (
    Param,
    assert_predicted,
    drawn_examples,
    few_examples,
    joint,
    rewritten,
    steps,
    votes_of_the_first,
)
from zpasses.cost.memory.collective_moves import equal_liveness
from zpasses.cost.plan.schedule_evaluation import evaluate
from zpasses.cost.plan.schedule_planner import memory_limit, plan_schedule
from zpasses.cost.plan.simple_plans import one_ahead_plan, single_plan
from zpasses.cost.time.step_time import Timeline, step_time
from zpasses.cost.time.target import TARGETS, Target, current_target, use_target
from zpasses.graph.host_copies import split_shard_copies
from zpasses.graph.queries import collectives
from zpasses.graph.tags import tag_of
from zpasses.option_values import format_size, parse_budget
from zpasses.passes import GatherParams, ReduceGrads, Schedule
from zpasses.testing import (
    JointRecipe,
    ParamSpec,
    assert_equal_bits,
    assert_step_equals_reference,
    capture_graphs,
    capture_ranks,
    fake_world,
    listing,
    random_inputs,
    trace_joint,
)
from zpasses.testing.strategies import param_lists

ROOMY = "1GiB"
UNMERGED = Schedule("one-ahead", cap_mb=0, memory_budget=ROOMY)
FORMS = ("reduce_scatter", "all_reduce")
MODES = ("auto", "coalesced", "flat")
H100 = TARGETS["h100"]
SLOW_LINKS = Target.parse(
    "h100,link_gb_s=0.001,network_gb_s=0.001,launch_us=0.001,hop_us=0.001,network_hop_us=0.001"
)
SLOW_LAUNCH = Target.parse("h100,launch_us=1000,hop_us=1000,network_hop_us=1000")


def lower(form="reduce_scatter"):
    return GatherParams(), ReduceGrads(form)


def scheduled(*params, world_size=2, rank=0, form="reduce_scatter", target=H100, **options):
    """Returns the graph of one rank without and with a schedule."""
    with fake_world(world_size, rank), use_target(target):
        plain = rewritten(joint(params, rank, world_size), *lower(form))
        return plain, rewritten(plain, Schedule(**options))


def kept(gm):
    """Returns the nodes that neither communicate nor move with a collective."""
    return [node.name for node in gm.graph.nodes if node.name.startswith("mul")]


# --- equal results ------------------------------------------------------------------------------
@few_examples
@given(
    param_lists(max_size=5),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(FORMS),
    st.sampled_from(MODES),
    st.sampled_from(["0%", "30%", ROOMY]),
    st.sampled_from([TARGETS["cpu"], H100, SLOW_LINKS, SLOW_LAUNCH]),
    st.sampled_from(["shared", "own"]),
)
def test_random_graphs_stay_equal_within_the_budget_and_never_get_slower(
    params, world_size, form, mode, budget, target, group
):
    before, after, orders, allowed = [], [], [], parse_budget(budget, "here")
    for rank in range(world_size):
        with fake_world(world_size, rank), use_target(target):
            before.append(joint(params, rank, world_size))
            plain = rewritten(before[-1], *lower(form))
            option = Schedule(memory_budget=budget, mode=mode, reduction_group=group)
            problem = option.problem(plain.graph)
            limit = memory_limit(problem if problem.jobs else of_copies(plain, option), allowed)
            after.append(rewritten(plain, option))
            assert peak_of(after[-1]) <= max(limit, peak_of(plain))
            assert kept(after[-1]) == kept(plain)
            ours = step_time([after[-1].graph], current_target()).total_us
            assert ours <= step_time([plain.graph], current_target()).total_us + 1e-3
            if problem.jobs:
                predicted = option.choose(problem).cost
                assert_predicted(ours, predicted.total_us, params, mode)
                if not any(each.on_host for each in params):  # their copies move last
                    assert peak_of(after[-1]) <= predicted.peak_bytes
            orders.append([(each.op, each.shapes) for _, each in collectives(after[-1].graph)])
    assert all(order == orders[0] for order in orders)
    assert_equal_bits(before, after, random_inputs(before))


@pytest.mark.parametrize("budget", ["0%", "30%"])
def test_gradients_are_counted_beside_the_buffer_that_packs_them(budget):
    with fake_world(8), use_target(TARGETS["cpu"]):
        plain = rewritten(joint([Param((16, 16))] * 12, 0, 8), *lower("reduce_scatter"))
        option = Schedule(memory_budget=budget, mode="flat")
        planned = option.choose(option.problem(plain.graph))
        assert peak_of(rewritten(plain, option)) <= planned.cost.peak_bytes <= planned.limit_bytes


def of_copies(gm, option):
    """Returns what `option` plans in a graph without collectives: its copies from the host."""
    graph = copy.deepcopy(gm.graph)
    split_shard_copies(graph, "test")
    return option.problem(graph)


def peak_of(gm):
    return equal_liveness(gm.graph).peak_bytes


@settings(few_examples, max_examples=drawn_examples(20))
@given(
    param_lists(max_size=5),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(FORMS),
    st.sampled_from([TARGETS["cpu"], H100, SLOW_LINKS, SLOW_LAUNCH]),
    st.sampled_from([0, 1, 1 << 12]),
)
def test_plans_are_never_slower_than_one_ahead_in_the_same_memory(
    params, world_size, form, target, more
):
    """`more` is how many bytes the plan may use beyond that."""
    with fake_world(world_size), use_target(target):
        plain = rewritten(joint(params, 0, world_size), *lower(form))
        before = rewritten(plain, Schedule(plan="one-ahead"))
        budget = peak_of(before) + more
        after = rewritten(plain, Schedule(memory_budget=f"{budget}B"))
        times = [step_time([gm.graph], target).total_us for gm in (before, after)]
        assert times[1] <= times[0] * (1 + 1e-9)
        assert peak_of(after) <= budget


def test_a_plan_that_the_upper_bound_refuses_is_taken_if_it_fits():
    """The planner counts casts longer than they live, here as large as the parameters."""
    params = [Param((64, 64), param_dtype=torch.bfloat16) for _ in range(4)]
    with fake_world(2), use_target(SLOW_LAUNCH):
        plain = rewritten(joint(params, 0, 2), *lower())
        option = Schedule(memory_budget=f"{peak_of(rewritten(plain, UNMERGED))}B")
        problem = option.problem(plain.graph)
        most = parse_budget(option.memory_budget, "here").most_bytes
        assert evaluate(problem, one_ahead_plan(problem)).peak_bytes > most
        moved = rewritten(plain, option)
        assert peak_of(moved) <= most
        before, after = (step_time([gm.graph], SLOW_LAUNCH).total_us for gm in (plain, moved))
    assert after < before


def test_a_plan_is_judged_as_it_is_written():
    """The cost of a plan on a copy is that of the graph which is rewritten."""
    params = [Param((rows, 8), param_dtype=torch.bfloat16) for rows in (7, 5, 2, 6)]
    for mode in MODES:
        for group in ("shared", "own"):
            with fake_world(3), use_target(SLOW_LAUNCH):
                plain = rewritten(joint(params, 0, 3), *lower())
                names, tight = listing(plain), peak_of(plain)
                option = Schedule("single", 0, f"{tight}B", mode, reduction_group=group)
                problem = option.problem(plain.graph)
                cost = option.choose(problem).cost
                assert listing(plain) == names
                assert cost.peak_bytes <= tight
                written = rewritten(plain, option)
                time = Timeline(written.graph, SLOW_LAUNCH, regrouped=problem.regrouped).run()
                assert time.total_us == pytest.approx(cost.total_us)
                assert peak_of(written) <= tight


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3)))

    def forward(self, x):
        return self.layers(x)


class ReadTwice(torch.nn.Module):
    """The reductions of `twice` are added up, so they stay. Others move past or up to them."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.last = (torch.nn.Linear(4, 5, bias=False) for _ in range(3))

    def forward(self, x):
        y = torch.tanh(self.twice(x))
        y = y + self.first(x).sin() + self.last(x).cos()
        return y + torch.tanh(self.twice(2 * x))


def after_the_last_that_stays(problem):
    """A plan that starts every reduction right after the last collective that does not move."""
    plan = single_plan(problem)
    late = max((event.slot for event in problem.fixed if event.timing is not None), default=0) + 1
    jobs = [problem.jobs[members[0]] for members in plan.launches]
    actions = [
        each._replace(slot=each.slot if jobs[each.launch].is_gather else max(each.slot, late))
        for each in plan.actions
    ]
    return replace(plan, actions=tuple(sorted(actions, key=lambda each: each.slot)))


def test_collectives_that_stay_keep_their_place_among_those_that_move(monkeypatch):
    """Of 4 ranks, one has no row. Their graphs have more nodes between the collectives."""

    def choose(self, problem):
        found = plan_schedule(problem, 1 << 40)
        return replace(found, plan=after_the_last_that_stays(problem))

    monkeypatch.setattr(Schedule, "choose", choose)
    pipeline = "gather-params,reduce-grads{form=reduce_scatter},schedule{memory_budget=1000%}"
    x = torch.zeros(2, 4)
    captures = capture_ranks(ReadTwice(), (x,), world_size=4, pipeline=pipeline)
    assert_step_equals_reference(captures)


def test_ranks_that_pad_cast_or_hold_nothing_make_the_same_plan():
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float64}
    params = [Param((rows, 8), **dtypes) for rows in (7, 5, 2, 6)]
    plans = []
    for rank in range(3):
        with fake_world(3, rank), use_target(SLOW_LAUNCH):
            plain = rewritten(joint(params, rank, 3), *lower())
            options = [
                Schedule(memory_budget=budget, mode=mode)
                for mode in MODES
                for budget in ("0%", "10%", "30%", ROOMY)
            ]
            plans.append([each.choose(each.problem(plain.graph)).plan for each in options])
    assert plans[0] == plans[1] == plans[2]
    assert len(set(plans[0][:4])) > 1  # budgets matter


# --- what the plan does -------------------------------------------------------------------------
SQUARES = [Param((64, 64)) for _ in range(4)]
"""Each takes 16 KiB; a kernel that reads it takes the 5 us of an empty one."""


def test_links_stay_busy_while_a_kernel_waits_for_them():
    _, moved = scheduled(*SQUARES, target=SLOW_LINKS, memory_budget=ROOMY)
    order = steps(moved)
    assert sum(step.startswith("start gather") for step in order) > 1
    for needed, kernel in enumerate(("mul", "mul_1", "mul_2"), 1):
        # The next gather starts before the kernel that the last one makes possible.
        before = order[: order.index(kernel)]
        started = [step.split()[-1] for step in before if step.startswith("start gather")]
        assert len(",".join(started).split(",")) > needed


def test_the_first_consumer_does_not_wait_for_gathers_that_others_need():
    """The first gather is long. What is merged with it would delay all kernels."""
    _, moved = scheduled(Param((4096, 64)), *SQUARES, target=SLOW_LINKS, memory_budget=ROOMY)
    first = next(step for step in steps(moved) if step.startswith("start gather"))
    assert first == "start gather p0"


def test_launches_are_merged_where_latency_dominates():
    _, moved = scheduled(*SQUARES, target=SLOW_LAUNCH, memory_budget=ROOMY)
    gathers = [step for step in steps(moved) if step.startswith("start gather")]
    assert gathers == ["start gather p0,p1,p2,p3"]
    reductions = [step for step in steps(moved) if step.startswith("start reduce")]
    assert reductions == ["start reduce p3,p2,p1,p0"]


@pytest.mark.parametrize("budget", [ROOMY, "0%"])
def test_launches_are_merged_where_their_start_keeps_kernels_waiting(budget):
    """Little memory must not lead to more launches than a channel needs."""
    cheap, dear = (
        scheduled(*SQUARES, *SQUARES, target=target, memory_budget=budget)[1]
        for target in (SLOW_LINKS, replace(SLOW_LINKS, issue_us=500.0))
    )
    assert launches(dear) < launches(cheap)


def launches(gm):
    return sum(step.startswith("start") for step in steps(gm))


@pytest.mark.parametrize(("width", "rows"), [(64, 16), (2048, 1024)])
def test_by_default_the_peak_rises_by_a_share_of_it_at_most(width, rows):
    layers = (torch.nn.Linear(width, width, bias=False) for _ in range(6))
    model, x = torch.nn.Sequential(*layers), torch.zeros(rows, width)
    pipeline = "merge-reads,gather-params,reduce-grads,reshard-after-forward{keep=nothing}"
    plain = capture_graphs(model, (x,), world_size=2, pipeline=pipeline).after.forward
    peaks = []
    with fake_world(2), use_target(SLOW_LAUNCH):
        options = {"memory_budget": "0%"}, {}, {"memory_budget": ROOMY}
        peaks = [peak_of(rewritten(plain, Schedule(**each))) for each in options]
    lean, default, roomy = peaks
    assert lean < default <= lean * 1.3
    assert roomy > default


def test_ready_gradients_leave_before_the_last_one_if_links_are_slow():
    """The links are busy for longer than the kernels, so waiting for the last gradient is lost."""
    _, moved = scheduled(*SQUARES, target=SLOW_LINKS, memory_budget=ROOMY)
    order = steps(moved)
    first = next(at for at, step in enumerate(order) if step.startswith("start reduce"))
    assert any(step.startswith("mul") for step in order[first:])
    assert not any("reduce p3,p2,p1,p0" in step for step in order)


# --- agreement ----------------------------------------------------------------------------------
def test_all_ranks_take_the_plan_of_the_first(monkeypatch):
    """The second rank would plan otherwise, since other kernels take longer on it."""
    told = votes_of_the_first(monkeypatch)
    first = scheduled(*SQUARES, target=SLOW_LINKS, memory_budget=ROOMY)[1]
    second = scheduled(*SQUARES, target=SLOW_LAUNCH, memory_budget=ROOMY)[1]
    assert told[0][0] == told[1][0]
    assert told[0][1] != told[1][1]
    assert steps(second) == steps(first)


def test_a_rank_with_other_kernels_runs_the_collectives_of_the_plan_in_order(monkeypatch):
    """The second rank multiplies each gradient once more, so that its nodes are at other places."""

    def graph(extra):
        def fn(*values):
            reads = [torch.ops.zpasses.unshard(p, 64, None, None, "0") for p in values[::2]]
            outputs = [read * x for read, x in zip(reads, values[1::2], strict=True)]
            return tuple(out * 3 * 5 if extra else out for out in outputs)

        pairs = [(torch.zeros(32, 64).requires_grad_(), torch.zeros(64, 64)) for _ in range(4)]
        inputs = [each for pair in pairs for each in pair]
        return rewritten(trace_joint(fn, inputs, {2 * i: f"p{i}" for i in range(4)}), *lower())

    votes_of_the_first(monkeypatch)
    with fake_world(2), use_target(SLOW_LINKS):
        first, second = (
            rewritten(graph(extra), Schedule(memory_budget=ROOMY)) for extra in (False, True)
        )
    assert len(kept(second)) > len(kept(first))
    ours, theirs = (
        [step for step in steps(gm) if step.startswith(("start", "await"))]
        for gm in (first, second)
    )
    assert ours == theirs


# --- process groups -----------------------------------------------------------------------------
def groups_of(gm):
    """Returns the process groups of gathers and of reductions."""
    found = {"gather": set(), "reduce": set()}
    for node, collective in collectives(gm.graph):
        found[tag_of(node).role].add(collective.group)
    return found


@pytest.mark.parametrize(
    ("form", "mode"), [*zip(FORMS, MODES, strict=False), ("all_reduce", "flat")]
)
def test_reductions_move_to_a_group_of_their_own(form, mode):
    plain, moved = scheduled(*SQUARES, form=form, mode=mode, reduction_group="own")
    assert groups_of(plain) == {"gather": {"0"}, "reduce": {"0"}}
    assert groups_of(moved) == {"gather": {"0"}, "reduce": {"0.reductions"}}
    _, shared = scheduled(*SQUARES, form=form, mode=mode)
    assert groups_of(shared) == groups_of(plain)


def test_graphs_that_need_no_plan_keep_their_group():
    """Ranks may compile them without the others, so no group can be made for them."""
    _, moved = scheduled(Param((64, 64)), reduction_group="own")
    assert groups_of(moved) == {"gather": {"0"}, "reduce": {"0"}}
    with fake_world(2), use_target(H100):  # those that have a second group keep it
        plain = rewritten(joint(SQUARES, 0, 2), *lower())
        option = Schedule(reduction_group="own")
        once = rewritten(plain, option)
        assert groups_of(rewritten(once, option)) == groups_of(once)


def test_reductions_move_although_the_plan_of_the_first_rank_does_not_fit(monkeypatch):
    """All other ranks move theirs."""
    monkeypatch.setattr("zpasses.passes.schedule._fitted", lambda *_: None)
    plain, moved = scheduled(*SQUARES, reduction_group="own")
    assert groups_of(moved) == {"gather": {"0"}, "reduce": {"0.reductions"}}
    assert kept(moved) == kept(plain)


def test_ranks_with_other_collectives_make_no_group(monkeypatch):
    """The check of collectives reports the difference later."""
    monkeypatch.setattr("zpasses.ranks.agree.exchange", lambda *_, **__: ["other", []])
    _, moved = scheduled(*SQUARES, reduction_group="own")
    assert groups_of(moved)["reduce"] == {"0"}


def test_later_passes_recognise_reductions_on_their_own_group():
    pipeline = (
        "merge-reads,gather-params,reduce-grads,reshard-after-forward,"
        "schedule{memory_budget=1GiB,reduction_group=own},defer-reduction,sdma"
    )
    captures = capture_ranks(Mlp(), (torch.zeros(2, 5),), world_size=3, pipeline=pipeline)
    assert groups_of(captures[0].after.backward)["reduce"] == {"0.reductions"}
    assert_step_equals_reference(captures)


def test_a_graph_that_holds_more_than_its_budget_is_warned_of(caplog):
    for params in ([Param((2048, 1024)), Param((1024, 1024))], [Param((8, 1024), frozen=True)]):
        plain, _ = scheduled(*params, memory_budget=ROOMY)
        with fake_world(2):
            least = peak_of(plain)
        for budget, warned in ((least, False), (least - 1, True)):
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="zpasses"):
                scheduled(*params, memory_budget=f"{budget}B")
            messages = [each.getMessage() for each in caplog.records if each.name == "zpasses"]
            assert ["above the memory budget of" in each for each in messages] == [True] * warned


@pytest.mark.parametrize(("beyond", "warned"), [(0.001, False), (0.003, True)])
def test_a_graph_that_exceeds_the_plan_it_was_given_is_warned_of(beyond, warned, caplog):
    """Unless that is little: its kernels may differ once it is written."""
    plain, _ = scheduled(Param((2048, 1024)), Param((1024, 1024)), memory_budget=ROOMY)
    with fake_world(2):
        budget = int(peak_of(plain) / (1 + beyond))
        with caplog.at_level(logging.WARNING, logger="zpasses"):
            Schedule(memory_budget=f"{budget}B")._warn_over_budget(plain.graph, budget)
    assert ("all ranks use the plan" in caplog.text) is warned


@pytest.mark.parametrize(("room", "is_exact"), [(0.01, True), (0.1, False)])
def test_a_peak_near_the_limit_is_counted_exactly(room, is_exact, monkeypatch):
    """Other kernels may be fused in the graph that is written."""
    plain, _ = scheduled(Param((2048, 1024)), Param((1024, 1024)), memory_budget=ROOMY)
    with fake_world(2), use_target(H100):
        option = Schedule(plan="one-ahead", mode="coalesced")
        problem = option.problem(plain.graph)
        planned = option.choose(problem, 1 << 40)
        limit = int(planned.cost.peak_bytes * (1 + room))
        for exact in (limit, limit + 1):
            written = replace(planned.cost, peak_bytes=exact)
            monkeypatch.setattr("zpasses.passes.schedule.exact_cost", lambda *_, it=written: it)
            found = option.choose(problem, limit)
            assert (found.cost is written) is (is_exact and exact <= limit)


def test_the_note_says_the_duration_and_peak_of_the_graph_that_was_written(caplog):
    """The planner counts the copies of flat launches from above."""
    params = [Param((64, 8)), Param((32, 8)), Param((48, 8))]
    with caplog.at_level(logging.INFO, logger="zpasses"):
        _, after = scheduled(*params, mode="flat", plan="single")
    with fake_world(2), use_target(H100):
        took = step_time([after.graph], current_target()).total_us
        peak = equal_liveness(after.graph).peak_bytes
    (note,) = [each for each in caplog.messages if "in launches" in each]
    assert f"predicted {took / 1e3:,.2f} ms," in note
    assert f"peak {format_size(peak)} of " in note


def test_engines_that_the_target_has_not_are_said(caplog):
    recipe = JointRecipe((ParamSpec((64, 64)),), 2)
    with use_target(Target.parse("cpu")), caplog.at_level(logging.INFO, logger="zpasses"):
        recipe.run_pipeline("gather-params,reduce-grads,schedule{copy_engines=on}")
        assert "copy_engines=on does nothing, because cpu has no route" in caplog.text
        caplog.clear()
        recipe.run_pipeline("gather-params,reduce-grads,schedule")
        assert "copy_engines" not in caplog.text
