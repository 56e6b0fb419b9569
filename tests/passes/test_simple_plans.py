"""The plans of `schedule` that need no search: `single` and `one-ahead`."""

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.graphs import Param, few_examples, joint, rewritten, steps
from zpasses.cost.memory.collective_moves import equal_liveness
from zpasses.cost.plan.schedule_planner import memory_limit
from zpasses.cost.time.target import TARGETS, Target, use_target
from zpasses.graph.cached_params import param_slots
from zpasses.graph.queries import collective_of, collectives, is_wait
from zpasses.option_values import parse_budget
from zpasses.passes import CacheParams, GatherParams, ReduceGrads, Schedule
from zpasses.runtime.forward_variants import gather_ids
from zpasses.testing import assert_equal_bits, fake_world, listing, random_inputs
from zpasses.testing.strategies import param_lists

PLANS = ("single", "one-ahead")
MODES = ("coalesced", "flat")
FORMS = ("reduce_scatter", "all_reduce")
ROOMY = "1GiB"
MIB = 1 << 20


def lower(form="reduce_scatter"):
    return GatherParams(), ReduceGrads(form)


def counts(gm):
    """Returns the numbers of gathers and reductions."""
    ops = [each.op for _, each in collectives(gm.graph)]
    return sum("gather" in op for op in ops), sum("reduce" in op for op in ops)


def bucketed(*params, world_size=3, rank=0, form="reduce_scatter", passes=(), **options):
    schedule = Schedule(**{"plan": "single", "memory_budget": ROOMY, **options})
    with fake_world(world_size, rank):
        return rewritten(joint(params, rank, world_size), *lower(form), *passes, schedule)


def short(gm, start=""):
    """Returns a listing with short names and without columns, from the node `start` on."""
    text = re.sub(r"_default|_into_tensor|(?<=scatter)_tensor", "", listing(gm))
    text = re.sub(r" +#", "  #", text)
    return text[text.index(start) :]


# --- rewritten graphs ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shapes", "form", "mode"),
    [
        pytest.param([(4, 2), (6, 2)], "reduce_scatter", "coalesced", id="coalesced"),
        pytest.param([(4, 2), (6, 2)], "reduce_scatter", "flat", id="flat"),
        # Waits come before all slices.
        pytest.param([(7, 2), (3,)], "all_reduce", "coalesced", id="all_reduce_coalesced"),
        # Gradients of equal row shape are concatenated, and others are packed.
        pytest.param([(7, 2), (4, 2)], "all_reduce", "flat", id="all_reduce_concatenated"),
        pytest.param([(7,), (3,)], "all_reduce", "flat", id="all_reduce_packed"),
    ],
)
def test_collectives_of_a_bucket(listing_snapshot, shapes, form, mode):
    world = {"world_size": 2} if form == "reduce_scatter" else {"world_size": 3, "rank": 1}
    gm = bucketed(*map(Param, shapes), form=form, mode=mode, **world)
    listing_snapshot(short(gm, "mul_2 = " if form == "all_reduce" else ""))


def test_gradients_of_another_row_shape_have_another_flat_all_reduce():
    params = [Param((4, 2)), Param((6, 2)), Param((4, 3)), Param((6, 3))]
    assert counts(bucketed(*params, form="all_reduce", mode="flat")) == (1, 2)
    assert counts(bucketed(*params, form="reduce_scatter", mode="flat")) == (1, 1)


def test_buckets_communicate_the_same_bytes():
    params = [Param((4, 2)), Param((6, 2)), Param((9, 2))]
    for mode in MODES:
        for form in FORMS:
            with fake_world(3):
                plain = rewritten(joint(params, 0, 3), *lower(form))
                merged = rewritten(plain, Schedule("single", mode=mode, memory_budget=ROOMY))
            sent = [sum(each.nbytes for _, each in collectives(gm.graph)) for gm in (plain, merged)]
            assert sent[0] == sent[1]
            assert counts(merged) == (1, 1)


# --- equal results ------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
def test_groups_have_buckets_of_their_own(mode):
    before, after = [], []
    for rank in range(2):
        with fake_world(2, rank):
            other = torch.distributed.new_group([0, 1]).group_name
            rows = {4: {}, 6: {"group": other}, 3: {}, 2: {"group": other}}
            params = [Param((count, 2), **options) for count, options in rows.items()]
            before.append(joint(params, rank, 2))
            after.append(
                rewritten(before[-1], *lower(), Schedule("single", mode=mode, memory_budget=ROOMY))
            )
    assert counts(after[0]) == (2, 2)
    assert {each.group for _, each in collectives(after[0].graph)} == {"0", other}
    assert_equal_bits(before, after, random_inputs(before))


def test_dtypes_have_buckets_of_their_own():
    half = {"param_dtype": torch.bfloat16}
    params = [Param((4, 2)), Param((6, 2), **half), Param((3, 2)), Param((2, 2), **half)]
    for mode in MODES:
        assert counts(bucketed(*params, mode=mode)) == (2, 2)


@few_examples
@given(param_lists(max_size=4), st.sampled_from([2, 3]), st.sampled_from([0.0001, 0.0003, 1]))
def test_random_graphs_stay_equal_and_buckets_within_their_cap(params, world_size, mb):
    before, after = [], {}
    for rank in range(world_size):
        with fake_world(world_size, rank):
            before.append(joint(params, rank, world_size))
            for form, mode, plan in itertools.product(FORMS, MODES, PLANS):
                option = Schedule(plan, mb, mode=mode, memory_budget=ROOMY)
                graphs = after.setdefault((form, mode, plan), [])
                graphs.append(rewritten(before[-1], *lower(form), option))
    for graphs in after.values():
        assert_equal_bits(before, graphs, random_inputs(before))
        for _, each in collectives(graphs[0].graph):
            if len(each.shapes) > 1:
                assert each.nbytes * (world_size if "gather" in each.op else 1) <= mb * MIB


# --- unchanged graphs ---------------------------------------------------------------------------
def test_cap_bounds_the_full_tensors_of_a_bucket():
    params = [Param((8, 16))] * 6  # 512 bytes each
    for mode in MODES:
        for nbytes, several in ((1023, 6), (1024, 3)):
            gm = bucketed(*params, world_size=2, mode=mode, cap_mb=nbytes / MIB)
            assert counts(gm) == (several, several)


def test_gather_of_a_computed_value_and_gradient_that_is_read_are_not_bucketed():
    with fake_world(2):
        gm = rewritten(joint([Param((4, 2), reads=2), Param((6, 2))], 0, 2), *lower())
        # The two gradients of one parameter are added after their reductions, so the reductions
        # stay.
        saved = Schedule("single", memory_budget=ROOMY).rewrite(gm.graph)
    assert saved == 2  # of three gathers
    assert counts(gm) == (1, 3)


def test_cached_parameters_of_a_bucket_are_gathered_together_or_not_at_all():
    params = Param((4, 2)), Param((6, 2)), Param((3, 2), param_dtype=torch.bfloat16)
    for mode in MODES:
        gm = bucketed(*params, passes=(CacheParams(),), mode=mode)
        names = (slot.param for slot in param_slots(gm.graph))
        together = dict(zip(names, gather_ids(gm.graph), strict=True))
        assert together["p0"] == together["p1"] != together["p2"]


# --- memory ---------------------------------------------------------------------------------------
def within(params, budget, mode, form, plan="single", gloo=False):
    """Returns the numbers of gathers and reductions without and with buckets. The peak of the graph
    is within the budget.
    """
    with fake_world(3), pytest.MonkeyPatch.context() as patched:
        if gloo:  # which takes scratch memory
            patched.setattr("zpasses.compat.is_gloo", lambda group, device=None: True)
        plain = rewritten(joint(params, 0, 3), *lower(form))
        option = Schedule(plan, mode=mode, memory_budget=budget)
        limit = memory_limit(option.problem(plain.graph), parse_budget(budget, "here"))
        gm = rewritten(plain, option)
        assert peak_of(gm) <= max(limit, peak_of(plain))
        return counts(plain), counts(gm)


def peak_of(gm):
    return equal_liveness(gm.graph).peak_bytes


@pytest.mark.parametrize(
    ("form", "mode", "plan"),
    [("reduce_scatter", "coalesced", "one-ahead"), ("all_reduce", "flat", "single")],
)
def test_a_smaller_budget_makes_fewer_buckets(mode, form, plan):
    params = [Param((8, 16))] * 6
    (before, none), (_, some), (_, many) = (
        within(params, budget, mode, form, plan) for budget in ("1B", "30%", "1GiB")
    )
    assert before == (6, 6)
    assert many == (1, 1)
    assert sum(many) <= sum(some) <= sum(none) <= sum(before)
    assert sum(many) < sum(none)


@few_examples
@given(
    param_lists(max_size=6),
    st.integers(0, 100),
    st.sampled_from(MODES),
    st.sampled_from(FORMS),
    st.sampled_from(PLANS),
    st.booleans(),
)
def test_the_modelled_peak_stays_within_the_budget(params, percent, mode, form, plan, gloo):
    within(params, f"{percent}%", mode, form, plan, gloo)


def test_ranks_that_pad_cast_or_hold_nothing_make_the_same_plan():
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float64}
    params = [Param((rows, 8), **dtypes) for rows in (7, 5, 2, 6)]
    plans = []
    for rank in range(3):
        with fake_world(3, rank):
            gm = joint(params, rank, 3)
            lowered = rewritten(gm, *lower()).graph
            options = [
                Schedule(plan, mode=mode, memory_budget=budget)
                for budget in ("0%", "45%")
                for mode in MODES
                for plan in PLANS
            ]
            plans.append([each.choose(each.problem(lowered)).plan for each in options])
    assert plans[0] == plans[1] == plans[2]
    half = len(plans[0]) // 2
    assert set(plans[0][:half]).isdisjoint(plans[0][half:])  # budgets matter


# --- options --------------------------------------------------------------------------------------
def merged_by_auto(params, target, form="reduce_scatter", world_size=8):
    with fake_world(world_size), use_target(target):
        gm = rewritten(
            joint(params, 0, world_size), *lower(form), Schedule("single", memory_budget=ROOMY)
        )
    return [(each.op, len(each.shapes)) for _, each in collectives(gm.graph)]


@pytest.mark.parametrize("target", ["h100", "mi300x"])
def test_auto_coalesces_where_a_launch_of_several_tensors_copies_nothing(target):
    merged = merged_by_auto([Param((16, 4)), Param((24, 4))], TARGETS[target])
    names = ("all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
    assert merged == [(name, 2) for name in names]


def test_auto_weighs_launches_against_copies_on_gloo(monkeypatch):
    monkeypatch.setattr("zpasses.compat.is_gloo", lambda group, device=None: True)
    params = [Param((64, 64)), Param((32, 64))]
    slow_launch = Target.parse("cpu,launch_us=1000000")
    free_launch = "launch_us=0.001,hop_us=0.001,network_hop_us=0.001"
    slow_memory = Target.parse(f"cpu,{free_launch},memory_gb_s=0.001")
    # gloo copies what it gathers in any case, so gathers always share a launch
    assert merged_by_auto(params, slow_memory, "all_reduce")[1:] == [("all_reduce", 1)] * 2
    gathers, *reductions = merged_by_auto(params, slow_launch, "all_reduce")
    assert gathers == ("all_gather_into_tensor_coalesced", 2)
    assert reductions in ([("all_reduce", 1)], [("all_reduce_coalesced", 2)])


def test_shared_plan_that_exceeds_the_budget_is_warned_about(monkeypatch, caplog):
    params = [Param((2048, 512))] * 6
    within = bucketed(*params, plan="one-ahead", memory_budget="0%")
    told = []

    def exchange(group, question, mine, *_, merge, **__):
        """The first rank planned for another shape: it has the plan of the first vote."""
        told.append(mine[1])
        return merge([[mine[0], told[0]]] * 2)

    monkeypatch.setattr("zpasses.ranks.agree.exchange", exchange)
    bucketed(*params)
    assert "it raises the peak" not in caplog.text
    bucketed(*[Param((8, 16))] * 6, memory_budget="0%")
    assert "it raises the peak" not in caplog.text  # a few KiB are not worth a warning
    above = bucketed(*params, memory_budget="0%")
    assert "it raises the peak" in caplog.text
    with fake_world(3):
        assert peak_of(above) > peak_of(within) + MIB
    assert counts(above) == (1, 1) != counts(within)


# --- one ahead ------------------------------------------------------------------------------------
THREE = [Param((4, 2)), Param((6, 2)), Param((8, 2))]


def overlapped(*params, world_size=2, rank=0, form="reduce_scatter", **options):
    """Returns the graph without and with collectives in flight, by default unmerged ones."""
    option = Schedule(**{"plan": "one-ahead", "cap_mb": 0, "memory_budget": ROOMY, **options})
    with fake_world(world_size, rank):
        plain = rewritten(joint(params, rank, world_size), *lower(form))
        return plain, rewritten(plain, option)


def test_gathers_start_after_the_one_before_and_reductions_are_awaited_after_the_next():
    plain, moved = overlapped(*THREE)
    assert steps(plain) == [
        *("start gather p0", "await gather p0", "mul"),
        *("start gather p1", "await gather p1", "mul_1"),
        *("start gather p2", "await gather p2", "mul_2"),
        *("mul_3", "start reduce p2", "await reduce p2"),
        *("mul_4", "start reduce p1", "await reduce p1"),
        *("mul_5", "start reduce p0", "await reduce p0"),
    ]
    assert steps(moved) == [
        *("start gather p0", "await gather p0", "start gather p1", "mul"),
        *("await gather p1", "start gather p2", "mul_1"),
        *("await gather p2", "mul_2"),
        *("mul_3", "start reduce p2"),
        *("mul_4", "start reduce p1", "await reduce p2"),
        *("mul_5", "start reduce p0", "await reduce p1"),
        "await reduce p0",
    ]


def test_graphs_in_which_nothing_can_move_stay():
    with fake_world(2):
        gm = rewritten(joint(THREE, 0, 2), *lower())
        assert Schedule("one-ahead", cap_mb=0, memory_budget=ROOMY).rewrite(gm.graph) == 1
        single = rewritten(joint([Param((4, 2), frozen=True)], 0, 2), *lower())
        assert Schedule("one-ahead").rewrite(single.graph) == 0


def test_no_node_is_created_and_nothing_else_moves():
    cast = Param((7, 2), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, moved = overlapped(*THREE, cast, world_size=3, rank=2)
    assert sorted(listing(plain).splitlines()) == sorted(listing(moved).splitlines())
    moving = ("all_gather", "reduce_scatter", "wait", "_to_copy", "constant_pad", "slice")
    still = [
        [node.name for node in gm.graph.nodes if not node.name.startswith(moving)]
        for gm in (plain, moved)
    ]
    assert still[0] == still[1]


def test_casts_and_padding_start_early_with_their_gather():
    _, moved = overlapped(
        Param((4, 2)), Param((7, 2), param_dtype=torch.bfloat16), world_size=3, rank=2
    )
    names = [node.name for node in moved.graph.nodes if node.op == "call_function"]
    first = names.index("mul")
    wanted = ["_to_copy_default", "constant_pad_nd_default_1", "all_gather_into_tensor_default_1"]
    assert [name for name in names[:first] if name in wanted] == wanted


def test_slices_of_a_gradient_follow_its_wait():
    _, moved = overlapped(Param((7, 2)), Param((7, 3)), world_size=3, rank=1, form="all_reduce")
    names = [node.name for node in moved.graph.nodes if node.op == "call_function"]
    # the first gradient is awaited after the second has started, and its copy follows directly
    started = names.index("all_reduce_default_1")
    assert names[started + 1 : started + 3] == ["wait_tensor_default_2", "slice_copy_tensor"]


@pytest.mark.parametrize("mode", MODES)
def test_a_bucket_moves_as_a_whole(mode):
    params, options = [*THREE, Param((2, 2))], {"mode": mode, "cap_mb": 100 / MIB}
    plain = bucketed(*params, world_size=2, **options)
    _, moved = overlapped(*params, **options)
    assert [each for _, each in collectives(plain.graph)] == [
        each for _, each in collectives(moved.graph)
    ]
    order = steps(moved)
    starts = [at for at, step in enumerate(order) if step.startswith("start gather")]
    assert len(starts) == 2
    assert starts[1] < order.index("mul")
    waits = [at for at, step in enumerate(order) if step.startswith("await reduce")]
    assert waits[0] > [at for at, step in enumerate(order) if step.startswith("start reduce")][1]


def in_flight(gm, kind):
    """Returns the largest number of collectives of a kind that are in flight at once."""
    most, pending = 0, set()
    for node in gm.graph.nodes:
        collective = collective_of(node)
        if collective is not None and kind in collective.op:
            pending.add(node)
        elif is_wait(node):
            pending.discard(node.all_input_nodes[0])
        most = max(most, len(pending))
    return most


@few_examples
@given(
    param_lists(max_size=5),
    st.sampled_from([2, 3]),
    st.sampled_from(FORMS),
)
def test_at_most_one_gather_and_two_reductions_are_in_flight(params, world_size, form):
    _, moved = overlapped(*params, world_size=world_size, form=form)
    assert in_flight(moved, "gather") <= 1
    assert in_flight(moved, "reduce") <= 2
