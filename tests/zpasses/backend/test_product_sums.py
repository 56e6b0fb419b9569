"""Sums of products: results have the same bits in every plan, and those of unsharded code."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

import zpasses
from tests.zpasses.backend.budgets import within_compile
from zpasses import compat
from zpasses.backend.product_sums import round_as_in
from zpasses.backend.step_trials import StepTrials
from zpasses.cost.time.fused_kernels import use_fusion
from zpasses.cost.time.roofline import durations_us
from zpasses.cost.time.target import TARGETS
from zpasses.graph.queries import copy_graph
from zpasses.testing import run_on_ranks, world_mesh
from zpasses.testing.step_graphs import trace_partitionable

aten = torch.ops.aten


def rewritten(fn, *shapes):
    """Returns the joint graph of a function before and after the rewrite for its partition."""
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    traced = trace_partitionable(fn, inputs)
    after = copy_graph(traced.joint)
    round_as_in(traced.partition(copy_graph(traced.joint)), after.graph)
    after.graph.lint()
    after.recompile()
    given = [torch.randn(each.meta["val"].shape) for each in inputs_of(after)]
    for one, other in zip(after(*given), traced.joint(*given), strict=True):
        torch.testing.assert_close(one, other)
    return traced.joint, after


def inputs_of(gm):
    return gm.graph.find_nodes(op="placeholder")


def sums(gm):
    targets = aten.add.Tensor, aten.addmm.default, aten.sub.Tensor
    return [
        node
        for target in targets
        for node in gm.graph.find_nodes(op="call_function", target=target)
    ]


def is_rewritten(total):
    return total.target is aten.addmm.default or "alpha" in total.kwargs


@pytest.mark.parametrize("shape", [(4, 5), (5,), (1, 5), (4, 1)])
def test_a_product_that_only_the_sum_reads_goes_into_it(shape):
    for fn in (lambda x, a, b: (x + a @ b).tanh(), lambda x, a, b: (a @ b + x).tanh()):
        before, after = rewritten(fn, shape, (4, 3), (3, 5))
        (total,) = sums(after)
        assert (total.target, total.args) == (aten.addmm.default, tuple(inputs_of(after)[:3]))
        assert [total.name] == [each.name for each in sums(before)]


def test_a_sum_takes_as_long_as_one_that_inductor_joins_with_its_product():
    before, after = rewritten(lambda x, a, b: (x + a @ b).tanh(), (512, 512), (512, 8), (8, 512))
    with use_fusion(fuses=True):
        took = [sum(durations_us(each.graph.nodes, TARGETS["h100"])) for each in (before, after)]
    assert took[1] == pytest.approx(took[0], rel=0.05)


def test_the_second_of_two_products_goes_into_their_sum():
    """Inductor tries it first."""
    _, after = rewritten(lambda a, b, c, d: (a @ b + c @ d).tanh(), *[(4, 3), (3, 5)] * 2)
    (total,) = sums(after)
    assert total.target is aten.addmm.default
    assert total.args[1:] == tuple(inputs_of(after)[2:4])


def test_a_product_that_is_added_to_itself_stays_beside_its_sum():
    _, after = rewritten(lambda a, b: (lambda p: p + p)(a @ b).tanh(), (4, 3), (3, 5))
    (total,) = filter(is_rewritten, sums(after))
    assert (total.target, total.args[1:]) == (aten.addmm.default, tuple(inputs_of(after)[:2]))
    assert total.args[0].target is aten.mm.default


class AddKeeping(torch.autograd.Function):
    """A sum whose backward reads the second term."""

    @staticmethod
    def forward(ctx, x, product):
        ctx.save_for_backward(product)
        return x + product

    @staticmethod
    def backward(ctx, grad):
        (product,) = ctx.saved_tensors
        return grad, grad * product.cos()


def test_a_product_that_is_saved_stays_apart_from_its_sum():
    before, after = rewritten(lambda x, a, b: AddKeeping.apply(x, a @ b), (4, 5), (4, 3), (3, 5))
    (total,) = sums(after)
    assert (total.target, dict(total.kwargs)) == (aten.sub.Tensor, {"alpha": -1})
    assert [total.name] == [each.name for each in sums(before)]


def test_a_product_of_one_row_is_never_saved():
    """Inductor computes some of them, and their sums, by other operators than `addmm`."""
    _, after = rewritten(lambda x, a, b: (x + a @ b).tanh(), (1, 5), (1, 3), (3, 5))
    (product,) = after.graph.find_nodes(op="call_function", target=aten.mm.default)[:1]
    assert compat.is_marked_recompute(product)
    assert [each.target for each in sums(after)] == [aten.add.Tensor]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, a, b: (x + (a @ b).view(2, 2, 5)).tanh(),
        lambda x, a, b: (x + (a.double() @ b.double())).tanh(),
        lambda x, a, b: (x.mean() + 2.0 * (a @ b)).tanh(),
    ],
)
def test_sums_that_no_graph_computes_with_a_product_are_left_alone(fn):
    before, after = rewritten(
        fn, (2, 2, 5) if "view" in fn.__code__.co_names else (4, 5), (4, 3), (3, 5)
    )
    assert [each.target for each in sums(after)] == [each.target for each in sums(before)]


def test_a_sum_without_a_rewrite_has_the_same_bits():
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, torch.inf])
    x, product = (each.flatten() for each in torch.meshgrid(values, values, indexing="ij"))
    one, other = torch.add(x, product), torch.sub(x, product, alpha=-1)
    assert torch.equal(one.view(torch.int32), other.view(torch.int32))


class Residual(nn.Module):
    """Saves the sum, if all activations are saved."""

    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x))))


class KeepingResidual(Residual):
    """Saves the product, if all activations are saved."""

    def forward(self, x):
        return AddKeeping.apply(x, self.down(gelu(self.up(self.norm(x)))))


def stack(kind):
    torch.manual_seed(0)
    return nn.Sequential(
        *(kind() for _ in range(2)), nn.LayerNorm(64), nn.Linear(64, 8, bias=False)
    )


X = torch.linspace(-1, 1, 256 * 64).view(256, 64).sin()


@pytest.mark.parametrize(
    ("kind", "target"), [(Residual, aten.addmm.default), (KeepingResidual, aten.sub.Tensor)]
)
def test_plans_that_save_less_have_the_sums_of_the_one_that_saves_all(kind, target):
    def check(trials):
        before = str(trials.gm.graph)
        full, leaner = (sums(trials.trial(each).graphs[0]) for each in (1.0, 0.1))
        assert not [each for each in full if is_rewritten(each)]
        assert [each.target for each in leaner if is_rewritten(each)][:1] == [target]
        assert str(trials.gm.graph) == before

    within_compile(check, stack(kind), x=X, fake=True)


def test_code_that_is_not_generated_needs_no_rewrite():
    def check(trials):
        assert trials.leaner_gm() is trials.gm

    within_compile(check, stack(Residual), x=X)


def _differing(kind):
    """Returns in which plans, by the fraction of the activations that they save, gradients have
    other bits than in unsharded code. The first has no memory budget.
    """
    torch.set_num_threads(1)
    plain, found = stack(kind), []
    torch.compile(plain)(X).square().mean().backward()
    expected = [param.grad for param in plain.parameters()]
    for fraction in (None, 1.0, 0.4, 0.1):
        torch._dynamo.reset()
        model = zpasses.shard(stack(kind), mesh=world_mesh())
        options = {"zero_stage": 3, "cache": False}
        if fraction is not None:
            options["memory_budget"] = "1GiB"

        def planned(trials, limit, fraction=fraction):
            return trials._planned(trials.trial(fraction), limit)

        with mock.patch.object(StepTrials, "_fastest", planned):
            step = torch.compile(model, backend="zpasses", options=options)
            step(X).square().mean().backward()
        grads = [param.grad.to_local() for param in model.parameters()]
        if not all(map(torch.equal, grads, expected)):
            found.append(fraction)
    return found


@pytest.mark.parametrize("kind", [Residual, KeepingResidual])
@pytest.mark.slow(quick="test_plans_that_save_less_have_the_sums_of_the_one_that_saves_all")
@pytest.mark.processes
@pytest.mark.inductor
def test_all_plans_have_the_bits_of_unsharded_code(kind):
    # One rank adopts no earlier plan of the same collectives.
    assert run_on_ranks(_differing, kind, ranks=1) == [[]]
