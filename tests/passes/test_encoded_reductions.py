"""`reduce-grads{encode=...}`: what is encoded, and that lowered graphs equal the dialect."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.cases import some_quick
from tests.graphs import (
    Param,
    before_and_after,
    declared_and_encoded,
    expect_listing,
    few_examples,
    joint,
    rewritten,
)
from zpasses import Pipeline
from zpasses.cost.time.target import Target, use_target
from zpasses.graph.dialect import REDUCE_GRAD, UNSHARD
from zpasses.graph.encoding import DECODE_MEAN
from zpasses.graph.queries import calls, collectives, named_arguments
from zpasses.graph.tags import tagged
from zpasses.passes import ReduceGrads
from zpasses.passes.writers import encode_options
from zpasses.pipeline.runner import run_passes
from zpasses.testing import (
    assert_equal_bits,
    assert_step_equals_reference,
    capture_ranks,
    fake_world,
    listing,
    random_inputs,
)
from zpasses.testing.drawing import WORLD_SIZES
from zpasses.testing.strategies import joint_recipes

BF16, F32 = torch.bfloat16, torch.float32
ALL = {"exact_below_kib": 0.0}
TAILS = [
    "schedule{plan=single,mode=coalesced,memory_budget=1GiB}",
    "schedule{plan=single,mode=flat,memory_budget=1GiB}",
    "schedule{plan=one-ahead,cap_mb=0}",
]


def lowered(*params, world_size=2, rank=0, **options):
    with fake_world(world_size, rank):
        return rewritten(joint(params, rank, world_size), ReduceGrads(**options))


def reduced_bytes(gm):
    """Bytes that one rank sends into reductions, of which a part stays on the rank."""
    return sum(
        each.nbytes
        for _, each in collectives(gm.graph)
        if each.op not in ("unshard", "reduce_grad")
    )


def test_reduce_grad_becomes_encode_exchange_and_decode():
    each = Param((7, 20), param_dtype=BF16)
    *_, after = before_and_after(3, [each], ReduceGrads(encode="int8", block=32, **ALL))[1]
    expect_listing(
        listing(after),
        """\
primals_1: f32[1, 20]                                                                           # shard: p0
primals_2: bf16[7, 20]
tangents_1: bf16[7, 20]
unshard = zpasses.unshard(primals_1, 7, bf16, None, '0')                                        # bf16[7, 20]; gather: p0
mul = mul(unshard, primals_2)                                                                   # bf16[7, 20]
mul_1 = mul(tangents_1, primals_2)                                                              # bf16[7, 20]
encode_default = zpasses.encode(mul_1, 60, 3, 'int8/32')                                        # u8[240]; reduce_input: p0
all_to_all_single_default = all_to_all_single(encode_default, [80, 80, 80], [80, 80, 80], '0')  # u8[240]; reduce: p0
wait_tensor_default = wait_tensor(all_to_all_single_default)                                    # u8[240]; reduced: p0
decode_mean_default = zpasses.decode_mean(wait_tensor_default, [1, 20], 60, 3, f32, 'int8/32')  # f32[1, 20]; shard_grad: p0
return [mul, decode_mean_default, None]
""",  # noqa: E501
    )
    tags = [
        tag for _, tag in tagged(after.graph, "reduce_input", "reduce", "reduced", "shard_grad")
    ]
    assert [tag.encoding for tag in tags] == ["", "int8/32", "", ""]
    assert {tag.origin for tag in tags} == {"reduce-grads"}


def test_each_option_changes_the_graph():
    params = (Param((512, 64)), Param((64, 64)))
    options = (
        {},
        {"encode": "int8"},
        {"encode": "fp8"},
        {"encode": "int8", "block": 64},
        {"encode": "int8", "exact_below_kib": 64.0},
    )
    assert len({listing(lowered(*params, **each)) for each in options}) == len(options)


def encoded(*params, **options):
    gm = lowered(*params, **{"encode": "int8", **ALL, **options})
    return [tag.params[0] for _, tag in tagged(gm.graph, "reduce") if tag.encoding]


def test_scalars_vectors_small_and_double_gradients_stay_exact():
    params = (Param(()), Param((4096,)), Param((64, 64)), Param((63, 64)), Param((0, 9)))
    assert sorted(encoded(*params)) == ["p2", "p3"]
    assert encoded(*params, exact_below_kib=16.0) == ["p2"]
    gradients = (Param((64, 64), param_dtype=torch.float64), Param((64, 64), dtype=torch.float64))
    assert encoded(*gradients) == []
    assert listing(lowered(Param((64, 64)), world_size=1, encode="int8", **ALL)) == listing(
        lowered(Param((64, 64)), world_size=1)
    )


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize(("dtype", "most"), [(BF16, 0.53)])
def test_bytes_on_the_wire(name, dtype, most):
    shapes = [(768, 256), (256, 256), (1024, 256), (256, 1024), (1000, 96)]
    params = [Param(shape, param_dtype=dtype) for shape in shapes]
    exact = reduced_bytes(lowered(*params, world_size=8))
    assert reduced_bytes(lowered(*params, world_size=8, encode=name)) <= most * exact


# --- the same bits --------------------------------------------------------------------------------
ODD = [
    Param((7, 20), param_dtype=BF16),
    Param((7, 20), reduce_dtype=F32, reads=2),
    Param((2, 40)),  # no rows on the last of three ranks
    Param((6, 5, 4)),
    Param((9,)),
    Param(()),
    Param((0, 30)),
]


@pytest.mark.parametrize(
    ("name", "world_size"),
    some_quick(itertools.product(["int8", "fp8"], WORLD_SIZES), [("fp8", 3)]),
)
def test_bits_of_odd_gradients_on_all_ranks(name, world_size):
    encode = f"reduce-grads{{encode={name},block=32,exact_below_kib=0}}"
    texts = [f"gather-params,{encode},{tail}" for tail in TAILS]
    before, *after = declared_and_encoded(world_size, ODD, texts)
    assert any(calls(gm.graph, DECODE_MEAN) for gm in after[-1]) == (world_size > 1)
    for graphs in after:
        assert_equal_bits(before, graphs, random_inputs(before))


@few_examples
@given(
    joint_recipes(world_sizes=[2, 4], replicas=[1, 2]),
    st.sampled_from(["int8", "fp8"]),
    st.sampled_from([1, 3, 32]),
)
def test_bits_of_drawn_graphs(recipe, name, block):
    passes = Pipeline(
        (*Pipeline.parse("gather-params"), ReduceGrads(encode=name, block=block, **ALL))
    )
    before, after = recipe.run_pipeline(passes)
    assert_equal_bits(before, after, random_inputs(before), recipe.groups())


STEPS = [
    ("reshard-after-forward,schedule", BF16),
    ("reshard-after-forward,schedule", None),
    ("cache-params,schedule", BF16),
    ("cache-params,schedule", None),
]


@pytest.mark.parametrize(("tail", "dtype"), some_quick(STEPS, STEPS[:1]))
def test_a_step_equals_the_dialect(tail, dtype):
    text = (
        "gather-params{encode=int8,exact_below_kib=0},"
        f"reduce-grads{{encode=int8,exact_below_kib=0}},{tail},defer-reduction"
    )
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 50, bias=False))
    x = torch.ones(4, 40, dtype=dtype)
    ranks = capture_ranks(model, (x,), world_size=3, pipeline=text, shard={"param_dtype": dtype})
    read = calls(ranks[0].before.joint.graph, UNSHARD)[0]
    assert named_arguments(read, UNSHARD)["encoding"] == "int8/128"
    reductions = calls(ranks[0].before.joint.graph, REDUCE_GRAD)
    assert {len(node.args) for node in reductions} == {6, 7}
    assert_step_equals_reference(ranks)


def test_simulation_checks_the_lowering():
    with fake_world(3, 1):
        gm = joint([Param((7, 40)), Param((6, 40), param_dtype=BF16)])
        run_passes(gm.graph, [ReduceGrads(encode="fp8", **ALL)], verify="simulate")
        assert calls(gm.graph, DECODE_MEAN)


def test_records_of_one_launch_are_packed():
    text = f"gather-params,reduce-grads{{encode=int8,exact_below_kib=0}},{TAILS[0]}"
    with fake_world(2):
        gm = rewritten(joint([Param((64, 8)), Param((32, 8))]), *Pipeline.parse(text))
    sent = [(node, each) for node, each in collectives(gm.graph) if "all_to_all" in each.op]
    assert len(sent) == 1
    assert sent[0][1].encoding == "int8/128"


@pytest.mark.parametrize(
    ("target", "hops", "warns"),
    [
        ("h100", "one", True),
        ("h100", "auto", False),
        ("h100,ranks_per_node=64", "one", False),
    ],
)
def test_an_exchange_that_is_slower_than_exact_values_is_said(target, hops, warns, caplog):
    """Between nodes of several ranks, an exchange sends all of its bytes over the network."""
    encode_options.warn_once.cache_clear()
    with use_target(Target.parse(target)), caplog.at_level("INFO", logger="zpasses"):
        for _ in range(2):
            lowered(Param((4096, 2048)), world_size=64, encode="int8", hops=hops)
    told = [each for each in caplog.records if "64 ranks on 8 nodes are predicted" in each.message]
    assert [each.levelname for each in told] == ["INFO", "WARNING", "INFO"] * warns
