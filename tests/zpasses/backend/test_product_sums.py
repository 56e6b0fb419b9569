"""Products that Inductor computes with a sum: results have the same bits in every plan."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu

import zpasses
from zpasses import compat
from zpasses.backend.product_sums import join_product_sums
from zpasses.backend.step_trials import StepTrials
from zpasses.testing import run_on_ranks, world_mesh

aten = torch.ops.aten


def joined(fn, *shapes):
    """Returns the traced graph of a function after the rewrite."""
    inputs = [torch.randn(shape) for shape in shapes]
    gm = make_fx(fn, tracing_mode="fake")(*inputs)
    join_product_sums(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), fn(*inputs))
    return gm.graph


def calls(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("shape", [(4, 5), (5,), (1, 5), (4, 1)])
def test_a_sum_is_one_call_with_the_product_that_only_it_reads(shape):
    for fn in (lambda x, a, b: x + a @ b, lambda x, a, b: a @ b + x):
        assert calls(joined(fn, shape, (4, 3), (3, 5))) == [aten.addmm.default]


def test_a_sum_of_two_products_takes_the_first():
    graph = joined(lambda a, b: a @ b + b @ a, (3, 3), (3, 3))
    assert calls(graph) == [aten.mm.default, aten.addmm.default]


def test_a_product_that_something_else_reads_stays():
    graph = joined(lambda x, a, b: (lambda y: x + y + y.sin())(a @ b), (4, 5), (4, 3), (3, 5))
    assert aten.addmm.default not in calls(graph)


def test_a_product_that_a_checkpoint_saves_is_saved_with_its_sum():
    gm = make_fx(lambda x, a, b: x + a @ b, tracing_mode="fake")(*torch.randn(3, 4, 4))
    (product,) = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
    compat.mark_saved(product)
    join_product_sums(gm.graph)
    (total,) = gm.graph.find_nodes(op="call_function", target=aten.addmm.default)
    assert compat.recompute_policy(total) == ("must_save", 0)


class Residual(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up = nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(8 * width, width, bias=False)

    def forward(self, x):
        return gelu(x + self.down(gelu(self.up(x))))


def _differing():
    """Returns in which plans, by the fraction of the activations that they save, gradients have
    other bits than without a budget.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(*(Residual() for _ in range(3)), nn.Linear(64, 8, bias=False))
    x, found, expected = torch.randn(512, 64), [], None
    for fraction in (None, 1.0, 0.4, 0.1):
        torch._dynamo.reset()
        model = zpasses.shard(copy.deepcopy(plain), mesh=world_mesh())
        options = {"zero_stage": 3, "cache": False}
        if fraction is not None:
            options["memory_budget"] = "1GiB"

        def planned(trials, limit, fraction=fraction):
            return trials._planned(trials.trial(fraction), limit)

        with mock.patch.object(StepTrials, "_fastest", planned):
            step = torch.compile(model, backend="zpasses", options=options)
            step(x).square().mean().backward()
        grads = [param.grad.to_local() for param in model.parameters()]
        expected = expected or grads
        if not all(map(torch.equal, grads, expected)):
            found.append(fraction)
    return found


@pytest.mark.slow(quick="test_a_sum_is_one_call_with_the_product_that_only_it_reads")
@pytest.mark.processes
@pytest.mark.inductor
def test_plans_that_save_and_compute_a_product_again_have_the_same_bits():
    # One rank adopts no earlier plan of the same collectives.
    assert run_on_ranks(_differing, ranks=1) == [[]]
