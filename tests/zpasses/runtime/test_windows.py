"""Gradient windows on one rank: what counts as a backward, what raises, and the state
afterwards.
"""

import copy
import gc
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zpasses
from tests.cases import some_quick
from zpasses import OptionError, ZpassesError
from zpasses.accumulation import GradientWindow
from zpasses.pipeline.events import observe_graphs
from zpasses.runtime.windows import grad_state_of

X = torch.ones(2, 4)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def linear(mesh, **options):
    """Return a sharded 4 x 3 layer of zeros, its compiled form, and its weight, whose gradient
    grows by 2 in each backward.
    """
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.zero_()
    zpasses.shard(model, mesh=mesh)
    compiled = torch.compile(model, backend="zpasses", options={"codegen": "eager", **options})
    return model, compiled, model._parameters["weight"]


def value(param):
    if param.grad is None:
        return None
    grad = param.grad.full_tensor()
    assert torch.equal(grad, grad[0, 0].expand_as(grad))
    return grad[0, 0].item()


def fail(_):
    raise ValueError("half-way")


def inside(model, *actions, **options):
    """Run actions in a window. Each is called with the window."""
    with zpasses.coalesce_grad_reduction(model, **options) as window:
        for action in actions:
            action(window)


def backward(step, x=X):
    return lambda window: step(x).sum().backward()


def is_clean(model):
    return all(
        not grad_state_of(param).pending and grad_state_of(param).explicit_window is None
        for param in model.parameters()
    )


# --- counting -------------------------------------------------------------------------------------
def gradients_are_added_to_what_was_there(model, step, weight):
    step(X).sum().backward()
    with zpasses.coalesce_grad_reduction(step):
        step(X).sum().backward()
        step(X).sum().backward()
        assert value(weight) == 2
    assert value(weight) == 6


def a_window_without_a_backward_changes_nothing(model, step, weight):
    with zpasses.coalesce_grad_reduction(step, backwards=3):
        step(X)
    assert weight.grad is None
    assert is_clean(model)


def leaving_before_the_nth_backward_reduces_the_gradients_so_far(model, step, weight):
    with zpasses.coalesce_grad_reduction(step, backwards=3):
        step(X).sum().backward()
        assert weight.grad is None
    assert value(weight) == 2
    assert is_clean(model)


def forwards_may_all_come_first(model, step, weight):
    """As in GradCache: forwards of all chunks, some without gradients, then backwards."""
    with torch.no_grad():
        step(X)
    early = step(X)
    with zpasses.coalesce_grad_reduction(step, backwards=3):
        losses = [step(X).sum(), step(X).sum()]
        for loss in (early.sum(), *losses):
            assert weight.grad is None
            loss.backward()
    assert value(weight) == 6


def one_backward_through_two_forwards_is_one(model, step, weight):
    with zpasses.coalesce_grad_reduction(step, backwards=2):
        (step(X) + step(X)).sum().backward()
        assert weight.grad is None
        (step(X) + step(X)).sum().backward()
        assert value(weight) == 8


class BackwardInForward(torch.autograd.Function):
    """Runs a whole backward of the model inside its forward, as cached losses do."""

    @staticmethod
    def forward(ctx, anchor, step):
        with torch.enable_grad():
            step(X).sum().backward()
        return anchor.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def a_backward_inside_a_forward_counts(model, step, weight):
    anchor = torch.ones((), requires_grad=True)
    with zpasses.coalesce_grad_reduction(step, backwards=2):
        BackwardInForward.apply(anchor, step)
        assert weight.grad is None
        # The second one; this outer run reaches no parameter.
        BackwardInForward.apply(anchor, step).backward()
    assert value(weight) == 4


def a_backward_in_a_hook_of_another_backward_counts_by_itself(model, step, weight):
    loss = torch.ones((), requires_grad=True) * 1.0

    def hook(grad):
        with torch.enable_grad():
            for _ in range(2):
                step(X).sum().backward()

    loss.register_hook(hook)
    with zpasses.coalesce_grad_reduction(step, backwards=2):
        loss.backward()
        assert value(weight) == 4


def a_reentrant_checkpoint_is_part_of_its_backward(model, step, weight):
    for run in (model, step):
        model.zero_grad()
        with zpasses.coalesce_grad_reduction(model, backwards=2):
            for _ in range(2):
                assert weight.grad is None
                x = X.clone().requires_grad_()
                inner = checkpoint(lambda x, run=run: run(x) * 1.0, x, use_reentrant=True)
                (run(x).sum() + inner.sum()).backward()
        assert value(weight) == 8


def autograd_grad_returns_reduced_gradients_and_keeps_pending_ones(model, step, weight):
    with zpasses.coalesce_grad_reduction(step, backwards=2):
        step(X).sum().backward()
        (grad,) = torch.autograd.grad(step(X).sum(), [weight])
        assert torch.equal(grad.full_tensor(), torch.full((3, 4), 2.0))
        assert weight.grad is None
        step(X).sum().backward()
    assert value(weight) == 4


def a_backward_for_some_inputs_does_not_change_the_others(model, step, weight):
    with zpasses.coalesce_grad_reduction(step):
        step(X).sum().backward()
        step(X).sum().backward(inputs=[model._parameters["bias"]])
    assert value(weight) == 2
    assert torch.equal(model._parameters["bias"].grad.full_tensor(), torch.full((3,), 4.0))


def one_graph_may_run_backward_twice(model, step, weight):
    with zpasses.coalesce_grad_reduction(step, backwards=2):
        loss = step(X).sum()
        loss.backward(retain_graph=True)
        assert weight.grad is None
        loss.backward()
    assert value(weight) == 4


def test_hooks_of_parameters_see_none_and_once_the_whole_gradient(mesh):
    for backwards in (None, 2):
        _, step, weight = linear(mesh)
        before, after = [], []
        weight.register_hook(
            lambda grad, seen=before: seen.append(
                None if grad is None else grad.full_tensor()[0, 0].item()
            )
        )
        weight.register_post_accumulate_grad_hook(
            lambda param, seen=after: seen.append(value(param))
        )
        with zpasses.coalesce_grad_reduction(step, backwards=backwards):
            step(X).sum().backward()
            assert (before, after) == ([None], [None])
            step(X).sum().backward()
        assert before[-1] == after[-1] == 4
        assert set(before[:-1]) == set(after[:-1]) == {None}


def a_backward_in_another_thread_counts(model, step, weight):
    step(X)  # compiles here
    with zpasses.coalesce_grad_reduction(step, backwards=2):
        step(X).sum().backward()
        thread = threading.Thread(target=lambda: step(X).sum().backward())
        thread.start()
        thread.join()
    assert value(weight) == 4


def a_new_shape_in_mid_window_keeps_pending_gradients(model, step, weight):
    graphs = []
    with observe_graphs(graphs.append), zpasses.coalesce_grad_reduction(step, backwards=3):
        for rows in (2, 7, 9):
            step(torch.ones(rows, 4)).sum().backward()
    assert any(graph.kind == "joint" for graph in graphs)
    assert value(weight) == 18


def eager_and_compiled_parts_share_pending_gradients(model, step, weight):
    for order in ((model, step), (step, model)):
        for backwards in (None, 2):
            model.zero_grad()
            with zpasses.coalesce_grad_reduction(model, backwards=backwards):
                for run in order:
                    assert weight.grad is None
                    run(X).sum().backward()
            assert value(weight) == 4


class TwoTowers(nn.Module):
    def __init__(self, count=5):
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(count))

    def forward(self, x, which):
        return sum(self.towers[i](x).sum() for i in which)


def test_parameters_may_get_gradients_in_only_some_backwards(mesh):
    model = zpasses.shard(TwoTowers(), mesh=mesh)
    step = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
    for ways in (None, 3):
        model.zero_grad()
        with zpasses.coalesce_grad_reduction(step, backwards=ways):
            for which in ((0, 1), (1, 2, 3), (2, 1)):
                step(X, which).backward()
        assert [value(tower._parameters["weight"]) for tower in model.towers] == [2, 6, 4, 2, None]
        assert is_clean(model)


def test_more_patterns_of_pending_gradients_than_variants(mesh):
    """Fourteen patterns of pending gradients before a backward through all five towers. Patterns
    beyond the cap use zeros.
    """
    model = zpasses.shard(TwoTowers(), mesh=mesh)
    step = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
    runs = [[i for i in range(4) if number >> i & 1] for number in range(1, 15)]
    for which in runs:
        model.zero_grad()
        with zpasses.coalesce_grad_reduction(model, backwards=2):
            model(X, which).backward()
            step(X, range(5)).backward()
        assert [value(tower._parameters["weight"]) for tower in model.towers] == [
            4.0 if i in which else 2.0 for i in range(5)
        ]


# --- dtypes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("compiled", [False, True])
def test_grad_accum_dtype_adds_up_what_bf16_would_lose(mesh, compiled):
    """256 + 1 + 1 is 256 in bfloat16, and 258 in float32."""
    model = nn.Linear(1, 1, bias=False)
    zpasses.shard(model, mesh=mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    step = model
    if compiled:
        step = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
    for backwards in (None, 3):
        for dtype, expected in ((None, 256), (torch.float32, 258)):
            model.zero_grad()
            with zpasses.coalesce_grad_reduction(model, backwards, grad_accum_dtype=dtype):
                for size in (256, 1, 1):
                    step(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
            assert value(model._parameters["weight"]) == expected, (backwards, dtype)


# --- refusals -------------------------------------------------------------------------------------
def windows_do_not_nest(model, step, weight):
    with zpasses.coalesce_grad_reduction(model):
        step(X).sum().backward()
        with pytest.raises(ZpassesError, match="open already"):
            zpasses.coalesce_grad_reduction(step).__enter__()
        messages = []

        def enter():
            try:
                zpasses.coalesce_grad_reduction(step).__enter__()
            except ZpassesError as error:
                messages.append(str(error))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert "open already" in messages[0]
    assert value(weight) == 2


def a_window_can_be_entered_again_once_it_was_left(model, step, weight):
    window = zpasses.coalesce_grad_reduction(model)
    for _ in range(2):
        with window:
            step(X).sum().backward()
    assert value(weight) == 4


def test_two_models_may_have_a_window_each(mesh):
    (one, first, a), (_, second, b) = linear(mesh), linear(mesh)
    with zpasses.coalesce_grad_reduction(one, backwards=2), zpasses.coalesce_grad_reduction(second):
        for _ in range(2):
            (first(X) + second(X)).sum().backward()
        assert (value(a), value(b)) == (4, None)
    assert (value(a), value(b)) == (4, 4)


def an_optimizer_step_inside_is_refused(model, step, weight):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ZpassesError, match=r"SGD.step\(\) inside coalesce_grad_reduction"):
        inside(model, backward(step), lambda window: optimizer.step())
    assert weight.grad is None
    assert is_clean(model)


def zero_grad_inside_does_not_clear_pending_gradients(model, step, weight):
    step(X).sum().backward()
    with zpasses.coalesce_grad_reduction(model):
        step(X).sum().backward()
        model.zero_grad()
        step(X).sum().backward()
    assert value(weight) == 4


def a_backward_after_the_last_is_refused(model, step, weight):
    with pytest.raises(ZpassesError, match="backward number 2 in a window whose last backward was"):
        inside(
            model,
            backward(step),
            lambda window: value(weight) == 2 or pytest.fail("the first one reduces"),
            backward(step),
            backwards=1,
        )


def the_last_backward_is_announced_in_only_one_way(model, step, weight):
    with pytest.raises(ZpassesError, match="backwards=3 already determines"):
        inside(model, GradientWindow.last, backwards=3)
    with pytest.raises(ZpassesError, match="an earlier last"):
        inside(model, GradientWindow.last, GradientWindow.last)


def test_an_unsharded_model_is_refused(mesh):
    with pytest.raises(ZpassesError, match="Linear has no sharded parameters"):
        zpasses.coalesce_grad_reduction(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "given",
    [
        {"backwards": 0},
        {"backwards": True},
        {"grad_accum_dtype": torch.int32},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
    ],
)
def test_bad_arguments_are_refused(mesh, given):
    model, _, _ = linear(mesh)
    with pytest.raises(OptionError, match=next(iter(given))):
        zpasses.coalesce_grad_reduction(model, **given)


def test_a_pipeline_that_cannot_defer_reduces_in_every_backward_and_warns(mesh, caplog):
    _, step, weight = linear(mesh, pipeline="gather-params,reduce-grads")
    with zpasses.coalesce_grad_reduction(step):
        step(X).sum().backward()
        assert value(weight) == 2
        step(X).sum().backward()
    assert value(weight) == 4
    assert "defer-reduction" in caplog.text


# --- failures -------------------------------------------------------------------------------------
def an_exception_drops_pending_gradients(model, step, weight):
    with pytest.raises(ValueError, match="half-way"):
        inside(model, backward(step), fail)
    assert weight.grad is None
    assert is_clean(model)
    with zpasses.coalesce_grad_reduction(model, backwards=2):
        step(X).sum().backward()
        step(X).sum().backward()
    assert value(weight) == 4


def a_backward_that_raises_half_way_and_is_not_caught(model, step, weight):
    x = X.clone().requires_grad_()
    x.register_hook(fail)
    with pytest.raises(ValueError, match="half-way"):
        inside(model, backward(step), backward(step, x), backwards=3)
    assert weight.grad is None
    assert is_clean(model)


def a_backward_that_fails_in_compiled_code_fails_the_window_even_if_it_is_caught(
    model, step, weight
):

    def go_wrong(window):
        (part,) = grad_state_of(weight).pending.values()
        part.total = torch.zeros(7)
        with pytest.raises(RuntimeError, match="size of tensor"):
            step(X).sum().backward()

    with pytest.raises(ZpassesError, match="a backward failed with RuntimeError"):
        inside(model, backward(step), go_wrong)
    assert weight.grad is None
    assert is_clean(model)


# --- backwards_per_step ---------------------------------------------------------------------------
@pytest.mark.parametrize("stage", some_quick([1, 3], [3]))
def test_backwards_per_step_reduces_every_nth_backward(mesh, stage):
    model, step, weight = linear(mesh, backwards_per_step=3, zero_stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        for _ in range(2):
            step(X).sum().backward()
            assert weight.grad is None
        step(X).sum().backward()
        assert value(weight) == 6
        assert is_clean(model)
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_before_the_nth_backward_reduces_the_gradients_so_far(mesh):
    model, step, weight = linear(mesh, backwards_per_step=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step(X).sum().backward()
    optimizer.step()
    assert torch.equal(weight.full_tensor(), torch.full((3, 4), -2.0))
    optimizer.zero_grad()
    for expected in (None, None, 6):
        step(X).sum().backward()
        assert value(weight) == expected


def test_gradients_that_the_nth_backward_does_not_produce_are_reduced_after_it(mesh):
    model = zpasses.shard(TwoTowers(2), mesh=mesh)
    step = torch.compile(
        model, backend="zpasses", options={"codegen": "eager", "backwards_per_step": 2}
    )
    step(X, (0, 1)).backward()
    step(X, (0,)).backward()
    assert [value(tower._parameters["weight"]) for tower in model.towers] == [4, 2]


def test_an_explicit_window_replaces_backwards_per_step_but_uses_its_dtype(mesh):
    model, step, weight = linear(mesh, backwards_per_step=2, grad_accum_dtype=torch.float64)
    with zpasses.coalesce_grad_reduction(model):
        for _ in range(3):
            step(X).sum().backward()
        assert [part.total.dtype for part in grad_state_of(weight).pending.values()] == [
            torch.float64
        ]
    assert value(weight) == 6
    step(X).sum().backward()
    with pytest.raises(ZpassesError, match="entered after 1 of backwards_per_step=2"):
        zpasses.coalesce_grad_reduction(model).__enter__()


def test_parts_of_a_model_must_not_disagree_about_backwards_per_step(mesh):
    model, step, _ = linear(mesh, backwards_per_step=2)
    other = torch.compile(
        model, backend="zpasses", options={"codegen": "eager", "backwards_per_step": 4}
    )
    step(X).sum().backward()
    with pytest.raises(OptionError, match="accumulated 1 of 2 backwards"):
        other(X)
    step(X).sum().backward()
    other(X)


def test_a_copied_model_counts_for_itself(mesh):
    model, step, weight = linear(mesh, backwards_per_step=2)
    step(X).sum().backward()
    twin = copy.deepcopy(model)
    again = torch.compile(
        twin, backend="zpasses", options={"codegen": "eager", "backwards_per_step": 2}
    )
    again(X).sum().backward()
    assert weight.grad is None
    again(X).sum().backward()
    assert value(twin._parameters["weight"]) == 4
    assert weight.grad is None


# --- memory ---------------------------------------------------------------------------------------
def tensors():
    gc.collect()
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def test_many_steps_do_not_leak_tensors(mesh):
    model, step, _ = linear(mesh)

    def train(backwards):
        with zpasses.coalesce_grad_reduction(model, backwards=backwards):
            for _ in range(3):
                step(X).sum().backward()
        model.zero_grad()

    for _ in range(3):
        train(None)
        train(3)
    before = tensors()
    for _ in range(20):
        train(None)
        train(3)
    assert tensors() <= before


def pending_gradients_are_updated_in_place(model, step, weight):
    with zpasses.coalesce_grad_reduction(model):
        step(X).sum().backward()
        (part,) = grad_state_of(weight).pending.values()
        address = part.total.data_ptr()
        step(X).sum().backward()
        assert part.total.data_ptr() == address
        assert torch.equal(part.total, torch.full((3, 4), 4.0))


def test_a_cached_parameter_is_not_gathered_again_in_a_window(mesh):
    model, step, weight = linear(mesh, zero_stage=2)
    with zpasses.coalesce_grad_reduction(model):
        step(X).sum().backward()
        cached = weight._zpasses_value.full
        assert cached is not None
        step(X).sum().backward()
        assert weight._zpasses_value.full is cached
    assert weight._zpasses_value.full is None, "an optimizer step is expected"


# --- one model for many checks --------------------------------------------------------------------
def test_what_counts_as_a_backward(mesh):
    model, step, weight = linear(mesh)
    for check in (
        gradients_are_added_to_what_was_there,
        a_window_without_a_backward_changes_nothing,
        leaving_before_the_nth_backward_reduces_the_gradients_so_far,
        forwards_may_all_come_first,
        one_backward_through_two_forwards_is_one,
        a_backward_inside_a_forward_counts,
        a_backward_in_a_hook_of_another_backward_counts_by_itself,
        a_reentrant_checkpoint_is_part_of_its_backward,
        autograd_grad_returns_reduced_gradients_and_keeps_pending_ones,
        a_backward_for_some_inputs_does_not_change_the_others,
        one_graph_may_run_backward_twice,
        a_backward_in_another_thread_counts,
        a_new_shape_in_mid_window_keeps_pending_gradients,
        eager_and_compiled_parts_share_pending_gradients,
        a_window_can_be_entered_again_once_it_was_left,
        zero_grad_inside_does_not_clear_pending_gradients,
        pending_gradients_are_updated_in_place,
    ):
        check(model, step, weight)
        assert is_clean(model), check.__name__
        model.zero_grad()


def test_refusals_and_failures_drop_pending_gradients(mesh):
    model, step, weight = linear(mesh)
    for check in (
        windows_do_not_nest,
        an_optimizer_step_inside_is_refused,
        a_backward_after_the_last_is_refused,
        the_last_backward_is_announced_in_only_one_way,
        an_exception_drops_pending_gradients,
        a_backward_that_raises_half_way_and_is_not_caught,
        a_backward_that_fails_in_compiled_code_fails_the_window_even_if_it_is_caught,
    ):
        check(model, step, weight)
        assert is_clean(model), check.__name__
        model.zero_grad()
