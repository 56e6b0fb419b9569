import torch

from tests.graphs import (
    Param,
    before_and_after,
    expect_listing,
    joint,
)
from zpasses.graph.queries import collectives
from zpasses.graph.tags import tagged
from zpasses.passes import GatherParams
from zpasses.testing import fake_world, listing, trace_joint

BF16 = torch.bfloat16


def ops(gm):
    return [node.target._opname for node in gm.graph.nodes if node.op == "call_function"]


def lowered(world_size, rank, *params):
    with fake_world(world_size, rank):
        gm = joint(params, rank, world_size)
        GatherParams()(gm.graph)
    return gm


def test_unshard_becomes_cast_padding_gather_wait_and_slice():
    (*_, before), (*_, after) = before_and_after(
        3, [Param((7, 2), param_dtype=BF16)], GatherParams()
    )
    expect_listing(
        listing(before),
        """\
primals_1: f32[1, 2]                                            # shard: p0
primals_2: bf16[7, 2]
tangents_1: bf16[7, 2]
unshard = zpasses.unshard(primals_1, 7, bf16, None, '0')        # bf16[7, 2]; gather: p0
mul = mul(unshard, primals_2)                                   # bf16[7, 2]
mul_1 = mul(tangents_1, primals_2)                              # bf16[7, 2]
reduce_grad = zpasses.reduce_grad(mul_1, 7, 1, f32, None, '0')  # f32[1, 2]; reduce: p0
return [mul, reduce_grad, None]
""",
    )
    expect_listing(
        listing(after),
        """\
primals_1: f32[1, 2]                                                                      # shard: p0
primals_2: bf16[7, 2]
tangents_1: bf16[7, 2]
_to_copy_default = _to_copy(primals_1, dtype=bf16)                                        # bf16[1, 2]; gather_input: p0
constant_pad_nd_default = constant_pad_nd(_to_copy_default, [0, 0, 0, 2], 0.0)            # bf16[3, 2]; gather_input: p0
all_gather_into_tensor_default = all_gather_into_tensor(constant_pad_nd_default, 3, '0')  # bf16[9, 2]; gather: p0
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)                         # bf16[9, 2]; gathered: p0
slice_tensor = slice(wait_tensor_default, 0, 0, 7)                                        # bf16[7, 2]; full: p0
mul = mul(slice_tensor, primals_2)                                                        # bf16[7, 2]
mul_1 = mul(tangents_1, primals_2)                                                        # bf16[7, 2]
reduce_grad = zpasses.reduce_grad(mul_1, 7, 1, f32, None, '0')                            # f32[1, 2]; reduce: p0
return [mul, reduce_grad, None]
""",  # noqa: E501
    )
    roles = ("gather_input", "gather", "gathered", "full")
    assert {tag.origin for _, tag in tagged(after.graph, *roles)} == {"gather-params"}


def test_divisible_rows_in_their_dtype_are_gathered_without_copies():
    gm = lowered(2, 1, Param((4, 2), param_dtype=torch.float32))
    gather, wait = (
        node for node in gm.graph.nodes if "all_gather" in node.name or "wait" in node.name
    )
    assert gather.args[0].op == "placeholder"
    assert next(iter(wait.users)).target is torch.ops.aten.mul.Tensor
    assert not {"constant_pad_nd", "slice", "_to_copy"} & set(ops(gm))


def test_only_ranks_whose_block_is_not_full_pad():
    padded = ["constant_pad_nd" in ops(lowered(3, rank, Param((7, 2)))) for rank in range(3)]
    assert padded == [False, False, True]


def test_cast_comes_before_the_gather_so_that_half_the_bytes_move():
    plain, cast = (
        next(each for _, each in collectives(lowered(2, 0, param).graph))
        for param in (Param((4, 2), frozen=True), Param((4, 2), param_dtype=BF16, frozen=True))
    )
    assert (plain.nbytes, cast.nbytes) == (16, 8)
    assert cast.dtypes == ("bfloat16",)


def test_scalar_and_empty_parameters_do_not_communicate():
    for param in (Param(()), Param((), param_dtype=BF16), Param((0, 3)), Param((3, 0))):
        gm = lowered(2, 0, Param(param.shape, param_dtype=param.param_dtype, frozen=True))
        assert not list(collectives(gm.graph)), param


def test_one_rank_copies_and_does_not_communicate():
    gm = lowered(1, 0, Param((4, 2), frozen=True))
    assert not list(collectives(gm.graph))
    ((full, _),) = tagged(gm.graph, "full")
    assert full.target is torch.ops.aten.clone.default


def test_each_group_gathers_over_its_own_ranks():
    with fake_world(4, 1):
        torch.distributed.new_group([1, 3])
        names = {
            each.size(): each.group_name
            for each in torch.distributed.distributed_c10d._world.pg_map
        }

        def two_groups(a, b):
            first = torch.ops.zpasses.unshard(a, 4, None, None, names[4])
            return first * 2, torch.ops.zpasses.unshard(b, 4, None, None, names[2]) * 3

        gm = trace_joint(
            two_groups,
            [torch.zeros(1, 2, requires_grad=True), torch.zeros(2, 2, requires_grad=True)],
        )
        GatherParams()(gm.graph)
    gathers = [node for node, each in collectives(gm.graph) if each.op == "all_gather_into_tensor"]
    assert [(node.args[1], node.args[2]) for node in gathers] == [(4, names[4]), (2, names[2])]
