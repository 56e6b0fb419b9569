import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import config

from tests.graphs import (
    Param,
    assert_passes_preserve_results,
    before_and_after,
    expect_listing,
    few_examples,
    for_each_world_size,
    joint,
)
from zpasses import OptionError, Pipeline
from zpasses.graph.queries import collectives
from zpasses.graph.tags import tagged
from zpasses.passes import GatherParams, ReduceGrads
from zpasses.testing import assert_deterministic, fake_world, listing, trace_joint
from zpasses.testing.strategies import param_lists

FORMS = ("reduce_scatter", "all_reduce")


def lowered(world_size, rank, *params, form="reduce_scatter"):
    with fake_world(world_size, rank):
        gm = joint(params, rank, world_size)
        ReduceGrads(form)(gm.graph)
    return gm


def reductions(gm):
    return [each for _, each in collectives(gm.graph) if each.op != "unshard"]


def targets(gm):
    return [node.target._opname for node in gm.graph.nodes if node.op == "call_function"]


def test_reduce_grad_becomes_cast_padding_reduce_scatter_wait_and_slice():
    (*_, before), (*_, after) = before_and_after(
        3, [Param((7, 2), reduce_dtype=torch.float64)], ReduceGrads("reduce_scatter")
    )
    expect_listing(
        listing(before),
        """\
primals_1: f32[1, 2]                                           # shard: p0
primals_2: f32[7, 2]
tangents_1: f32[7, 2]
unshard = zpasses.unshard(primals_1, 7, None, f64, '0')        # f32[7, 2]; gather: p0
mul = mul(unshard, primals_2)                                  # f32[7, 2]
mul_1 = mul(tangents_1, primals_2)                             # f32[7, 2]
reduce_grad = zpasses.reduce_grad(mul_1, 7, 1, f32, f64, '0')  # f32[1, 2]; reduce: p0
return [mul, reduce_grad, None]
""",
    )
    expect_listing(
        listing(after),
        """\
primals_1: f32[1, 2]                                                                           # shard: p0
primals_2: f32[7, 2]
tangents_1: f32[7, 2]
unshard = zpasses.unshard(primals_1, 7, None, f64, '0')                                        # f32[7, 2]; gather: p0
mul = mul(unshard, primals_2)                                                                  # f32[7, 2]
mul_1 = mul(tangents_1, primals_2)                                                             # f32[7, 2]
_to_copy_default = _to_copy(mul_1, dtype=f64)                                                  # f64[7, 2]; reduce_input: p0
constant_pad_nd_default = constant_pad_nd(_to_copy_default, [0, 0, 0, 2], 0.0)                 # f64[9, 2]; reduce_input: p0
reduce_scatter_tensor_default = reduce_scatter_tensor(constant_pad_nd_default, 'avg', 3, '0')  # f64[3, 2]; reduce: p0
wait_tensor_default = wait_tensor(reduce_scatter_tensor_default)                               # f64[3, 2]; reduced: p0
slice_tensor = slice(wait_tensor_default, 0, 0, 1)                                             # f64[1, 2]
_to_copy_default_1 = _to_copy(slice_tensor, dtype=f32)                                         # f32[1, 2]; shard_grad: p0
return [mul, _to_copy_default_1, None]
""",  # noqa: E501
    )


def test_all_reduce_form_slices_this_ranks_rows_from_the_sum():
    _, (_, after, _) = before_and_after(3, [Param((7, 2))], ReduceGrads("all_reduce"))
    expect_listing(
        listing(after),
        """\
primals_1: f32[3, 2]                                          # shard: p0
primals_2: f32[7, 2]
tangents_1: f32[7, 2]
unshard = zpasses.unshard(primals_1, 7, None, None, '0')      # f32[7, 2]; gather: p0
mul = mul(unshard, primals_2)                                 # f32[7, 2]
mul_1 = mul(tangents_1, primals_2)                            # f32[7, 2]
all_reduce_default = all_reduce(mul_1, 'avg', '0')            # f32[7, 2]; reduce: p0
wait_tensor_default = wait_tensor(all_reduce_default)         # f32[7, 2]; reduced: p0
slice_copy_tensor = slice_copy(wait_tensor_default, 0, 3, 6)  # f32[3, 2]; shard_grad: p0
return [mul, slice_copy_tensor, None]
""",
    )


@pytest.mark.parametrize("form", FORMS)
@for_each_world_size
def test_lowered_graph_equals_the_dialect_on_all_ranks(world_size, form):
    params = [
        Param((4, 3)),
        Param((7, 2), param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        Param((2,), reduce_dtype=torch.float64),
        Param(()),
        Param((), param_dtype=torch.bfloat16, reduce_dtype=torch.float64),
        Param((0, 3)),
        Param((3, 0)),
        Param((5, 1), frozen=True),
        Param((6, 2, 2), reads=2),
    ]
    assert_passes_preserve_results(world_size, params, ReduceGrads(form))


def test_full_blocks_are_reduced_without_padding_cast_or_copy():
    gm = lowered(2, 0, Param((4, 2)))
    assert not {"constant_pad_nd", "slice", "clone", "_to_copy"} & set(targets(gm))


@pytest.mark.parametrize("form", FORMS)
def test_gradient_sliced_from_a_larger_tensor_owns_its_memory(form):
    gm = lowered(3, 2, Param((7, 2)), form=form)
    ((grad, _),) = tagged(gm.graph, "shard_grad")
    assert grad.target is torch.ops.aten.slice_copy.Tensor


@pytest.mark.parametrize("form", FORMS)
def test_gradient_that_is_cast_is_sliced_without_another_copy(form):
    gm = lowered(3, 2, Param((7, 2), reduce_dtype=torch.float64), form=form)
    assert [name for name in targets(gm) if name in ("slice", "slice_copy", "clone")] == ["slice"]


@pytest.mark.inductor
@pytest.mark.slow(quick="test_inductor_computes_gradients_into_their_slices_of_a_flat_bucket")
def test_gradient_owns_its_memory_under_inductor_too():
    def fn(shard, x):
        return x * torch.ops.zpasses.unshard(shard, 7, None, None, "0")

    lower = Pipeline((GatherParams(), ReduceGrads("all_reduce")))
    patches = {"post_grad_custom_post_pass": lower, "force_disable_caches": True}
    with fake_world(3, 2), config.patch(patches):
        shard = torch.zeros(1, 2, requires_grad=True)
        torch.compile(fn, fullgraph=True)(shard, torch.ones(7, 2)).sum().backward()
    assert shard.grad.untyped_storage().nbytes() == shard.grad.nbytes == 8


def test_bytes_of_the_reduction_are_in_the_reduction_dtype():
    (half,) = reductions(lowered(2, 0, Param((4, 2), param_dtype=torch.bfloat16)))
    (single,) = reductions(
        lowered(2, 0, Param((4, 2), param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    )
    assert (half.nbytes, half.dtypes) == (16, ("bfloat16",))
    assert (single.nbytes, single.dtypes) == (32, ("float32",))


def test_frozen_parameter_is_not_reduced():
    assert reductions(lowered(2, 0, Param((4, 2), frozen=True))) == []


def test_scalar_gradient_is_averaged_by_an_all_reduce_in_either_form():
    for form in FORMS:
        (only,) = reductions(lowered(3, 1, Param(()), form=form))
        assert (only.op, only.reduce_op) == ("all_reduce", "avg")


def test_empty_gradients_do_not_communicate():
    assert reductions(lowered(2, 0, Param((0, 3)), Param((3, 0)))) == []


def test_one_rank_does_not_communicate():
    assert reductions(lowered(1, 0, Param((4, 2)), Param((3,), reduce_dtype=torch.float64))) == []


def test_unknown_form_names_the_known_ones():
    with pytest.raises(OptionError, match=r"'reduce_scatter' or 'all_reduce'"):
        Pipeline.parse("reduce-grads{form=scatter}")


def test_graph_without_gradients_is_unchanged():
    gm = trace_joint(lambda x: (x * 2).relu(), [torch.ones(3, requires_grad=True)])
    before = listing(gm)
    assert ReduceGrads().rewrite(gm.graph) == 0
    assert listing(gm) == before


def test_order_of_reductions_does_not_depend_on_addresses():
    with fake_world(3, 1):
        assert_deterministic(
            ReduceGrads(), joint([Param((7, 2)), Param((4,)), Param((5, 1), reads=2)], 1, 3)
        )


@few_examples
@given(param_lists(), st.sampled_from([1, 2, 3, 5]), st.sampled_from(FORMS))
def test_random_graphs_stay_equal(params, world_size, form):
    assert_passes_preserve_results(world_size, params, ReduceGrads(form))
