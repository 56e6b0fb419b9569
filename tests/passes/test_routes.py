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
from zpasses.cost.time.route_figures import (
    CALIBRATION_VARIABLE,
    FORMAT,
    engine_routes,
    planned_routes,
)
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


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Returns a function that sets the figures of a machine's routes."""

    def set_figures(architecture, **figures):
        versions = {"torch": torch.__version__}
        c10d = {"latency_us": 1.0, "gb_s": 0.012, "compute_slowdown": 1.3}
        found = {"c10d": c10d | {"collective_slowdown": 1.2}} | {
            name: {"compute_slowdown": 1.0} | each for name, each in figures.items()
        }
        machine = {"architecture": architecture, "versions": versions, "routes": found}
        path = tmp_path / "calibration.json"
        path.write_text(json.dumps({"format": FORMAT, "machines": {"one": machine}}))
        monkeypatch.setenv(CALIBRATION_VARIABLE, str(path))

    return set_figures


@pytest.mark.parametrize("route", ["nccl_zero", "symm_mem"])
def test_measured_figures_are_enough_for_other_routes(measured, route):
    """On NVIDIA, nothing is known of routes but what was measured."""
    target = f"h100,{SLOW_LINKS}"
    assert not any(routes(scheduled(PARAMS, target)[1]))
    measured("sm90", **{route: {"latency_us": 1.0, "gb_s": 0.02, "copied_parts": 1.0}})
    moved = scheduled(PARAMS, target)[1]
    assert any(routes(moved))
    notes = [tag.note for _, tag in tagged(moved.graph, "gather")]
    assert any(note.startswith(f"by {route}: ") for note in notes)


QUICK_OR_FAST = {
    "mori": {"latency_us": 200.0, "gb_s": 0.03},
    "nccl_zero": {"latency_us": 1.0, "gb_s": 0.018},
}
"""One route starts early, and the other moves more."""


@pytest.mark.parametrize("options", [{"plan": "one-ahead", "cap_mb": 0}, {}], ids=["one", "auto"])
def test_a_plan_chooses_among_routes_for_each_launch(measured, options):
    """Launches of one graph take the route that is faster for their size, and no other choice of
    one route for all is as fast.
    """
    target = f"mi300x,{SLOW_LINKS}"
    shapes = ((8, 8), torch.bfloat16), ((128, 128), torch.float32)  # which share no launch
    params = [Param(*each) for each in shapes * 3]
    options = {"memory_budget": "1GiB", "mode": "coalesced", **options}
    alone = {}
    for name, figures in QUICK_OR_FAST.items():
        measured(
            "gfx942", **QUICK_OR_FAST | {"mori": UNUSABLE, "nccl_zero": UNUSABLE, name: figures}
        )
        alone[name] = scheduled(params, target, **options)[1]
        assert named_routes(alone[name]) <= {"", name}
    measured("gfx942", **QUICK_OR_FAST)
    _, both = scheduled(params, target, **options)
    assert {"mori", "nccl_zero"} <= named_routes(both)
    assert time_us(both, target) < min(time_us(each, target) for each in alone.values())
    for (node, tag), is_engine in zip(tagged(both.graph, "gather"), routes(both), strict=True):
        route = node.kwargs.get("route")
        assert is_engine == bool(route)
        assert not is_engine or tag.note.startswith(f"by {route}: ")
        assert "not by " in tag.note


UNUSABLE = {"latency_us": 1e6, "gb_s": 0.001}


def named_routes(gm):
    return {node.kwargs.get("route", "") for node, tag in tagged(gm.graph, "gather")}


def test_routes_that_others_are_as_good_as_in_every_figure_are_left_out(measured):
    target = Target.parse("mi300x")
    assert engine_routes(target) == planned_routes(target) == ("mori",)
    assert planned_routes(Target.parse("h100")) == ()
    assert engine_routes(Target.parse("h100")) == ("nccl_zero",)  # the other one copies, too
    measured("gfx942", **QUICK_OR_FAST)
    assert planned_routes(target) == ("mori", "nccl_zero")
    measured("gfx942", **QUICK_OR_FAST, symm_mem=QUICK_OR_FAST["nccl_zero"])
    assert planned_routes(target) == ("mori", "nccl_zero")
    measured("gfx942", **QUICK_OR_FAST, symm_mem={"latency_us": 0.5, "gb_s": 0.04})
    assert planned_routes(target) == ("symm_mem",)


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


def test_reasons_are_those_of_the_adopted_plan(monkeypatch):
    told = votes_of_the_first(monkeypatch)
    scheduled(PARAMS, GAINING, memory_budget="1GiB")
    _, second = scheduled(PARAMS, "mi300x", memory_budget="1GiB")
    assert told[0][1] != told[1][1]
    for (node, tag), is_engine in zip(tagged(second.graph, "gather"), routes(second), strict=True):
        assert is_engine == (node.kwargs.get("route") == "mori")
        assert not is_engine or tag.note.startswith("by mori: ")


@pytest.mark.parametrize("plan", ["one-ahead", "single"])
def test_simple_plans_choose_routes_too(plan):
    _, moved = scheduled(PARAMS, GAINING, plan=plan, cap_mb=0)
    _, off = scheduled(PARAMS, GAINING, plan=plan, cap_mb=0, copy_engines="off")
    assert any(routes(moved))
    assert not any(routes(off))
    assert len(routes(moved)) == len(routes(off))
    assert time_us(moved, GAINING) < time_us(off, GAINING)
