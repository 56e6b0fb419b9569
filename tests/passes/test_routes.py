"""The routes that `schedule` plans: copy engines where they gain, on targets that have them."""

import json
import re

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
    votes_of_the_first,
)
from zpasses.cost.memory.collective_moves import equal_liveness
from zpasses.cost.plan.schedule_planner import memory_limit
from zpasses.cost.time.route_figures import CALIBRATION_VARIABLE, FORMAT
from zpasses.cost.time.step_time import step_time
from zpasses.cost.time.target import Target, use_target
from zpasses.graph.queries import collectives
from zpasses.graph.tags import tagged
from zpasses.option_values import parse_budget
from zpasses.passes import GatherParams, ReduceGrads, Schedule
from zpasses.testing import assert_equal_bits, fake_world, listing, random_inputs
from zpasses.testing.strategies import param_lists

LOWER = (GatherParams(), ReduceGrads("reduce_scatter"))
SLOW_LINKS = "launch_us=0.01,hop_us=0.01,link_gb_s=0.02"
GAINING = f"mi300x,{SLOW_LINKS}"
"""A target whose engines gain whatever the size of a gather."""
PARAMS = [Param((64, 64)) for _ in range(6)]


def scheduled(params, target, world_size=2, rank=0, **options):
    """Returns the graph before and after the pass."""
    with fake_world(world_size, rank), use_target(Target.parse(target)):
        plain = rewritten(joint(params, rank, world_size), *LOWER)
        return plain, rewritten(plain, Schedule(**options))


def routes(gm):
    """Returns for each gather whether it is a copy-engine gather."""
    return [each.op.startswith("sdma") for _, each in collectives(gm.graph) if "gather" in each.op]


def time_us(gm, target):
    with fake_world(2):
        return step_time([gm.graph], Target.parse(target)).total_us


def test_gathers_beside_kernels_take_copy_engines_where_that_gains():
    _, with_engines = scheduled(PARAMS, GAINING, memory_budget="1GiB")
    _, without = scheduled(PARAMS, GAINING, memory_budget="1GiB", copy_engines="off")
    assert any(routes(with_engines))
    assert not any(routes(without))
    assert time_us(with_engines, GAINING) < 0.99 * time_us(without, GAINING)
    assert "sdma" not in "".join(op for op in ops(with_engines) if "reduce" in op)


def ops(gm):
    return [each.op for _, each in collectives(gm.graph)]


def test_small_gathers_stay_because_engines_take_longer_to_start():
    _, moved = scheduled(PARAMS, "mi300x", memory_budget="1GiB")
    assert not any(routes(moved))
    notes = [tag.note for _, tag in tagged(moved.graph, "gather")]
    assert all(re.match(r"not by mori: [\d.]+ (B|KiB) per rank", note) for note in notes), notes
    assert all("would lose" in note for note in notes)


def test_the_reason_for_a_route_is_in_the_tag_of_its_gather():
    _, moved = scheduled(PARAMS, GAINING, memory_budget="1GiB")
    notes = [tag.note for _, tag in tagged(moved.graph, "gather")]
    for by_engine, note in zip(routes(moved), notes, strict=True):
        assert note.startswith("by mori: " if by_engine else "not by mori: "), note
        assert (" gains " if by_engine else " would lose ") in note


@pytest.mark.parametrize("target", ["cpu", "h100", "b200"])
def test_targets_without_mori_keep_their_graphs_node_for_node(target):
    gaining = f"{target},{SLOW_LINKS}"
    _, default = scheduled(PARAMS, gaining)
    _, off = scheduled(PARAMS, gaining, copy_engines="off")
    assert listing(default) == listing(off)
    _, asked = scheduled(PARAMS, gaining, copy_engines="on")
    weighed = [note for _, tag in tagged(asked.graph, "gather") if (note := tag.note)]
    assert all(note.startswith("not by nccl_zero: ") for note in weighed)
    assert bool(weighed) == (target != "cpu")


@pytest.mark.parametrize("route", ["nccl_zero", "symm_mem"])
def test_measured_figures_are_enough_for_other_routes(tmp_path, monkeypatch, route):
    """On NVIDIA, nothing is known of routes but what was measured."""
    figures = {"latency_us": 1.0, "gb_s": 0.02, "compute_slowdown": 1.0, "copied_parts": 1.0}
    c10d = {"latency_us": 1.0, "gb_s": 0.012, "compute_slowdown": 1.3, "collective_slowdown": 1.2}
    machine = {
        "architecture": "sm90",
        "versions": {"torch": torch.__version__},
        "routes": {route: figures, "c10d": c10d},
    }
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"format": FORMAT, "machines": {"one": machine}}))
    target = f"h100,{SLOW_LINKS}"
    assert not any(routes(scheduled(PARAMS, target)[1]))
    monkeypatch.setenv(CALIBRATION_VARIABLE, str(path))
    moved = scheduled(PARAMS, target)[1]
    assert any(routes(moved))
    notes = [tag.note for _, tag in tagged(moved.graph, "gather")]
    assert any(note.startswith(f"by {route}: ") for note in notes)


@pytest.mark.parametrize(
    ("target", "world_size"),
    [(f"{GAINING},ranks_per_node=1", 2), (f"{GAINING},ranks_per_node=16", 9)],
    ids=["two nodes", "too many ranks"],
)
def test_groups_that_no_engine_reaches_keep_their_collective(target, world_size):
    _, moved = scheduled(PARAMS, target, world_size)
    assert listing(moved) == listing(scheduled(PARAMS, target, world_size, copy_engines="off")[1])


@settings(few_examples, max_examples=drawn_examples(12))
@given(
    param_lists(max_size=6),
    st.sampled_from([2, 3]),
    st.sampled_from(["auto", "coalesced", "flat"]),
    st.sampled_from(["0%", "30%", "1GiB"]),
    st.sampled_from(["mi300x", GAINING, "mi300x,kernel_us=500,link_gb_s=1"]),
)
def test_engines_never_slow_the_step_and_never_exceed_the_budget(
    params, world_size, mode, budget, name
):
    before, after, orders, told = [], [], [], []
    target = Target.parse(name)
    for rank in range(world_size):
        with fake_world(world_size, rank), use_target(target):
            before.append(joint(params, rank, world_size))
            plain = rewritten(before[-1], *LOWER)
            option = Schedule(memory_budget=budget, mode=mode)
            off = Schedule(memory_budget=budget, mode=mode, copy_engines="off")
            problem = option.problem(plain.graph)
            limit = memory_limit(problem, parse_budget(budget, "here"))
            with pytest.MonkeyPatch.context() as patched:
                votes_of_the_first(patched, told)
                after.append(rewritten(plain, option))
            orders.append(ops(after[-1]))
            assert peak(after[-1]) <= max(limit, peak(plain))
            if rank:  # which has the plan of the first rank, and may pad or hold nothing
                continue
            ours = step_time([after[-1].graph], target).total_us
            assert ours <= step_time([plain.graph], target).total_us + 1e-3
            if told:  # otherwise there were too few collectives to vote about
                predicted = option.choose(problem).cost
                assert_predicted(ours, predicted.total_us, params, mode)
                assert peak(after[-1]) <= predicted.peak_bytes
                # Plans within 0.4 % of each other are chosen by their tolerance.
                theirs = off.choose(off.problem(plain.graph)).cost.total_us
                assert ours <= theirs * 1.005 + 1e-3
    assert all(order == orders[0] for order in orders)
    assert_equal_bits(before, after, random_inputs(before))


def peak(gm):
    return equal_liveness(gm.graph).peak_bytes


def test_all_ranks_take_the_routes_of_the_first(monkeypatch):
    """The second rank would gather otherwise, since its kernels are too short to hide anything."""
    told = votes_of_the_first(monkeypatch)
    _, first = scheduled(PARAMS, GAINING, memory_budget="1GiB")
    _, second = scheduled(PARAMS, "mi300x", memory_budget="1GiB")
    assert any(routes(first))
    assert told[0][1] != told[1][1]
    assert routes(second) == routes(first)


@pytest.mark.parametrize("plan", ["one-ahead", "single"])
def test_simple_plans_choose_routes_too(plan):
    _, moved = scheduled(PARAMS, GAINING, plan=plan, cap_mb=0)
    _, off = scheduled(PARAMS, GAINING, plan=plan, cap_mb=0, copy_engines="off")
    assert any(routes(moved))
    assert not any(routes(off))
    assert len(routes(moved)) == len(routes(off))
    assert time_us(moved, GAINING) < time_us(off, GAINING)
