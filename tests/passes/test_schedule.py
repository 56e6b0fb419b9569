import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.foreign import already_sharded, simple_fsdp
from tests.graphs import (
    Param,
    assert_step_equals_reference,
    few_examples,
    joint,
    param_lists,
    rewritten,
)
from zpasses import OptionError, Pipeline
from zpasses.cost.collective_moves import MemoryCurve
from zpasses.cost.schedule_planner import memory_limit
from zpasses.cost.step_time import step_time
from zpasses.cost.target import TARGETS, Target, current_target, use_target
from zpasses.graph.nodes import collective_of, collectives, is_wait
from zpasses.graph.tags import tag_of
from zpasses.option_values import parse_budget
from zpasses.passes import Bucket, GatherParams, Overlap, ReduceGrads, Schedule
from zpasses.testing import (
    assert_deterministic,
    assert_equal_bits,
    capture_graphs,
    capture_ranks,
    fake_world,
    listing,
    random_inputs,
    trace_joint,
)

ROOMY = "1GiB"
FORMS = ("reduce_scatter", "all_reduce")
MODES = ("auto", "coalesced", "flat")
H100 = TARGETS["h100"]
SLOW_LINKS = Target.parse("h100,link_gb_s=0.001,network_gb_s=0.001")
SLOW_LAUNCH = Target.parse("h100,launch_us=1000,hop_us=1000,network_hop_us=1000")


def lower(form="reduce_scatter"):
    return GatherParams(), ReduceGrads(form)


def scheduled(*params, world_size=2, rank=0, form="reduce_scatter", target=H100, **options):
    """Returns the graph of one rank without and with a schedule."""
    with fake_world(world_size, rank), use_target(target):
        plain = rewritten(joint(params, rank, world_size), *lower(form))
        return plain, rewritten(plain, Schedule(**options))


def steps(gm):
    """Returns what happens, in order: starts and waits of collectives by parameter, and kernels."""
    found = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or "getitem" in node.name:
            continue
        collective = collective_of(node)
        if is_wait(node):
            tag = tag_of(node.all_input_nodes[0])
            verb = "gather" if tag.role in ("gather", "gathered") else "reduce"
            found.append(f"await {verb} {','.join(tag.params)}")
        elif collective is not None:
            found.append(f"start {tag_of(node).role} {','.join(tag_of(node).params)}")
        else:
            found.append(node.name)
    return found


def kept(gm):
    """Returns the nodes that neither communicate nor move with a collective."""
    return [
        node.name
        for node in gm.graph.nodes
        if node.op == "call_function" and node.name.startswith("mul")
    ]


# --- equal results ------------------------------------------------------------------------------
@few_examples
@given(
    param_lists(max_size=5),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(FORMS),
    st.sampled_from(MODES),
    st.sampled_from(["0%", "30%", ROOMY]),
    st.sampled_from([TARGETS["cpu"], H100, SLOW_LINKS, SLOW_LAUNCH]),
)
def test_random_graphs_stay_equal_within_the_budget_and_never_get_slower(
    params, world_size, form, mode, budget, target
):
    before, after, orders = [], [], []
    for rank in range(world_size):
        with fake_world(world_size, rank), use_target(target):
            before.append(joint(params, rank, world_size))
            plain = rewritten(before[-1], *lower(form))
            option = Schedule(memory_budget=budget, mode=mode)
            problem = option.problem(plain.graph)
            limit = memory_limit(problem, parse_budget(budget, "here"))
            after.append(rewritten(plain, option))
            assert peak_of(after[-1]) <= max(limit, peak_of(plain))
            assert kept(after[-1]) == kept(plain)
            ours = step_time([after[-1].graph], current_target()).total_us
            assert ours <= step_time([plain.graph], current_target()).total_us + 1e-3
            if problem.jobs:
                predicted = option.plan(problem).cost
                # Flat buckets are predicted with at least the copies that they make.
                assert ours <= predicted.total_us + 1e-3
                assert mode == "flat" or ours == pytest.approx(predicted.total_us)
                assert peak_of(after[-1]) <= predicted.peak_bytes
            orders.append([(each.op, each.shapes) for _, each in collectives(after[-1].graph)])
    assert all(order == orders[0] for order in orders)
    assert_equal_bits(before, after, random_inputs(before))


def peak_of(gm):
    return MemoryCurve(gm.graph, 0.0).base.peak_bytes
