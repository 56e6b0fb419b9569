import pytest
import torch
from torch._inductor import config

from tests.graphs import (
    Param,
    before_and_after,
    expect_listing,
    joint,
)
from zpasses import Pipeline
from zpasses.graph.queries import collectives
from zpasses.graph.tags import tagged
from zpasses.passes import GatherParams, ReduceGrads
from zpasses.testing import fake_world, listing

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
    for dtype, expected in ((None, (16, ("bfloat16",))), (torch.float32, (32, ("float32",)))):
        param = Param((4, 2), param_dtype=torch.bfloat16, reduce_dtype=dtype)
        (reduction,) = reductions(lowered(2, 0, param))
        assert (reduction.nbytes, reduction.dtypes) == expected


def test_scalar_gradient_is_averaged_by_an_all_reduce_in_either_form():
    for form in FORMS:
        (only,) = reductions(lowered(3, 1, Param(()), form=form))
        assert (only.op, only.reduce_op) == ("all_reduce", "avg")


def test_frozen_and_empty_parameters_and_one_rank_do_not_communicate():
    assert reductions(lowered(2, 0, Param((4, 2), frozen=True))) == []
    assert reductions(lowered(2, 0, Param((0, 3)), Param((3, 0)))) == []
    assert reductions(lowered(1, 0, Param((4, 2)), Param((3,), reduce_dtype=torch.float64))) == []
