"""Plans, bounds and evaluations of large and of hand-made graphs."""

import itertools
import logging
import sys
from dataclasses import replace

import pytest
import torch
from torch import fx

from zpasses import compat
from zpasses.cost.memory.collective_moves import equal_liveness
from zpasses.cost.plan import schedule_planner
from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.plan.plan_improvement import improve_plan
from zpasses.cost.plan.schedule_evaluation import Action, Plan, evaluate, live_bytes
from zpasses.cost.plan.schedule_planner import memory_limit, plan_schedule
from zpasses.cost.plan.schedule_problem import Average, problem_of
from zpasses.cost.plan.simple_plans import one_ahead_plan, single_plan
from zpasses.cost.time.clock import Channel, CollectiveTiming
from zpasses.cost.time.fused_kernels import use_fusion
from zpasses.cost.time.step_time import step_time
from zpasses.cost.time.target import TARGETS, Target, use_target
from zpasses.graph.tags import Tag, add_tag
from zpasses.option_values import MemoryBudget
from zpasses.passes.schedule import _by_node
from zpasses.passes.writers.schedule_writer import copied, write_plan
from zpasses.testing import fake_world

H100 = TARGETS["h100"]
RANKS = 8
WIDTH = 2048


def step(params, kernels, copies=1):
    """Returns a graph like that of a backward: per parameter a gather, kernels, and a reduction.

    Args:
        params: number of parameters of WIDTH x WIDTH elements.
        kernels: matrix products per parameter.
        copies: how many copies of a gradient a reduction takes.
    """
    graph = fx.Graph()
    with compat.FakeTensorMode():
        full = torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16)
        shard = torch.empty(WIDTH // RANKS, WIDTH, dtype=torch.bfloat16)
        grads, reduced_grads = full.repeat(copies, 1), shard.repeat(copies, 1)

    def made(node, value, **tag):
        node.meta["val"] = value
        if tag:
            add_tag(node, Tag(**tag))
        return node

    names = [f"p{number}" for number in range(params)]
    shards = [made(graph.placeholder(name), shard, role="shard", params=(name,)) for name in names]
    value = made(graph.placeholder("tangents_1"), full)
    call, ops = graph.call_function, compat.functional
    results = []
    for name, given in zip(names, shards, strict=True):
        start = call(ops.all_gather_into_tensor.default, (given, RANKS, "0"))
        made(start, full, role="gather", params=(name,), nbytes=1)
        wait = made(call(ops.wait_tensor.default, (start,)), full, role="full", params=(name,))
        for _ in range(kernels):
            value = made(call(torch.ops.aten.mm.default, (value, wait)), full)
        grad = made(call(torch.ops.aten.mm.default, (value, value)), full)
        if copies > 1:
            grad = made(call(torch.ops.aten.repeat.default, (grad, [copies, 1])), grads)
        reduced = call(ops.reduce_scatter_tensor.default, (grad, "avg", RANKS, "0"))
        made(reduced, reduced_grads, role="reduce", params=(name,), nbytes=1)
        done = call(ops.wait_tensor.default, (reduced,))
        results.append(made(done, reduced_grads, role="shard_grad", params=(name,)))
    graph.output(tuple(results))
    return graph


@pytest.mark.slow(quick="the other tests of test_schedule_planner.py")
def test_the_work_of_planning_grows_no_faster_than_the_graph():
    small, large = map(calls_per_node, (40, 700))
    assert large < 1.2 * small  # a step that is quadratic in the nodes makes it 17 times as many


def calls_per_node(params):
    """Function calls while a schedule is planned, over the nodes of the graph. Counted instead of
    timed.
    """
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    with fake_world(RANKS), use_target(H100):
        graph = step(params, kernels=45)
        sys.setprofile(count)
        try:
            problem = problem_of(graph, H100)
            limit = memory_limit(problem, MemoryBudget())
            planned = plan_schedule(problem, limit)
        finally:
            sys.setprofile(None)
    assert len(graph.nodes) > 50 * params
    assert planned.cost.total_us < 1.05 * planned.bound_us
    return calls / len(graph.nodes)


@pytest.mark.parametrize("target", [H100, TARGETS["mi300x"], TARGETS["cpu"]])
@pytest.mark.parametrize(("kernels", "second_group"), [(0, False), (1, True), (4, True)])
@pytest.mark.parametrize("copy_engines", [False, True])
def test_no_plan_beats_the_bound(target, kernels, second_group, copy_engines):
    with fake_world(RANKS), use_target(target):
        options = {"second_group": second_group, "copy_engines": copy_engines}
        problem = problem_of(step(8, kernels), target, **options)
        bound = schedule_bound_us(problem)
        for budget in (MemoryBudget(), MemoryBudget(rise=0.2), MemoryBudget(1 << 40)):
            planned = plan_schedule(problem, memory_limit(problem, budget))
            assert bound <= planned.cost.total_us * (1 + 1e-9)
            simple = evaluate(problem, one_ahead_plan(problem)).total_us
            assert planned.cost.total_us <= simple * (1 + 1e-9)
            assert planned.cost.peak_bytes <= planned.limit_bytes


def test_bound_is_that_of_the_kernels_or_of_the_links():
    fast = Target.parse("h100,link_gb_s=1e9,launch_us=1e-6,hop_us=1e-6")
    slow = Target.parse("h100,link_gb_s=0.1")
    with fake_world(RANKS):
        for target in (fast, slow):
            with use_target(target):
                problem = problem_of(step(4, 2), target)
            bound_us, link_us = schedule_bound_us(problem), moved_us(problem)
            if target is fast:
                assert bound_us == pytest.approx(kernels_us(problem), rel=1e-3)
            else:
                assert bound_us == pytest.approx(link_us, rel=0.02)
                assert link_us > 10 * kernels_us(problem)


def kernels_us(problem):
    return sum(problem.work_us) + sum(job.start_us + job.wait_us for job in problem.jobs)


def moved_us(problem):
    return sum(job.transfer_us for job in problem.jobs)


def test_evaluation_of_the_graph_as_it_is_equals_the_timeline():
    with fake_world(RANKS), use_target(H100):
        graph = step(5, 3)
        problem = problem_of(graph, H100)
        cost = evaluate(problem, single_plan(problem))
        expected = step_time([graph], H100)
    assert cost.total_us == pytest.approx(expected.total_us)
    assert cost.exposed_us == pytest.approx(expected.exposed_us)


def test_what_starts_before_a_reduction_is_awaited_in_one_slot_exists_beside_its_input():
    """All gathers but the first start where the first reduction can, and before it."""
    with fake_world(RANKS), use_target(H100):
        problem = problem_of(step(5, 1, copies=4), H100)
        gathers = [job.number for job in problem.jobs if job.is_gather]
        reductions = [job.number for job in problem.jobs if not job.is_gather]
        slot = problem.jobs[reductions[0]].earliest
        assert slot == problem.jobs[gathers[1]].latest
        order = [(gathers[0],), tuple(gathers[1:]), *((each,) for each in reductions)]
        places = [0, slot, *(problem.jobs[each].earliest for each in reductions)]
        actions = [
            Action(places[launch], kind, launch)
            for group in ([0], [1, 2], [3], [4], [5], [6])
            for kind in ("start", "wait")
            for launch in group
        ]
        plan = Plan(tuple(order), tuple(actions))
        graph, copy = copied(problem)
        write_plan(graph, copy, _by_node(problem, plan), "test")
        live = equal_liveness(graph)
        starts = copy.items[reductions[0]].started
        assert live.live_bytes[live.nodes.index(starts)] <= live_bytes(problem, plan)[slot]


def test_without_overlap_gradients_are_reduced_before_parameters_are_gathered():
    """Where a gradient is ready and a parameter is needed, both would be full otherwise."""
    with fake_world(RANKS), use_target(H100):
        problem = problem_of(step(4, 1, copies=4), H100)
        plan = single_plan(problem)

        def gathers_first(action):
            return action.slot, not problem.jobs[plan.launches[action.launch][0]].is_gather

        other = replace(plan, actions=tuple(sorted(plan.actions, key=gathers_first)))
        assert other != plan
        counted = [evaluate(problem, each).peak_bytes for each in (plan, other)]
        written = []
        for each in (plan, other):
            graph, copy = copied(problem)
            write_plan(graph, copy, _by_node(problem, each), "test")
            written.append(equal_liveness(graph).peak_bytes)
    assert counted[0] < counted[1]
    assert written[0] < written[1]


def test_launches_merge_whatever_lies_between_them():
    """As copies of values from the host lie between the gathers of a backward."""
    slow = Target.parse("h100,launch_us=60,hop_us=20")
    with fake_world(RANKS), use_target(slow):
        problem = problem_of(step(16, 1), slow)
        jobs = tuple(
            replace(job, key=replace(job.key, compatibility=f"{job.number % 8}"))
            for job in problem.jobs
        )
        problem = replace(problem, jobs=jobs)
        start = single_plan(problem)
        limit = 2 * evaluate(problem, start).peak_bytes

        def rank(plan):
            cost = evaluate(problem, plan)
            return max(0, cost.peak_bytes - limit), cost.total_us

        better = improve_plan(problem, start, rank, 400, limit)
    assert len(better[-1].launches) <= len(start.launches) - 5


def test_a_fast_plan_above_the_limit_is_a_start():
    slow = Target.parse("h100,link_gb_s=100")
    with fake_world(RANKS), use_target(slow):
        problem = problem_of(step(6, 2), slow)
        limit = memory_limit(problem, MemoryBudget(rise=0.3))
        planned = plan_schedule(problem, limit)
    assert planned.cost.peak_bytes <= limit
    assert planned.cost.total_us < 1220  # 1241.8 from the best plans within the limit only


def test_collectives_of_no_bytes_are_planned():
    with fake_world(RANKS), use_target(H100):
        problem = problem_of(step(3, 1), H100)
        jobs = tuple(
            replace(job, full_bytes=0, latency_us=0.0, timing=replace(job.timing, duration_us=0.0))
            for job in problem.jobs
        )
        problem = replace(problem, jobs=jobs, work_us=[0.0 for _ in problem.work_us])
        planned = plan_schedule(problem, 1 << 40)
        rank = 0, planned.cost.total_us
        assert improve_plan(problem, planned.plan, lambda plan: rank, 50, 1 << 40) == []


def test_more_memory_is_never_slower():
    slow = Target.parse("h100,link_gb_s=20")
    with fake_world(RANKS), use_target(slow):
        problem = problem_of(step(12, 2), slow)
        least = evaluate(problem, single_plan(problem)).peak_bytes
        times = [
            plan_schedule(problem, least + extra * WIDTH * WIDTH * 2).cost.total_us
            for extra in (0, 1, 2, 4, 8)
        ]
    assert all(later <= earlier * 1.005 for earlier, later in itertools.pairwise(times)), times
    assert times[-1] < times[0]


def test_memory_is_taken_only_where_it_gains_time(monkeypatch):
    with fake_world(RANKS), use_target(H100):
        problem = problem_of(step(12, 6), H100)
        limit = memory_limit(problem, MemoryBudget(rise=1.0))
        priced = plan_schedule(problem, limit).cost
        monkeypatch.setattr(schedule_planner, "PRICE", 0.0)
        free = plan_schedule(problem, limit).cost
    assert priced.peak_bytes < free.peak_bytes <= limit
    assert priced.total_us <= 1.005 * free.total_us


def test_urgent_gathers_do_not_wait_for_long_reductions_on_another_group():
    """Each gather starts where it is needed, when the reduction before it has just started."""
    slow = Target.parse("h100,link_gb_s=150")
    costs = []
    with fake_world(RANKS), use_target(slow):
        graph = step(4, 20, copies=4)
        for second_group in (False, True):
            problem = problem_of(graph, slow, second_group=second_group)
            assert problem.regrouped == (("0",) if second_group else ())
            costs.append(evaluate(problem, reductions_awaited_last(problem)))
    shared, own = costs
    assert own.exposed_us < 0.8 * shared.exposed_us
    assert own.total_us < shared.total_us
    assert own.peak_bytes == shared.peak_bytes


def reductions_awaited_last(problem):
    """A plan that starts gathers as late and reductions as early as possible."""
    plan = single_plan(problem)
    gathers = [problem.jobs[members[0]].is_gather for members in plan.launches]

    def place(action):
        last = action.kind == "wait" and not gathers[action.launch]
        return problem.end if last else action.slot, gathers[action.launch]

    actions = sorted(plan.actions, key=place)
    return replace(plan, actions=tuple(each._replace(slot=place(each)[0]) for each in actions))


def test_no_gather_starts_inside_a_run_of_kernels():
    """Inductor may make one kernel of what comes before and after a gradient that a kernel makes,
    and code would start the gather after it. Operators run one by one.
    """
    with fake_world(RANKS), use_target(H100):
        graph = step(6, 1)
        reduced = graph.find_nodes(
            op="call_function", target=compat.functional.reduce_scatter_tensor.default
        )
        for each in reduced:
            (grad,) = each.all_input_nodes
            with graph.inserting_before(each):
                doubled = graph.call_function(torch.ops.aten.add.Tensor, (grad, grad))
                other = graph.call_function(torch.ops.aten.neg.default, (grad,))
            doubled.meta["val"] = other.meta["val"] = grad.meta["val"]
            each.replace_input_with(grad, doubled)
            graph.output_node().args = ((*graph.output_node().args[0], other),)
        fused = problem_of(graph, H100)
        with use_fusion(False):
            one_by_one = problem_of(graph, H100)
        ready = {job.earliest for job in fused.jobs if not job.is_gather}
        assert fused.inside_kernels == ready - {fused.end}
        assert not one_by_one.inside_kernels
        seen = []
        for problem in (fused, one_by_one):
            gathers = {job.number for job in problem.jobs if job.is_gather}
            plans = []

            def rank(plan, plans=plans):
                plans.append(plan)
                return 0, 0.0

            improve_plan(problem, one_ahead_plan(problem), rank, 2000, 0)
            starts = {
                action.slot
                for plan in plans
                for action in plan.actions
                if action.kind == "start" and gathers.issuperset(plan.launches[action.launch])
            }
            seen.append(not ready.isdisjoint(starts))
    assert seen == [False, True]


def test_a_plan_for_little_memory_gains_by_a_second_group():
    slow = Target.parse("mi300x,link_gb_s=200")
    times = []
    with fake_world(RANKS), use_target(slow):
        graph = step(6, 10, copies=2)
        for second_group in (False, True):
            problem = problem_of(graph, slow, second_group=second_group)
            times.append(plan_schedule(problem, memory_limit(problem, MemoryBudget())).cost)
    assert times[1].total_us < 0.997 * times[0].total_us


def test_the_log_says_how_the_chosen_plan_was_made(caplog):
    caplog.set_level(logging.DEBUG, logger="zpasses")
    with fake_world(RANKS), use_target(H100):
        problem = problem_of(step(4, kernels=4), H100)
        plan_schedule(problem, memory_limit(problem, MemoryBudget()))
    (said,) = (each.getMessage() for each in caplog.records if "plans, the one" in each.message)
    assert "changes of" in said or "no search" in said


def test_averages_over_replicas_follow_what_is_awaited_together():
    with fake_world(RANKS):
        problem = problem_of(step(3, 1), H100)
    timing = CollectiveTiming(1000.0, channel=Channel("network"))
    jobs = [
        job if job.is_gather else replace(job, average=Average("1", timing, 400.0))
        for job in problem.jobs
    ]
    averaged, plan = replace(problem, jobs=tuple(jobs)), single_plan(problem)
    before = evaluate(problem, plan)
    assert evaluate(averaged, plan) == evaluate(problem, plan, averages=True) == before
    found = evaluate(averaged, plan, averages=True)
    assert found.averages == 3
    # The network is idle until the first of them, and nothing else runs after the last kernel.
    assert 3000.0 < found.total_us < before.total_us + 3000.0
    reductions = tuple(job.number for job in problem.jobs if not job.is_gather)
    last, number = problem.end, len(plan.launches)
    gathers = [each for each in plan.actions if plan.launches[each.launch][0] not in reductions]
    ends = Action(last, "start", number), Action(last, "wait", number)
    together = Plan((*plan.launches, reductions), (*gathers, *ends))
    before, found = evaluate(averaged, together), evaluate(averaged, together, averages=True)
    assert found.averages == 1
    assert found.total_us == pytest.approx(before.total_us + 400.0 + 3 * 600.0)


@pytest.mark.parametrize("averages", [False, True])
def test_copies_of_gradients_to_the_host_follow_their_reductions(averages):
    with fake_world(RANKS):
        problem = problem_of(step(3, 1), H100)
    copy = CollectiveTiming(1000.0, channel=Channel("host-out"))
    average = Average("1", CollectiveTiming(100.0, channel=Channel("network")), 0.0)
    jobs = [
        job if job.is_gather else replace(job, to_host=copy, average=average)
        for job in problem.jobs
    ]
    copied, plan = replace(problem, jobs=tuple(jobs)), single_plan(problem)
    before = evaluate(problem, plan)
    assert evaluate(copied, plan) == before
    found = evaluate(copied, plan, averages=averages, copies=True)
    # Those of averages start when all averages have ended.
    least, most = (before.total_us, before.total_us + 300.0) if averages else (0.0, before.total_us)
    assert least + 3000.0 < found.total_us < most + 3000.0
    assert found.averages == 3 * averages
