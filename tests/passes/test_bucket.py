import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.foreign import already_sharded, simple_fsdp
from tests.graphs import Param, expect_listing, few_examples, for_each_world_size, joint, rewritten
from zpasses import OptionError, Pipeline
from zpasses.cost.memory.collective_moves import MemoryCurve, movable_gathers, movable_reductions
from zpasses.cost.time.target import TARGETS, Target, use_target
from zpasses.graph.queries import collectives
from zpasses.graph.tags import tagged
from zpasses.option_values import parse_budget
from zpasses.passes import CacheParams, GatherParams, ReduceGrads
from zpasses.passes.bucket import Bucket
from zpasses.passes.overlap import Overlap
from zpasses.runtime.forward_variants import gather_ids, param_slots
from zpasses.testing import (
    assert_deterministic,
    assert_equal_bits,
    assert_step_equals_reference,
    capture_graphs,
    fake_world,
    listing,
    random_inputs,
    trace_joint,
)
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
    with fake_world(world_size, rank):
        return rewritten(
            joint(params, rank, world_size),
            *lower(form),
            *passes,
            Bucket(**{"memory_budget": ROOMY, **options}),
        )


def equal_after_bucketing(world_size, params, variants):
    """Returns the first rank's graph without and with buckets, once per (form, options). All
    versions equal the dialect on all ranks.
    """
    dialect, plain, merged = [], {}, {}
    for rank in range(world_size):
        with fake_world(world_size, rank):
            dialect.append(joint(params, rank, world_size))
            for key, (form, options) in enumerate(variants):
                lowered = rewritten(dialect[-1], *lower(form))
                plain.setdefault(key, lowered)
                merged.setdefault(key, []).append(
                    rewritten(lowered, Bucket(**{"memory_budget": ROOMY, **options}))
                )
    inputs = random_inputs(dialect)
    for graphs in merged.values():
        assert_equal_bits(dialect, graphs, inputs)
    return [(plain[key], merged[key][0]) for key in plain]


def short(gm, start=""):
    """Returns a listing with short names and without columns, from the node `start` on."""
    text = (
        re.sub(r" +#", "  #", listing(gm))
        .replace("_default", "")
        .replace("_into_tensor", "")
        .replace("scatter_tensor", "scatter")
    )
    return text[text.index(start) :]


# --- rewritten graphs ---------------------------------------------------------------------------
def test_graph_before_the_pass():
    with fake_world(2):
        gm = rewritten(joint([Param((4, 2)), Param((6, 2))], 0, 2), *lower())
    expect_listing(
        short(gm),
        """\
primals_1: f32[2, 2]  # shard: p0
primals_2: f32[4, 2]
primals_3: f32[3, 2]  # shard: p1
primals_4: f32[6, 2]
tangents_1: f32[4, 2]
tangents_2: f32[6, 2]
all_gather = all_gather(primals_1, 2, '0')  # f32[4, 2]; gather: p0
wait_tensor = wait_tensor(all_gather)  # f32[4, 2]; full: p0
mul = mul(wait_tensor, primals_2)  # f32[4, 2]
all_gather_1 = all_gather(primals_3, 2, '0')  # f32[6, 2]; gather: p1
wait_tensor_1 = wait_tensor(all_gather_1)  # f32[6, 2]; full: p1
mul_1 = mul(wait_tensor_1, primals_4)  # f32[6, 2]
mul_2 = mul(tangents_2, primals_4)  # f32[6, 2]
reduce_scatter = reduce_scatter(mul_2, 'avg', 2, '0')  # f32[3, 2]; reduce: p1
wait_tensor_2 = wait_tensor(reduce_scatter)  # f32[3, 2]; shard_grad: p1
mul_3 = mul(tangents_1, primals_2)  # f32[4, 2]
reduce_scatter_1 = reduce_scatter(mul_3, 'avg', 2, '0')  # f32[2, 2]; reduce: p0
wait_tensor_3 = wait_tensor(reduce_scatter_1)  # f32[2, 2]; shard_grad: p0
return [mul, mul_1, wait_tensor_3, None, wait_tensor_2, None]
""",
    )


def test_coalesced_collectives_over_several_tensors(listing_snapshot):
    listing_snapshot(short(bucketed(Param((4, 2)), Param((6, 2)), world_size=2, mode="coalesced")))


def test_flat_collectives_over_one_tensor(listing_snapshot):
    listing_snapshot(short(bucketed(Param((4, 2)), Param((6, 2)), world_size=2, mode="flat")))


def test_coalesced_all_reduces_are_cut_after_the_last_wait():
    gm = bucketed(Param((7, 2)), Param((3,)), rank=1, form="all_reduce", mode="coalesced")
    expect_listing(
        short(gm, "mul_2 = "),
        """\
mul_2 = mul(tangents_2, primals_4)  # f32[3]
mul_3 = mul(tangents_1, primals_2)  # f32[7, 2]
all_reduce_coalesced = all_reduce_coalesced([mul_2, mul_3], 'avg', '0')  # (f32[3], f32[7, 2]); reduce: p1, p0 in bucket 1
getitem_2 = getitem(all_reduce_coalesced, 0)  # f32[3]; reduced: p1 in bucket 1
getitem_3 = getitem(all_reduce_coalesced, 1)  # f32[7, 2]; reduced: p0 in bucket 1
wait_tensor_2 = wait_tensor(getitem_2)  # f32[3]; reduced: p1 in bucket 1
wait_tensor_3 = wait_tensor(getitem_3)  # f32[7, 2]; reduced: p0 in bucket 1
slice_copy_tensor = slice_copy(wait_tensor_2, 0, 1, 2)  # f32[1]; shard_grad: p1
slice_copy_tensor_1 = slice_copy(wait_tensor_3, 0, 3, 6)  # f32[3, 2]; shard_grad: p0
return [mul, mul_1, slice_copy_tensor_1, None, slice_copy_tensor, None]
""",  # noqa: E501
    )


def test_flat_all_reduce_concatenates_gradients_of_equal_row_shape():
    gm = bucketed(Param((7, 2)), Param((4, 2)), rank=1, form="all_reduce", mode="flat")
    expect_listing(
        short(gm, "mul_2 = "),
        """\
mul_2 = mul(tangents_2, primals_4)  # f32[4, 2]
mul_3 = mul(tangents_1, primals_2)  # f32[7, 2]
cat_1 = cat([mul_2, mul_3])  # f32[11, 2]; reduce_input: p1, p0 in bucket 1
all_reduce_2 = all_reduce(cat_1, 'avg', '0')  # f32[11, 2]; reduce: p1, p0 in bucket 1
wait_tensor_5 = wait_tensor(all_reduce_2)  # f32[11, 2]; reduced: p1, p0 in bucket 1
slice_tensor_4 = slice(wait_tensor_5, 0, 0, 4)  # f32[4, 2]; reduced: p1 in bucket 1
slice_tensor_5 = slice(wait_tensor_5, 0, 4, 11)  # f32[7, 2]; reduced: p0 in bucket 1
slice_copy_tensor = slice_copy(slice_tensor_4, 0, 2, 4)  # f32[2, 2]; shard_grad: p1
slice_copy_tensor_1 = slice_copy(slice_tensor_5, 0, 3, 6)  # f32[3, 2]; shard_grad: p0
return [mul, mul_1, slice_copy_tensor_1, None, slice_copy_tensor, None]
""",
    )


def test_flat_all_reduce_packs_gradients_that_do_not_stack():
    gm = bucketed(Param((7,)), Param((3,)), rank=1, form="all_reduce", mode="flat")
    expect_listing(
        short(gm, "mul_2 = "),
        """\
mul_2 = mul(tangents_2, primals_4)  # f32[3]
mul_3 = mul(tangents_1, primals_2)  # f32[7]
reshape_2 = reshape(mul_2, [-1])  # f32[3]; reduce_input: p1 in bucket 1
reshape_3 = reshape(mul_3, [-1])  # f32[7]; reduce_input: p0 in bucket 1
cat_1 = cat([reshape_2, reshape_3])  # f32[10]; reduce_input: p1, p0 in bucket 1
all_reduce_2 = all_reduce(cat_1, 'avg', '0')  # f32[10]; reduce: p1, p0 in bucket 1
wait_tensor_5 = wait_tensor(all_reduce_2)  # f32[10]; reduced: p1, p0 in bucket 1
slice_tensor_3 = slice(wait_tensor_5, 0, 0, 3)  # f32[3]
view_3 = view(slice_tensor_3, [3])  # f32[3]; reduced: p1 in bucket 1
slice_tensor_4 = slice(wait_tensor_5, 0, 3, 10)  # f32[7]
view_4 = view(slice_tensor_4, [7])  # f32[7]; reduced: p0 in bucket 1
slice_copy_tensor = slice_copy(view_3, 0, 1, 2)  # f32[1]; shard_grad: p1
slice_copy_tensor_1 = slice_copy(view_4, 0, 3, 6)  # f32[3]; shard_grad: p0
return [mul, mul_1, slice_copy_tensor_1, None, slice_copy_tensor, None]
""",
    )


def test_gradients_of_another_row_shape_have_another_flat_all_reduce():
    params = [Param((4, 2)), Param((6, 2)), Param((4, 3)), Param((6, 3))]
    assert counts(bucketed(*params, form="all_reduce", mode="flat")) == (1, 2)
    assert counts(bucketed(*params, form="reduce_scatter", mode="flat")) == (1, 1)


def test_members_carry_the_number_of_their_bucket():
    gm = bucketed(Param((4, 2)), Param((6, 2)), mode="coalesced")
    found = {
        (tag.role, tag.bucket, tag.params)
        for _, tag in tagged(gm.graph, "gather", "reduce")
        if len(tag.params) == 2
    }
    assert found == {("gather", 0, ("p0", "p1")), ("reduce", 1, ("p1", "p0"))}


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
ODD = [
    Param((4, 3)),
    Param((7, 3), param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    Param((7, 3), param_dtype=torch.bfloat16),
    Param((5,), reduce_dtype=torch.float64),
    Param(()),
    Param(()),
    Param((0, 3)),
    Param((3, 0)),
    Param((5, 3), frozen=True),
    Param((2, 3)),  # an empty shard on the last of three ranks and more
    Param((6, 2, 2), reads=2),
    Param((6, 3)),
]


EVERY = [(form, {"mode": mode}) for form in FORMS for mode in MODES]


@for_each_world_size
def test_buckets_compute_the_same_bits_on_all_ranks(world_size):
    for plain, merged in equal_after_bucketing(world_size, ODD, EVERY):
        assert counts(merged)[1] < counts(plain)[1] or world_size == 1
        assert counts(merged)[0] < counts(plain)[0] or world_size == 1


@pytest.mark.parametrize("mode", MODES)
def test_groups_have_buckets_of_their_own(mode):
    before, after = [], []
    for rank in range(2):
        with fake_world(2, rank):
            other = torch.distributed.new_group([0, 1]).group_name
            params = [
                Param((4, 2)),
                Param((6, 2), group=other),
                Param((3, 2)),
                Param((2, 2), group=other),
            ]
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


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
        self.body = torch.nn.Linear(4, 4)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)).relu())


@pytest.mark.parametrize("mode", MODES)
def test_steps_of_a_model_with_tied_weights_equal_the_dialect(mode):
    pipeline = f"merge-reads,gather-params,reduce-grads{{form=all_reduce}},reshard-after-forward,bucket{{mode={mode},memory_budget=1GiB}}"  # noqa: E501
    tokens = torch.zeros(2, 3, dtype=torch.long)
    captures = [
        capture_graphs(Tied(), (tokens,), world_size=3, rank=rank, pipeline=pipeline)
        for rank in range(3)
    ]
    records = [record for record in captures[0].records if record.name == "bucket"]
    assert sum(record.changes for record in records) >= 3
    assert_step_equals_reference(captures)


@few_examples
@given(param_lists(max_size=4), st.sampled_from([2, 3]), st.sampled_from([0.0001, 0.0003, 1]))
def test_random_graphs_stay_equal_and_buckets_within_their_cap(params, world_size, mb):
    for _, merged in equal_after_bucketing(
        world_size, params, [(form, {**options, "cap_mb": mb}) for form, options in EVERY]
    ):
        for _, each in collectives(merged.graph):
            if len(each.shapes) > 1:
                assert each.nbytes * (world_size if "gather" in each.op else 1) <= mb * MIB


# --- unchanged graphs ---------------------------------------------------------------------------
def test_cap_of_zero_disables_buckets():
    with fake_world(3):
        gm = rewritten(joint(ODD, 0, 3), *lower())
        before = listing(gm)
        assert Bucket(cap_mb=0, memory_budget=ROOMY).rewrite(gm.graph) == 0
    assert listing(gm) == before


def test_cap_bounds_the_full_tensors_of_a_bucket():
    params = [Param((8, 16))] * 6  # 512 bytes each
    for mode in MODES:
        assert counts(bucketed(*params, world_size=2, mode=mode, cap_mb=1023 / MIB)) == (6, 6)
        assert counts(bucketed(*params, world_size=2, mode=mode, cap_mb=1024 / MIB)) == (3, 3)
        assert counts(bucketed(*params, world_size=2, mode=mode, cap_mb=2048 / MIB)) == (2, 2)


def test_gather_of_a_computed_value_and_gradient_that_is_read_are_not_bucketed():
    with fake_world(2):
        gm = rewritten(joint([Param((4, 2), reads=2), Param((6, 2))], 0, 2), *lower())
        # The two gradients of one parameter are added after their reductions, so the reductions
        # stay.
        saved = Bucket(memory_budget=ROOMY).rewrite(gm.graph)
    assert saved == 2  # of three gathers
    assert counts(gm) == (1, 3)


def test_dialect_and_graphs_without_parameters_are_unchanged():
    with fake_world(2):
        dialect = joint([Param((4, 2)), Param((6, 2))], 0, 2)
        plain = trace_joint(lambda x: (x * 2).relu(), [torch.ones(3, requires_grad=True)])
        for gm in (dialect, plain):
            before = listing(gm)
            assert Bucket(memory_budget=ROOMY).rewrite(gm.graph) == 0
            assert listing(gm) == before


@pytest.mark.parametrize("mode", MODES)
def test_gathers_of_other_libraries_are_merged(mode):
    captures = []
    for rank in range(2):
        with fake_world(2, rank) as mesh:
            pipeline = Pipeline((Bucket(mode=mode, memory_budget=ROOMY),))
            captures.append(
                capture_graphs(
                    simple_fsdp(mesh), (torch.ones(2, 6),), shard=already_sharded, pipeline=pipeline
                )
            )
    assert counts(captures[0].before.forward) == (2, 0)
    assert counts(captures[0].after.forward) == (1, 0)
    assert_step_equals_reference(captures)


def test_order_of_buckets_does_not_depend_on_addresses():
    with fake_world(3, 1):
        gm = rewritten(joint(ODD, 1, 3), *lower())
        for mode in MODES:
            assert_deterministic(Bucket(mode=mode, memory_budget=ROOMY), gm)


def test_cached_parameters_of_a_bucket_are_gathered_together_or_not_at_all():
    for mode in MODES:
        gm = bucketed(
            Param((4, 2)),
            Param((6, 2)),
            Param((3, 2), param_dtype=torch.bfloat16),
            passes=(CacheParams(),),
            mode=mode,
        )
        together = dict(
            zip((slot.param for slot in param_slots(gm.graph)), gather_ids(gm.graph), strict=True)
        )
        assert together["p0"] == together["p1"] != together["p2"]


# --- memory ---------------------------------------------------------------------------------------
def planned(params, budget, mode, form, plan_for_overlap=False, gloo=False):
    """Returns the memory curve after planning, and the graph with the buckets."""
    with fake_world(3), pytest.MonkeyPatch.context() as patched:
        if gloo:  # which takes scratch memory
            patched.setattr("zpasses.compat.is_gloo", lambda group, device=None: True)
        gm = rewritten(joint(params, 0, 3), *lower(form))
        options = Bucket(mode=mode, memory_budget=budget, plan_for_overlap=plan_for_overlap)
        _, curve = options.plan(
            gm.graph, [*movable_gathers(gm.graph), *movable_reductions(gm.graph)]
        )
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
        assert (
            curve.limit_bytes
            <= MemoryCurve(unbucketed.graph, parse_budget(budget, "here")).limit_bytes + slack
        )
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


@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow(quick="cast")),
        pytest.param({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float64}, id="cast"),
    ],
)
def test_ranks_that_pad_cast_or_hold_nothing_make_the_same_plan(dtypes):
    params = [Param((rows, 8), **dtypes) for rows in (7, 5, 2, 6)]
    plans = []
    for rank in range(3):
        with fake_world(3, rank):
            gm = joint(params, rank, 3)
            lowered = [rewritten(gm, *lower(form)) for form in FORMS]
            budgets = [f"{percent}%" for percent in (0, 6, 12, 20, 30, 45)]
            options = [
                Bucket(mode=mode, memory_budget=budget, plan_for_overlap=plan_for_overlap)
                for mode in MODES
                for budget in budgets
                for plan_for_overlap in (False, True)
            ]
            plans.append(
                [plan_of(rewritten(each, option)) for each in lowered for option in options]
            )
    assert plans[0] == plans[1] == plans[2]
    assert len({tuple(plan) for plan in plans[0]}) > 6  # budgets matter


def plan_of(gm):
    return [(each.op, each.shapes, each.dtypes) for _, each in collectives(gm.graph)]


# --- options --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "bucket{cap_mb=-1}",
            r"pass 'bucket', option 'cap_mb': got -1.0; expected MiB >= 0 \(0: no buckets\)",
        ),
        ("bucket{cap_mb=big}", r"option 'cap_mb': got 'big' \(str\); expected float"),
        ("bucket{mode=flatt}", r"option 'mode': got 'flatt' .*'auto' or 'coalesced' or 'flat'"),
        (
            "bucket{memory_budget=lots}",
            r"pass 'bucket', option 'memory_budget': got 'lots'; expected how far the peak may "
            r"rise",
        ),
        ("bucket{budget=5%}", r"pass 'bucket' has no option 'budget'"),
    ],
)
def test_wrong_options_say_what_is_expected(text, message):
    with pytest.raises(OptionError, match=message):
        Pipeline.parse(text)


def merged_by_auto(params, target, form="reduce_scatter", world_size=8):
    with fake_world(world_size), use_target(target):
        gm = rewritten(joint(params, 0, world_size), *lower(form), Bucket(memory_budget=ROOMY))
    return [(each.op, len(each.shapes)) for _, each in collectives(gm.graph)]


@pytest.mark.parametrize("target", ["h100", "mi300x"])
def test_auto_coalesces_where_a_launch_of_several_tensors_copies_nothing(target):
    assert merged_by_auto([Param((16, 4)), Param((24, 4))], TARGETS[target]) == [
        ("all_gather_into_tensor_coalesced", 2),
        ("reduce_scatter_tensor_coalesced", 2),
    ]


def test_auto_weighs_launches_against_copies_on_gloo(monkeypatch):
    monkeypatch.setattr("zpasses.compat.is_gloo", lambda group, device=None: True)
    params = [Param((64, 64)), Param((32, 64))]
    slow_launch = Target.parse("cpu,launch_us=1000000")
    slow_memory = Target.parse(
        "cpu,launch_us=0.001,hop_us=0.001,network_hop_us=0.001,memory_gb_s=0.001"
    )
    # gloo copies what it gathers in any case, so gathers always share a launch
    assert merged_by_auto(params, slow_memory, "all_reduce")[1:] == [
        ("all_reduce", 1),
        ("all_reduce", 1),
    ]
    assert merged_by_auto(params, slow_launch, "all_reduce") in (
        [("all_gather_into_tensor_coalesced", 2), ("all_reduce", 1)],
        [("all_gather_into_tensor_coalesced", 2), ("all_reduce_coalesced", 2)],
    )


def test_shared_plan_that_exceeds_the_budget_is_warned_about(monkeypatch, caplog):
    params = [Param((512, 512))] * 6
    everything = [["coalesced", list(range(6))], ["coalesced", list(range(6, 12))]]
    within = bucketed(*params, memory_budget="0%")
    monkeypatch.setattr(
        "zpasses.ranks.agree.exchange",
        lambda group, question, mine, *_, **__: [[mine[0], everything]] * 2,
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
