import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.graphs import Param, few_examples, joint, rewritten
from zpasses.cost.memory.collective_moves import MemoryCurve, movable_gathers, movable_reductions
from zpasses.cost.time.target import TARGETS, Target, use_target
from zpasses.graph.queries import collectives
from zpasses.option_values import parse_budget
from zpasses.passes import CacheParams, GatherParams, ReduceGrads
from zpasses.passes.bucket import Bucket
from zpasses.passes.overlap import Overlap
from zpasses.runtime.forward_variants import gather_ids, param_slots
from zpasses.testing import assert_equal_bits, fake_world, listing, random_inputs
from zpasses.testing.strategies import param_lists

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
    bucket = Bucket(**{"memory_budget": ROOMY, **options})
    with fake_world(world_size, rank):
        return rewritten(joint(params, rank, world_size), *lower(form), *passes, bucket)


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
                merged = rewritten(plain, Bucket(mode=mode, memory_budget=ROOMY))
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
            after.append(rewritten(before[-1], *lower(), Bucket(mode=mode, memory_budget=ROOMY)))
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
            for form, mode in itertools.product(FORMS, MODES):
                bucket = Bucket(mode=mode, cap_mb=mb, memory_budget=ROOMY)
                graphs = after.setdefault((form, mode), [])
                graphs.append(rewritten(before[-1], *lower(form), bucket))
    for graphs in after.values():
        assert_equal_bits(before, graphs, random_inputs(before))
        for _, each in collectives(graphs[0].graph):
            if len(each.shapes) > 1:
                assert each.nbytes * (world_size if "gather" in each.op else 1) <= mb * MIB


# --- unchanged graphs ---------------------------------------------------------------------------
def test_cap_bounds_the_full_tensors_of_a_bucket():
    params = [Param((8, 16))] * 6  # 512 bytes each
    for mode in MODES:
        for nbytes, several in ((0, 6), (1023, 6), (1024, 3), (2048, 2)):
            gm = bucketed(*params, world_size=2, mode=mode, cap_mb=nbytes / MIB)
            assert counts(gm) == (several, several)


def test_gather_of_a_computed_value_and_gradient_that_is_read_are_not_bucketed():
    with fake_world(2):
        gm = rewritten(joint([Param((4, 2), reads=2), Param((6, 2))], 0, 2), *lower())
        # The two gradients of one parameter are added after their reductions, so the reductions
        # stay.
        saved = Bucket(memory_budget=ROOMY).rewrite(gm.graph)
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
def planned(params, budget, mode, form, plan_for_overlap=False, gloo=False):
    """Returns the memory curve after planning, and the graph with the buckets."""
    with fake_world(3), pytest.MonkeyPatch.context() as patched:
        if gloo:  # which takes scratch memory
            patched.setattr("zpasses.compat.is_gloo", lambda group, device=None: True)
        gm = rewritten(joint(params, 0, 3), *lower(form))
        options = Bucket(mode=mode, memory_budget=budget, plan_for_overlap=plan_for_overlap)
        items = [*movable_gathers(gm.graph), *movable_reductions(gm.graph)]
        _, curve = options.plan(gm.graph, items)
        unbucketed = rewritten(gm, *([Overlap()] if plan_for_overlap else []))
        before = counts(gm)
        options(gm.graph)
        if plan_for_overlap:
            Overlap()(gm.graph)
        # The planned peak bounds the peak of the rewritten graph. The limit follows from the peak
        # without buckets.
        # `simulate_overlap` counts an all-reduce, which is in place, twice: those of 0-dimensional
        # parameters, and with form=all_reduce the last one. A budget of up to 100 % doubles that.
        slack = 0
        if plan_for_overlap:
            slack = sum(32 for param in params if not param.shape)
            if form == "all_reduce":
                slack += max((16 * math.prod(param.shape) for param in params), default=0)
        assert peak_of(gm) <= curve.limit_bytes + slack
        most = MemoryCurve(unbucketed.graph, parse_budget(budget, "here")).limit_bytes
        assert curve.limit_bytes <= most + slack
        return curve, before, counts(gm)


def peak_of(gm):
    return MemoryCurve(gm.graph).base.peak_bytes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_a_smaller_budget_makes_fewer_buckets(mode, form):
    params = [Param((8, 16))] * 6
    (_, before, none), (_, _, some), (_, _, many) = (
        planned(params, budget, mode, form) for budget in ("0%", "5%", "1GiB")
    )
    assert before == (6, 6)
    assert many == (1, 1)
    assert sum(many) <= sum(some) <= sum(none) <= sum(before)
    assert sum(many) < sum(none)


def test_budget_depends_on_whether_overlap_follows():
    params = [Param((8, 16))] * 6
    (_, _, bare), (_, _, plan_for_overlap) = (
        planned(params, "5%", "coalesced", "reduce_scatter", each) for each in (False, True)
    )
    assert bare != plan_for_overlap


@few_examples
@given(
    param_lists(max_size=6),
    st.integers(0, 100),
    st.sampled_from(MODES),
    st.sampled_from(FORMS),
    st.booleans(),
    st.booleans(),
)
def test_the_modelled_peak_stays_within_the_budget(
    params, percent, mode, form, plan_for_overlap, gloo
):
    curve, _, _ = planned(params, f"{percent}%", mode, form, plan_for_overlap, gloo)
    assert max(curve.live_bytes) <= curve.limit_bytes


def test_ranks_that_pad_cast_or_hold_nothing_make_the_same_plan():
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float64}
    params = [Param((rows, 8), **dtypes) for rows in (7, 5, 2, 6)]
    plans = []
    for rank in range(3):
        with fake_world(3, rank):
            gm = joint(params, rank, 3)
            lowered = [rewritten(gm, *lower(form)) for form in FORMS]
            options = [
                Bucket(mode=mode, memory_budget=f"{percent}%", plan_for_overlap=overlap)
                for mode in MODES
                for percent in (0, 6, 20, 45)
                for overlap in (False, True)
            ]
            plans.append(
                [plan_of(rewritten(each, option)) for each in lowered for option in options]
            )
    assert plans[0] == plans[1] == plans[2]
    assert len({tuple(plan) for plan in plans[0]}) > 6  # budgets matter


def plan_of(gm):
    return [(each.op, each.shapes, each.dtypes) for _, each in collectives(gm.graph)]


# --- options --------------------------------------------------------------------------------------
def merged_by_auto(params, target, form="reduce_scatter", world_size=8):
    with fake_world(world_size), use_target(target):
        gm = rewritten(joint(params, 0, world_size), *lower(form), Bucket(memory_budget=ROOMY))
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
    params = [Param((512, 512))] * 6
    everything = [["coalesced", list(range(6))], ["coalesced", list(range(6, 12))]]
    within = bucketed(*params, memory_budget="0%")
    monkeypatch.setattr(
        "zpasses.ranks.agree.exchange",
        lambda group, question, mine, *_, **__: [mine[0], everything],
    )
    bucketed(*params, memory_budget=ROOMY)
    assert "the plan raises the peak" not in caplog.text
    bucketed(*[Param((8, 16))] * 6, memory_budget="0%")
    assert "the plan raises the peak" not in caplog.text  # a few KiB are not worth a warning
    above = bucketed(*params, memory_budget="0%")
    assert "the plan raises the peak" in caplog.text
    unbucketed = bucketed(*params, cap_mb=0)
    with fake_world(3):
        assert max(MemoryCurve(above.graph).live_bytes) > MemoryCurve(unbucketed.graph).limit_bytes
    assert counts(above) == (1, 1) != counts(within)
