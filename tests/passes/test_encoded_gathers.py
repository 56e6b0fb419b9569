"""`gather-params{encode=...}`: what is encoded, and that lowered graphs equal the dialect."""

import dataclasses
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
from zpasses.errors import PassError
from zpasses.graph.encoding import DECODE, ENCODE
from zpasses.graph.queries import calls, collectives, nbytes, value_of
from zpasses.graph.tags import tagged
from zpasses.passes import GatherParams
from zpasses.pipeline.runner import run_passes
from zpasses.testing import (
    assert_equal_bits,
    capture_graphs,
    fake_world,
    listing,
    random_inputs,
)
from zpasses.testing.drawing import WORLD_SIZES
from zpasses.testing.strategies import joint_recipes

BF16 = torch.bfloat16
FORMATS = ("int8", "fp8", "mxfp8")
ALL = {"exact_below_kib": 0.0}
SDMA = "sdma{gathers=all}"
TAILS = [
    "schedule{plan=single,mode=coalesced,memory_budget=1GiB}",
    "schedule{plan=single,mode=flat,memory_budget=1GiB}",
    f"schedule{{plan=one-ahead,cap_mb=0}},{SDMA}",
]


def gathered_bytes(gm):
    """Bytes that one rank sends into gathers."""
    return sum(each.nbytes for _, each in collectives(gm.graph) if "all_gather" in each.op)


def lowered(*params, world_size=2, rank=0, **options):
    with fake_world(world_size, rank):
        return rewritten(joint(params, rank, world_size), GatherParams(**options))


def test_unshard_becomes_encode_gather_and_decode():
    each = Param((7, 20), param_dtype=BF16, frozen=True)
    *_, after = before_and_after(3, [each], GatherParams(encode="int8", block=32, **ALL))[1]
    expect_listing(
        listing(after),
        """\
primals_1: f32[1, 20]                                                              # shard: p0
primals_2: bf16[7, 20]
tangents_1: bf16[7, 20]
encode_default = zpasses.encode(primals_1, 60, 1, 'int8/32')                       # u8[80]; gather_input: p0
all_gather_into_tensor_default = all_gather_into_tensor(encode_default, 3, '0')    # u8[240]; gather: p0
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)                  # u8[240]; gathered: p0
decode_default = zpasses.decode(wait_tensor_default, [7, 20], 3, bf16, 'int8/32')  # bf16[7, 20]; full: p0; recomputed
mul = mul(decode_default, primals_2)                                               # bf16[7, 20]
mul_1 = mul(tangents_1, decode_default)                                            # bf16[7, 20]
return [mul, None, mul_1]
""",  # noqa: E501
    )
    roles = ("gather_input", "gather", "gathered", "full")
    tags = [tag for _, tag in tagged(after.graph, *roles)]
    assert [tag.role for tag in tags] == list(roles)
    assert {tag.origin for tag in tags} == {"gather-params"}
    assert [tag.encoding for tag in tags] == ["", "int8/32", "", ""]


# --- what is encoded ------------------------------------------------------------------------------
def test_each_option_changes_the_graph():
    params = (Param((512, 64)), Param((64, 64)))
    seen = {listing(lowered(*params))}
    for options in (
        *({"encode": name} for name in FORMATS),
        {"encode": "int8", "block": 64},
        {"encode": "int8", "exact_below_kib": 64.0},
    ):
        seen.add(listing(lowered(*params, **options)))
    assert len(seen) == 6


def encoded(*params, **options):
    gm = lowered(*params, **{"encode": "int8", **ALL, **options})
    return [tag.params[0] for _, tag in tagged(gm.graph, "gather") if tag.encoding]


def test_scalars_vectors_and_small_parameters_stay_exact():
    params = (Param(()), Param((4096,)), Param((64, 64)), Param((63, 64)), Param((64, 65)))
    assert encoded(*params) == ["p2", "p3", "p4"]
    assert encoded(*params, exact_below_kib=16.0) == ["p2", "p4"]
    assert encoded(Param((0, 8)), Param((8, 0)), Param((1, 2))) == []


def test_integers_doubles_and_what_would_not_shrink_stay_exact():
    dtypes = (torch.float64, torch.float8_e4m3fn, torch.float16)
    params = [Param((64, 64), dtype=dtype, frozen=True) for dtype in dtypes]
    assert encoded(*params[:1], params[2]) == ["p1"]
    assert encoded(Param((64, 64), param_dtype=BF16), block=1) == []  # five bytes per value
    assert encoded(Param((64, 64)), block=1) == []


def test_one_rank_gathers_nothing():
    gm = lowered(Param((64, 64)), world_size=1, encode="int8", **ALL)
    assert listing(gm) == listing(lowered(Param((64, 64)), world_size=1))


def test_reads_in_two_dtypes_share_their_codes():
    """Both encode the shard, so equal codes are rounded to either dtype."""
    both = [Param((128, 64), frozen=True), Param((128, 64), frozen=True, param_dtype=BF16)]
    gm = lowered(*both, encode="int8")
    records = [value_of(node) for node in calls(gm.graph, ENCODE)]
    assert {(each.shape, each.dtype) for each in records} == {((4096 + 128,), torch.uint8)}
    assert [value_of(node).dtype for node in calls(gm.graph, DECODE)] == [torch.float32, BF16]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("dtype", "most"), [(BF16, 0.53)])
def test_bytes_on_the_wire(name, dtype, most):
    """Codes, scales and padding of the matrices of a block, against exact values."""
    shapes = [(768, 256), (256, 256), (1024, 256), (256, 1024), (1000, 96)]
    params = [Param(shape, param_dtype=dtype, frozen=True) for shape in shapes]
    exact = gathered_bytes(lowered(*params, world_size=8))
    assert gathered_bytes(lowered(*params, world_size=8, encode=name)) <= most * exact


# --- the same bits --------------------------------------------------------------------------------
ODD = [
    Param((7, 20), param_dtype=BF16, reads=2),
    Param((7, 20), frozen=True),
    Param((2, 40)),  # no rows on the last of three ranks
    Param((6, 5, 4), reads=2),
    Param((9,)),
    Param(()),
    Param((0, 30)),
]


@pytest.mark.parametrize(
    ("name", "world_size"), some_quick(itertools.product(FORMATS, WORLD_SIZES), [("mxfp8", 3)])
)
def test_bits_of_odd_parameters_on_all_ranks(name, world_size):
    encode = f"gather-params{{encode={name},block=32,exact_below_kib=0}}"
    texts = [f"{encode},reduce-grads,{tail}" for tail in TAILS]
    before, *after = declared_and_encoded(world_size, ODD, texts, interleaved=True)
    assert any(calls(gm.graph, DECODE) for gm in before + after[-1]) == (world_size > 1)
    for graphs in after:
        assert_equal_bits(before, graphs, random_inputs(before))


@few_examples
@given(
    joint_recipes(world_sizes=[2, 3]),
    st.sampled_from(FORMATS),
    st.sampled_from([1, 3, 32]),
)
def test_bits_of_drawn_graphs(recipe, name, block):
    wide = [dataclasses.replace(each, shape=(*each.shape, 9)) for each in recipe.params]
    recipe = dataclasses.replace(recipe, params=tuple(wide))
    passes = Pipeline((GatherParams(name, block, 0.0), *Pipeline.parse("reduce-grads")))
    before, after = recipe.run_pipeline(passes)
    assert_equal_bits(before, after, random_inputs(before))


def test_the_codes_stay_in_memory_and_not_the_full_parameters():
    """Where a parameter stays until backward, in stage 2 or kept in stage 3, its codes do."""
    x = (torch.ones(4, 64),)
    for tail in ("reshard-after-forward,schedule", "cache-params,schedule"):
        text = f"gather-params{{encode=int8,exact_below_kib=0}},reduce-grads,{tail}"
        linear = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))
        step = capture_graphs(linear, x, world_size=2, pipeline=text)
        given = step.after.backward.graph.find_nodes(op="placeholder")
        kept = [node for node in given if value_of(node).dtype == torch.uint8]
        assert kept, tail
        assert all(nbytes(value_of(node)) == 64 * 96 + 2 * 96 for node in kept)
        assert not any(value_of(node).shape in ((64, 96), (96, 64)) for node in given)


def test_simulation_checks_the_lowering_against_the_dialect():
    params = [Param((6, 40))]
    passes = GatherParams("int8", **ALL)

    @dataclasses.dataclass(frozen=True)
    class Wrong(GatherParams):
        """Decodes as another format."""

        def rewrite(self, graph):
            changes = super().rewrite(graph)
            for node in calls(graph, DECODE):
                node.args = (*node.args[:-1], "fp8/128")
            return changes

    with fake_world(2):
        run_passes(joint(params).graph, [passes], verify="simulate")
        with pytest.raises(PassError, match=r"output 0.*elements differ"):
            run_passes(joint(params).graph, [Wrong("int8", **ALL)], verify="simulate")


def test_other_encodings_are_other_collectives():
    """Of equal bytes, and never in one launch: ranks that disagree are told so."""
    graphs = [lowered(Param((64, 64)), encode=name) for name in ("int8", "fp8")]
    seen = [next(each for _, each in collectives(gm.graph)) for gm in graphs]
    assert seen[0].shapes == seen[1].shapes
    assert (seen[0].encoding, seen[1].encoding) == ("int8/128", "fp8/128")
