"""Gradient windows on one rank: what counts as a backward, what raises, and the state
afterwards. test_window_sequences.py draws programs of ordinary windows.
"""

import copy
import gc
import threading
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zpasses
from tests.cases import some_quick
from zpasses import OptionError, ZpassesError
from zpasses.pipeline.events import observe_graphs
from zpasses.runtime.windows import grad_state_of

X = torch.ones(2, 4)


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


def test_hooks_of_parameters_see_none_and_once_the_whole_gradient(one_rank):
    for backwards in (None, 2):
        _, step, weight = linear(one_rank)
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


class TwoTowers(nn.Module):
    def __init__(self, count=5):
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(count))

    def forward(self, x, which):
        return sum(self.towers[i](x).sum() for i in which)


def test_more_patterns_of_pending_gradients_than_variants(one_rank):
    """Fourteen patterns of pending gradients before a backward through all five towers. Patterns
    beyond the cap use zeros.
    """
    model = zpasses.shard(TwoTowers(), mesh=one_rank)
    step = torch.compile(model, backend="zpasses", options={"codegen": "eager"})
    runs = [[i for i in range(4) if number >> i & 1] for number in range(1, 15)]
    made = []
    for which in runs:
        model.zero_grad()
        with zpasses.coalesce_grad_reduction(model, backwards=2):
            model(X, which).backward()
            with mock.patch.object(torch, "zeros", wraps=torch.zeros) as zeros:
                step(X, range(5)).backward()
        made += [each.kwargs["device"] for each in zeros.mock_calls]
        assert [value(tower._parameters["weight"]) for tower in model.towers] == [
            4.0 if i in which else 2.0 for i in range(5)
        ]
    assert set(made) == {"cpu"}  # None, that of the mesh elsewhere, would be the CPU, too


# --- dtypes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("compiled", [False, True])
def test_grad_accum_dtype_adds_up_what_bf16_would_lose(one_rank, compiled):
    """256 + 1 + 1 is 256 in bfloat16, and 258 in float32."""
    model = nn.Linear(1, 1, bias=False)
    zpasses.shard(model, mesh=one_rank, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
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
def windows_of_two_threads_do_not_nest(model, step, weight):
    with zpasses.coalesce_grad_reduction(model):
        step(X).sum().backward()
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


def test_two_models_may_have_a_window_each(one_rank):
    (one, first, a), (_, second, b) = linear(one_rank), linear(one_rank)
    with zpasses.coalesce_grad_reduction(one, backwards=2), zpasses.coalesce_grad_reduction(second):
        for _ in range(2):
            (first(X) + second(X)).sum().backward()
        assert (value(a), value(b)) == (4, None)
    assert (value(a), value(b)) == (4, 4)


def test_an_unsharded_model_is_refused(one_rank):
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
def test_bad_arguments_are_refused(one_rank, given):
    model, _, _ = linear(one_rank)
    with pytest.raises(OptionError, match=next(iter(given))):
        zpasses.coalesce_grad_reduction(model, **given)


def test_a_pipeline_that_cannot_defer_reduces_in_every_backward_and_warns(one_rank, caplog):
    _, step, weight = linear(one_rank, pipeline="gather-params,reduce-grads")
    with zpasses.coalesce_grad_reduction(step):
        step(X).sum().backward()
        assert value(weight) == 2
        step(X).sum().backward()
    assert value(weight) == 4
    assert "defer-reduction" in caplog.text


# --- failures -------------------------------------------------------------------------------------


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


def a_backward_that_fails_outside_of_compiled_code_fails_the_window_even_if_it_is_caught(
    model, step, weight
):

    def go_wrong(window):
        x = X.clone().requires_grad_()
        x.register_hook(fail)
        with pytest.raises(ValueError, match="half-way"):
            step(x).sum().backward()

    for after in ((), (backward(step),)):
        with pytest.raises(ZpassesError, match="a backward ended with an exception; pending"):
            inside(model, backward(step), go_wrong, *after)
        assert weight.grad is None
        assert is_clean(model)
    inside(model, backward(step))
    assert value(weight) == 2.0


# --- backwards_per_step ---------------------------------------------------------------------------
@pytest.mark.parametrize("stage", some_quick([1, 3], [3]))
def test_backwards_per_step_reduces_every_nth_backward(one_rank, stage):
    model, step, weight = linear(one_rank, backwards_per_step=3, zero_stage=stage)
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


def test_a_step_before_the_nth_backward_reduces_the_gradients_so_far(one_rank):
    model, step, weight = linear(one_rank, backwards_per_step=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step(X).sum().backward()
    optimizer.step()
    assert torch.equal(weight.full_tensor(), torch.full((3, 4), -2.0))
    optimizer.zero_grad()
    for expected in (None, None, 6):
        step(X).sum().backward()
        assert value(weight) == expected


def test_a_step_after_a_backward_that_failed_raises_and_begins_a_new_window(one_rank):
    model, step, weight = linear(one_rank, backwards_per_step=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = X.clone().requires_grad_()
    x.register_hook(fail)
    with pytest.raises(ValueError, match="half-way"):
        step(x).sum().backward()
    with pytest.raises(ZpassesError, match="a backward ended with an exception"):
        optimizer.step()
    for _ in range(2):
        assert weight.grad is None
        step(X).sum().backward()
    assert value(weight) == 4.0


def test_gradients_that_the_nth_backward_does_not_produce_are_reduced_after_it(one_rank):
    model = zpasses.shard(TwoTowers(2), mesh=one_rank)
    step = torch.compile(
        model, backend="zpasses", options={"codegen": "eager", "backwards_per_step": 2}
    )
    step(X, (0, 1)).backward()
    step(X, (0,)).backward()
    assert [value(tower._parameters["weight"]) for tower in model.towers] == [4, 2]


@pytest.mark.parametrize("names", [("weight",), ("weight", "bias")])
def test_a_parameter_that_is_frozen_in_a_window_keeps_its_gradients(one_rank, names):
    model, step, weight = linear(one_rank)
    params = dict(model.named_parameters())
    with zpasses.coalesce_grad_reduction(step):
        step(X).sum().backward()
        for name in names:
            params[name].requires_grad_(False)
        if len(names) == 1:
            step(X).sum().backward()
    assert value(weight) == 2
    assert not weight.requires_grad
    assert torch.equal(params["bias"].grad.full_tensor(), torch.full((3,), 6.0 - 2 * len(names)))


def test_an_explicit_window_replaces_backwards_per_step_but_uses_its_dtype(one_rank):
    model, step, weight = linear(one_rank, backwards_per_step=2, grad_accum_dtype=torch.float64)
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


def test_parts_of_a_model_must_not_disagree_about_backwards_per_step(one_rank):
    model, step, _ = linear(one_rank, backwards_per_step=2)
    other = torch.compile(
        model, backend="zpasses", options={"codegen": "eager", "backwards_per_step": 4}
    )
    step(X).sum().backward()
    with pytest.raises(OptionError, match="accumulated 1 of 2 backwards"):
        other(X)
    step(X).sum().backward()
    other(X)


def test_a_copied_model_counts_for_itself(one_rank):
    model, step, weight = linear(one_rank, backwards_per_step=2)
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


def test_many_steps_do_not_leak_tensors(one_rank):
    model, step, _ = linear(one_rank)

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


def test_a_cached_parameter_is_not_gathered_again_in_a_window(one_rank):
    model, step, weight = linear(one_rank, zero_stage=2)
    with zpasses.coalesce_grad_reduction(model):
        step(X).sum().backward()
        cached = weight._zpasses_value.full
        assert cached is not None
        step(X).sum().backward()
        assert weight._zpasses_value.full is cached
    assert weight._zpasses_value.full is None, "an optimizer step is expected"


# --- one model for many checks --------------------------------------------------------------------
COUNTED = (
    one_backward_through_two_forwards_is_one,
    a_backward_inside_a_forward_counts,
    a_backward_in_a_hook_of_another_backward_counts_by_itself,
    a_reentrant_checkpoint_is_part_of_its_backward,
    a_backward_for_some_inputs_does_not_change_the_others,
    one_graph_may_run_backward_twice,
    a_backward_in_another_thread_counts,
    a_new_shape_in_mid_window_keeps_pending_gradients,
    a_window_can_be_entered_again_once_it_was_left,
    pending_gradients_are_updated_in_place,
)
FAILED = (
    windows_of_two_threads_do_not_nest,
    a_backward_that_raises_half_way_and_is_not_caught,
    a_backward_that_fails_in_compiled_code_fails_the_window_even_if_it_is_caught,
    a_backward_that_fails_outside_of_compiled_code_fails_the_window_even_if_it_is_caught,
)


@pytest.mark.parametrize("checks", [COUNTED, FAILED], ids=["counted", "failed"])
def test_what_counts_as_a_backward_and_failures_drop_pending_gradients(one_rank, checks):
    model, step, weight = linear(one_rank)
    for check in checks:
        check(model, step, weight)
        assert is_clean(model), check.__name__
        model.zero_grad()
