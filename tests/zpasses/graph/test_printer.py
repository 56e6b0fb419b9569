import torch
from torch import nn

from tests.graphs import Param, expect_listing, joint, rewritten
from zpasses.graph.tags import retag, tagged
from zpasses.passes import GatherParams, ReshardAfterForward
from zpasses.testing import capture_graphs, fake_world, listing, trace_joint


def test_comments_show_values_tags_and_recompute_marks():
    with fake_world(2):
        gm = rewritten(
            joint([Param((4, 2), param_dtype=torch.bfloat16)], 0, 2),
            GatherParams(),
            ReshardAfterForward(),
        )
    ((full, _),) = tagged(gm.graph, "full")
    retag(full, cached=True, bucket=3)
    expect_listing(
        listing(gm),
        """\
primals_1: f32[2, 2]                                                               # shard: p0
primals_2: bf16[4, 2]
tangents_1: bf16[4, 2]
_to_copy_default = _to_copy(primals_1, dtype=bf16)                                 # bf16[2, 2]; gather_input: p0; recomputed
all_gather_into_tensor_default = all_gather_into_tensor(_to_copy_default, 2, '0')  # bf16[4, 2]; gather: p0; recomputed
wait_tensor_default = wait_tensor(all_gather_into_tensor_default)                  # bf16[4, 2]; full: p0 in bucket 3; cached; recomputed
mul = mul(wait_tensor_default, primals_2)                                          # bf16[4, 2]
mul_1 = mul(tangents_1, primals_2)                                                 # bf16[4, 2]
reduce_grad = zpasses.reduce_grad(mul_1, 4, 2, f32, None, '0')                     # f32[2, 2]; reduce: p0
return [mul, reduce_grad, None]
""",  # noqa: E501
    )


def test_captured_graph_has_a_listing():
    captured = capture_graphs(nn.Linear(6, 4, bias=False), (torch.zeros(2, 6),), world_size=2)
    expect_listing(
        listing(captured.before.captured),
        """\
l_fn_parameters_weight_: f32[2, 6]
l_args_0_: f32[2, 6]
shard = local_shard(l_fn_parameters_weight_)       # f32[2, 6]
full = zpasses.unshard(shard, 4, None, None, '0')  # f32[4, 6]; gather: weight
linear = linear(l_args_0_, full, None)             # f32[2, 4]
return (linear,)
""",
    )


def test_graph_and_module_have_the_same_listing():
    gm = trace_joint(lambda x: x.split(2)[1] * 2.5, [torch.ones(4, requires_grad=True)])
    assert listing(gm) == listing(gm.graph)
    expect_listing(
        listing(gm),
        """\
primals_1: f32[4]
tangents_1: f32[2]
split = split(primals_1, 2)                                # (f32[2], f32[2])
getitem_1 = getitem(split, 1)                              # f32[2]
mul = mul(getitem_1, 2.5)                                  # f32[2]
mul_1 = mul(tangents_1, 2.5)                               # f32[2]
zeros = zeros([2], dtype=f32, layout=strided, device=cpu)  # f32[2]
cat = cat([zeros, mul_1])                                  # f32[4]
return [mul, cat]
""",
    )
