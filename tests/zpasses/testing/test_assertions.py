import itertools

import pytest
import torch
from torch import fx

from tests.graphs import Param, joint, rewritten
from zpasses.passes import GatherParams
from zpasses.testing import assert_deterministic, assert_equal_bits, fake_world, random_inputs

aten = torch.ops.aten


def program(*targets):
    """x -> target(x) for each target."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(tuple(graph.call_function(target, (x, *args)) for target, *args in targets))
    return fx.GraphModule(torch.nn.Module(), graph)


def compare(a, b, value):
    assert_equal_bits(program(a), program(b), [[value]])


def test_equal_graphs_return_their_runs():
    (first, second) = assert_equal_bits(
        program((aten.mul.Tensor, 2)),
        program((aten.add.Tensor, 1)),
        [[torch.ones(2)], [torch.ones(2)]],
    )
    assert first.outputs[0].tolist() == [2, 2]
    assert second.collectives == ()


def test_first_difference_is_named_with_rank_output_and_bits():
    reference = [program((aten.neg.default,), (aten.mul.Tensor, 1)) for _ in range(2)]
    wrong = [reference[0], program((aten.neg.default,), (aten.mul.Tensor, 2))]
    inputs = [[torch.ones(2, 2)], [torch.tensor([[0.0, 0.0], [1.0, 0.0]])]]
    place = r"rank 1, output 1 \(mul_tensor\): 1 of 4 .* at \(1, 0\): "
    bits = r"2.0 \(0x40000000\).*gives 1.0 \(0x3f800000\)"
    with pytest.raises(AssertionError, match=place + bits):
        assert_equal_bits(reference, wrong, inputs)


def test_zeros_of_different_sign_differ():
    with pytest.raises(AssertionError, match=r"0\.0 \(0x00000000\).*-0\.0 \(0x80000000\)"):
        compare((aten.neg.default,), (aten.abs.default,), torch.zeros(1))


def test_nans_are_compared_by_their_payload():
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    compare((aten.clone.default,), (aten.clone.default,), quiet)
    with pytest.raises(AssertionError, match=r"0x7fc00000.*0x7fc00001"):
        assert_equal_bits(program((aten.clone.default,)), constant(quiet), [[other]])


def constant(value):
    graph = fx.Graph()
    graph.placeholder("x")
    graph.output((graph.get_attr("value"),))
    root = torch.nn.Module()
    root.value = value
    return fx.GraphModule(root, graph)


def test_another_shape_dtype_or_kind_differs():
    for other in (torch.ones(3), torch.ones(2, dtype=torch.float64), None, 1.0):
        with pytest.raises(AssertionError, match=r"rank 0, output 0"):
            assert_equal_bits(program((aten.clone.default,)), constant(other), [[torch.ones(2)]])


def test_another_number_of_outputs_differs():
    one, two = program((aten.neg.default,)), program((aten.neg.default,), (aten.neg.default,))
    with pytest.raises(AssertionError, match=r"has 2 outputs, the reference 1"):
        assert_equal_bits(one, two, [[torch.ones(2)]])


def test_layout_and_empty_and_other_dtypes_compare():
    for value in (
        torch.ones(2, 3),
        torch.ones(0, 3),
        torch.tensor(True),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
    ):
        other = constant(value.t().contiguous().t() if value.dim() == 2 else value)
        assert_equal_bits(program((aten.clone.default,)), other, [[value]])


def test_what_a_graph_writes_to_its_inputs_is_compared():
    value = torch.ones(2)
    with pytest.raises(AssertionError, match=r"input 0 after the run"):
        compare((aten.add_.Tensor, 1), (aten.add.Tensor, 1), value)
    assert value.tolist() == [1, 1]


def test_random_inputs_fit_the_graph_and_differ_by_rank_and_seed():
    with fake_world(7):
        gm = joint([Param((70, 2), param_dtype=torch.bfloat16)], 0, 7)
    first, second, *_ = random_inputs([gm] * 7, seed=1)
    kinds = [((10, 2), torch.float32), *[((70, 2), torch.bfloat16)] * 2]
    assert [(tuple(value.shape), value.dtype) for value in first] == kinds
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[0], random_inputs([gm] * 7, seed=1)[0][0])
    assert not torch.equal(first[0], random_inputs([gm] * 7, seed=2)[0][0])
    tangent = first[-1]  # multiples of the number of ranks, so that averages are exact
    assert tangent.abs().max() > 0
    assert not (tangent % 7).any()


def test_order_from_a_counter_is_deterministic_and_a_changing_one_is_not():
    turns = itertools.count()

    def fickle(graph):
        GatherParams()(graph)
        if next(turns) % 2:
            starts = [node for node in graph.nodes if "all_gather" in node.name]
            starts[0].prepend(starts[1])

    with fake_world(2):
        gm = joint([Param((4, 2)), Param((4, 3))], 0, 2)
        assert_deterministic(GatherParams(), gm)
        with pytest.raises(AssertionError, match=r"is not deterministic: collective 0 is"):
            assert_deterministic(fickle, gm)
        assert not [node for node in gm.graph.nodes if "all_gather" in node.name]


def test_wrong_rewrite_is_found():
    with fake_world(2):
        gm = joint([Param((4, 2))], 0, 2)
        wrong = rewritten(gm, GatherParams())
    (full,) = (node for node in wrong.graph.nodes if "wait" in node.name)
    with wrong.graph.inserting_after(full):
        negated = wrong.graph.call_function(aten.neg.default, (full,))
    full.replace_all_uses_with(negated, delete_user_cb=lambda user: user is not negated)
    with pytest.raises(AssertionError, match=r"rank 0, output 0 \(mul\)"):
        assert_equal_bits(gm, wrong, random_inputs([gm] * 2))
