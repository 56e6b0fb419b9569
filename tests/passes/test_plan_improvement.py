"""Changes of plans, which `schedule` searches by, and what plans of any such changes cost."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.graphs import Param, few_examples, joint, rewritten
from zpasses.cost.memory.collective_moves import equal_liveness
from zpasses.cost.plan.plan_improvement import improve_plan
from zpasses.cost.plan.schedule_evaluation import evaluate
from zpasses.cost.plan.simple_plans import merged_neighbours, one_ahead_plan
from zpasses.cost.time.step_time import step_time
from zpasses.cost.time.target import TARGETS, Target, use_target
from zpasses.passes import GatherParams, ReduceGrads, Schedule
from zpasses.passes.schedule import _by_node
from zpasses.passes.writers.schedule_writer import copied, write_plan
from zpasses.testing import fake_world
from zpasses.testing.strategies import param_lists

SLOW_LAUNCH = Target.parse("h100,launch_us=1000,hop_us=1000,network_hop_us=1000")
ENGINES = Target.parse("mi300x")
WORLD = 4


def problem_of_params(params, **options):
    """Returns the problem of the graph of one rank, in which nothing has moved."""
    plain = rewritten(joint(params, 0, WORLD), GatherParams(), ReduceGrads())
    return Schedule(**options).problem(plain.graph)


def walked(problem, plan, changes):
    """Returns the plans that so many changes in a row lead to, whatever they cost."""
    seen, numbers = [], itertools.count()

    def rank(plan):
        seen.append(plan)
        return 0, -next(numbers)

    improve_plan(problem, plan, rank, changes, 1)
    return seen


@few_examples
@given(
    param_lists(max_size=6),
    st.sampled_from(["auto", "coalesced", "flat"]),
    st.sampled_from([TARGETS["cpu"], SLOW_LAUNCH, ENGINES]),
    st.sampled_from(["shared", "own"]),
    st.booleans(),
)
def test_any_change_leads_to_a_plan_that_can_be_written_and_holds_what_is_evaluated(
    params, mode, target, group, merged
):
    with fake_world(WORLD), use_target(target):
        problem = problem_of_params(params, mode=mode, reduction_group=group, copy_engines="on")
        launches = merged_neighbours(problem, 1 << 30) if merged else None
        plans = walked(problem, one_ahead_plan(problem, launches), 60)
        for plan in plans[:: max(1, len(plans) // 8)]:
            assert sorted(itertools.chain(*plan.launches)) == [job.number for job in problem.jobs]
            cost = evaluate(problem, plan)
            graph, copy = copied(problem)
            write_plan(graph, copy, _by_node(problem, plan), "test")
            assert equal_liveness(graph).peak_bytes <= cost.peak_bytes
            if mode == "coalesced" and group == "shared":
                assert step_time([graph], target).total_us == pytest.approx(cost.total_us)


def test_changes_merge_launches_start_them_early_and_choose_their_routes():
    for target, width, engines in ((SLOW_LAUNCH, 64, False), (ENGINES, 8192, True)):
        params = [Param((width, width)) for _ in range(6)]
        with fake_world(WORLD), use_target(target):
            problem = problem_of_params(params, copy_engines="on" if engines else "off")
            plan = one_ahead_plan(problem)

            def rank(plan, problem=problem):
                return 0, evaluate(problem, plan).total_us

            better = improve_plan(problem, plan, rank, 500, 1)
            assert better == improve_plan(problem, plan, rank, 500, 1)
            costs = [rank(each) for each in (plan, *better)]
        assert all(later < earlier for earlier, later in itertools.pairwise(costs))
        assert costs[-1][1] < (0.99 if engines else 0.9) * costs[0][1]
        assert len(better[-1].launches) < len(plan.launches)
        assert bool(better[-1].routes) == engines


def test_no_change_exceeds_the_limit():
    with fake_world(WORLD), use_target(SLOW_LAUNCH):
        problem = problem_of_params([Param((64, 64)) for _ in range(6)])
        plan = one_ahead_plan(problem)
        limit = evaluate(problem, plan).peak_bytes

        def rank(plan):
            cost = evaluate(problem, plan)
            return max(0, cost.peak_bytes - limit), cost.total_us

        better = improve_plan(problem, plan, rank, 2000, limit)
        assert better
        assert all(rank(each)[0] == 0 for each in better)
        free = improve_plan(problem, plan, lambda plan: (0, rank(plan)[1]), 2000, limit)
        assert evaluate(problem, free[-1]).peak_bytes > limit
