import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.graphs import (
    Param,
    assert_passes_preserve_results,
    before_and_after,
    expect_listing,
    few_examples,
    for_each_world_size,
    joint,
    rewritten,
)
from zpasses.graph.dialect import REDUCE_GRAD, UNSHARD
from zpasses.graph.queries import calls
from zpasses.graph.tags import tag_of
from zpasses.passes import MergeReads
from zpasses.testing import assert_deterministic, capture_graphs, fake_world, listing, trace_joint
from zpasses.testing.strategies import param_lists


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
    _, (after,) = before_and_after(
        1,
        [Param((4, 2), param_dtype=torch.bfloat16, reduce_dtype=torch.float32, reads=2)],
        MergeReads(),
    )
    (reduction,) = calls(after.graph, REDUCE_GRAD)
    assert reduction.args[0].target is torch.ops.aten.add.Tensor
    assert reduction.args[0].meta["val"].dtype == torch.float32


@for_each_world_size
def test_merged_graph_equals_the_dialect_on_all_ranks(world_size):
    params = [
        Param((4, 3), reads=3),
        Param((7, 2), reads=2, param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        Param((), reads=2),
        Param((0, 3), reads=2),
        Param((5,), reads=2, frozen=True),
        Param((2, 2)),
    ]
    assert_passes_preserve_results(
        world_size, params, MergeReads(), interleaved=world_size % 2 == 1
    )


def test_consecutive_reads_merge_at_any_size():
    assert merged([Param((4, 2), reads=3)], max_hold_mb=0.0) == ((3, 3), (1, 1))


def test_reads_around_other_gathers_merge_up_to_max_hold_mb():
    small, large = Param((4, 2), reads=2), Param((600, 1000), reads=2)
    assert merged([small, large], interleaved=True, max_hold_mb=None) == ((4, 4), (2, 2))
    assert merged([small, large], interleaved=True, max_hold_mb=1.0) == ((4, 4), (3, 2))
    assert merged([small, large], interleaved=True, max_hold_mb=0.0) == ((4, 4), (4, 2))


def test_single_reads_are_unchanged():
    with fake_world(2):
        gm = joint([Param((4, 2)), Param((4, 2))], 0, 2)
        before = listing(gm)
        assert MergeReads().rewrite(gm.graph) == 0
    assert listing(gm) == before


def test_graph_without_parameters_is_unchanged():
    gm = trace_joint(lambda x: x + x.relu(), [torch.ones(3, requires_grad=True)])
    before = listing(gm)
    assert MergeReads().rewrite(gm.graph) == 0
    assert listing(gm) == before


def test_reads_in_different_dtypes_are_not_merged():
    def two_dtypes(shard):
        read = torch.ops.zpasses.unshard
        return read(shard, 4, None, None, "0") * 2, read(shard, 4, torch.bfloat16, None, "0") * 2

    with fake_world(2):
        gm = trace_joint(two_dtypes, [torch.zeros(2, 2, requires_grad=True)], {0: "w"})
        MergeReads()(gm.graph)
    assert counts(gm)[0] == 2


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def test_tied_parameter_is_gathered_and_reduced_once():
    captured = capture_graphs(
        Tied(), (torch.zeros(3, dtype=torch.long),), world_size=2, pipeline=str(MergeReads())
    )
    assert counts(captured.before.joint) == (2, 2)
    assert counts(captured.after.joint) == (1, 1)
    (read,) = calls(captured.after.joint.graph, UNSHARD)
    assert tag_of(read).params == ("embed.weight",)


def test_merged_reduction_is_tagged_with_its_parameter():
    with fake_world(2):
        gm = rewritten(joint([Param((4, 2), reads=2)], 0, 2), MergeReads())
    (reduction,) = calls(gm.graph, REDUCE_GRAD)
    assert (tag_of(reduction).role, tag_of(reduction).params, tag_of(reduction).nbytes) == (
        "reduce",
        ("p0",),
        32,
    )


def test_order_does_not_depend_on_addresses():
    with fake_world(3, 1):
        assert_deterministic(
            MergeReads(),
            joint(
                [Param((7, 2), reads=2), Param((4,)), Param((5, 1), reads=3)],
                1,
                3,
                interleaved=True,
            ),
        )


@few_examples
@given(
    param_lists(param_dtype=None),
    st.sampled_from([1, 2, 3]),
    st.booleans(),
    st.sampled_from([None, 0.0]),
)
def test_random_graphs_stay_equal(params, world_size, interleaved, max_hold_mb):
    assert_passes_preserve_results(
        world_size, params, MergeReads(max_hold_mb), interleaved=interleaved
    )
