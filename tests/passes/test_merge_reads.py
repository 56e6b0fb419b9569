import pytest
import torch

import zpasses
from tests.graphs import (
    Param,
    before_and_after,
    expect_listing,
    joint,
)
from tests.zpasses.models import Tied
from zpasses.graph.dialect import REDUCE_GRAD, UNSHARD
from zpasses.graph.queries import calls
from zpasses.graph.tags import tag_of
from zpasses.passes import MergeReads
from zpasses.testing import capture_graphs, fake_world, listing, trace_joint


def counts(gm):
    """Returns the numbers of gathers and reductions."""
    return len(calls(gm.graph, UNSHARD)), len(calls(gm.graph, REDUCE_GRAD))


def merged(params, interleaved=False, max_hold_mb=None):
    with fake_world(2):
        gm = joint(params, 0, 2, interleaved=interleaved)
        before = counts(gm)
        MergeReads(max_hold_mb)(gm.graph)
    return before, counts(gm)


def test_two_reads_become_one_and_their_gradients_are_summed_before_the_reduction():
    (before,), (after,) = before_and_after(1, [Param((4, 2), reads=2)], MergeReads())
    expect_listing(
        listing(before),
        """\
primals_1: f32[4, 2]                                              # shard: p0
primals_2: f32[4, 2]
tangents_1: f32[4, 2]
tangents_2: f32[4, 2]
unshard = zpasses.unshard(primals_1, 4, None, None, '0')          # f32[4, 2]; gather: p0
mul = mul(unshard, primals_2)                                     # f32[4, 2]
unshard_1 = zpasses.unshard(primals_1, 4, None, None, '0')        # f32[4, 2]; gather: p0
mul_1 = mul(unshard_1, primals_2)                                 # f32[4, 2]
mul_2 = mul(mul_1, 2)                                             # f32[4, 2]
mul_3 = mul(tangents_2, 2)                                        # f32[4, 2]
mul_4 = mul(mul_3, primals_2)                                     # f32[4, 2]
reduce_grad = zpasses.reduce_grad(mul_4, 4, 4, f32, None, '0')    # f32[4, 2]; reduce: p0
mul_5 = mul(tangents_1, primals_2)                                # f32[4, 2]
reduce_grad_1 = zpasses.reduce_grad(mul_5, 4, 4, f32, None, '0')  # f32[4, 2]; reduce: p0
add = add(reduce_grad, reduce_grad_1)                             # f32[4, 2]
return [mul, mul_2, add, None]
""",
    )
    expect_listing(
        listing(after),
        """\
primals_1: f32[4, 2]                                                         # shard: p0
primals_2: f32[4, 2]
tangents_1: f32[4, 2]
tangents_2: f32[4, 2]
unshard = zpasses.unshard(primals_1, 4, None, None, '0')                     # f32[4, 2]; gather: p0
mul = mul(unshard, primals_2)                                                # f32[4, 2]
mul_1 = mul(unshard, primals_2)                                              # f32[4, 2]
mul_2 = mul(mul_1, 2)                                                        # f32[4, 2]
mul_3 = mul(tangents_2, 2)                                                   # f32[4, 2]
mul_4 = mul(mul_3, primals_2)                                                # f32[4, 2]
mul_5 = mul(tangents_1, primals_2)                                           # f32[4, 2]
add_tensor = add(mul_4, mul_5)                                               # f32[4, 2]
reduce_grad_default = zpasses.reduce_grad(add_tensor, 4, 4, f32, None, '0')  # f32[4, 2]; reduce: p0
return [mul, mul_2, reduce_grad_default, None]
""",
    )


def test_gradients_are_summed_in_the_dtype_of_the_reduction():
    param = Param((4, 2), param_dtype=torch.bfloat16, reduce_dtype=torch.float32, reads=2)
    _, (after,) = before_and_after(1, [param], MergeReads())
    (reduction,) = calls(after.graph, REDUCE_GRAD)
    assert reduction.args[0].target is torch.ops.aten.add.Tensor
    assert reduction.args[0].meta["val"].dtype == torch.float32
    assert tag_of(reduction).nbytes == 32


def test_consecutive_reads_merge_at_any_size():
    assert merged([Param((4, 2), reads=3)], max_hold_mb=0.0) == ((3, 3), (1, 1))


def test_reads_around_other_gathers_merge_up_to_max_hold_mb():
    small, large = Param((4, 2), reads=2), Param((600, 1000), reads=2)
    assert merged([small, large], interleaved=True, max_hold_mb=None) == ((4, 4), (2, 2))
    assert merged([small, large], interleaved=True, max_hold_mb=1.0) == ((4, 4), (3, 2))
    assert merged([small, large], interleaved=True, max_hold_mb=0.0) == ((4, 4), (4, 2))


def test_reads_in_different_dtypes_are_not_merged():
    def two_dtypes(shard):
        read = torch.ops.zpasses.unshard
        return read(shard, 4, None, None, "0") * 2, read(shard, 4, torch.bfloat16, None, "0") * 2

    with fake_world(2):
        gm = trace_joint(two_dtypes, [torch.zeros(2, 2, requires_grad=True)], {0: "w"})
        MergeReads()(gm.graph)
    assert counts(gm)[0] == 2


def test_tied_parameter_is_gathered_and_reduced_once():
    tokens = torch.zeros(3, dtype=torch.long)
    captured = capture_graphs(Tied(), (tokens,), world_size=2, pipeline="merge-reads")
    assert counts(captured.before.joint) == (2, 2)
    assert counts(captured.after.joint) == (1, 1)
    (read,) = calls(captured.after.joint.graph, UNSHARD)
    assert tag_of(read).params == ("embed.weight",)


@pytest.mark.inductor
def test_reads_that_the_model_returns_share_no_memory():
    class Returns(torch.nn.Linear):
        def forward(self, x):
            return x @ self.weight, self.weight, self.weight.detach()

    with fake_world(2) as mesh:
        model = zpasses.shard(Returns(8, 8), mesh=mesh)
        out, weight, detached = torch.compile(model, backend="zpasses")(torch.ones(2, 8))
        assert weight.requires_grad
        assert weight.data_ptr() != detached.data_ptr()
        (out.sum() + weight.square().sum()).backward()
