"""Parameters of compiled blocks, and of whole graphs, that step in backward."""

import contextlib
import copy
import gc
import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import zpasses
from tests.cases import some_quick
from tests.on_ranks import on_ranks
from tests.zpasses.backend.cache.starts import on_fresh_ranks, said_by_cache, words
from tests.zpasses.layered_models import (
    VOCAB,
    Attention,
    Checkpointed,
    Dropout,
    Frozen,
    Net,
    Repeated,
    Shared,
)
from zpasses.errors import ZpassesError
from zpasses.runtime import graph_steps
from zpasses.runtime.early_steps import SteppedGrad
from zpasses.runtime.watched import watch
from zpasses.testing import fake_world, world_mesh

EAGER = {"codegen": "eager"}
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "foreach": True}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
}


def build(kind, options, *, early, optimizer="AdamW", whole=False):
    """Returns a model compiled by blocks or as a whole, and its optimizer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind()
    zpasses.shard(model, mesh=world_mesh())
    if whole:
        model.compile(backend="zpasses", options=options)
    else:
        zpasses.compile_blocks(model, "layers.*", **options)
    cls, given = OPTIMIZERS[optimizer]
    half = len(list(model.parameters())) // 2
    params = list(model.parameters())
    groups = [{"params": params[:half]}, {"params": params[half:], "lr": 0.02}]
    made = cls(groups, **given)
    return model, zpasses.step_in_backward(made) if early else made


def batch(draw):
    return torch.randint(VOCAB, (2, VOCAB // 2), generator=draw)


def train(kind, options, *, early, steps=3, window=1, **how):
    """Returns losses, full parameters and states, and how many gradients were freed in backward."""
    model, optimizer = build(kind, options, early=early, **how)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses, freed = [], 0
    for number in range(steps):
        torch.manual_seed(number)
        with zpasses.coalesce_grad_reduction(model, backwards=window):
            for _ in range(window):
                loss = model(batch(draw))
                loss.backward()
                losses.append(loss.item())
        freed += sum(type(param.grad) is SteppedGrad for param in model.parameters())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(batch(draw)).item())
    tensors = [param.full_tensor().detach() for param in model.parameters()]
    for param in model.parameters():
        entries = optimizer.state.get(param, {})
        tensors += [
            each.full_tensor() if hasattr(each, "full_tensor") else torch.as_tensor(each)
            for each in entries.values()
        ]
    return losses, tensors, freed


def compare(kind, options, **how):
    expected, found = (train(kind, options, early=early, **how) for early in (False, True))
    assert expected[0] == found[0]
    for one, other in zip(expected[1], found[1], strict=True):
        assert torch.equal(one, other)
    assert expected[2] == 0
    return found[2]


CASES = {
    "defaults of stage 3": (Net, {}),
    "stage 2": (partial(Net, Attention), {"zero_stage": 2}),
    "two graphs ahead": (Net, {"prefetch": 2}),
    "a block checkpointed": (Checkpointed, {}),
    "frozen": (Frozen, {}),
    "dropout": (partial(Net, Dropout), {}),
    "error feedback": (
        Net,
        {
            "pipeline": "zero3{reduce-grads.encode=int8,reduce-grads.exact_below_kib=0,"
            "reduce-grads.feedback=on}"
        },
    ),
}


@pytest.mark.parametrize("case", some_quick(CASES, ["defaults of stage 3", "error feedback"]))
@on_ranks(2)
def test_steps_in_backward_have_the_same_bits(case):
    kind, options = CASES[case]
    assert compare(kind, {**EAGER, **options}) > 0


WHOLE_CASES = {
    "stage 1": (Net, {"zero_stage": 1}),
    "stage 2": (partial(Net, Attention), {"zero_stage": 2}),
    "defaults of stage 3": (Net, {}),
    "gathered again": (Net, {"memory_budget": "0%"}),
    "a block checkpointed": (Checkpointed, {}),
    "frozen": (Frozen, {}),
    "encoded": (
        Net,
        {
            "pipeline": "zero3{gather-params.encode=int8,reduce-grads.encode=int8,"
            "gather-params.exact_below_kib=0,reduce-grads.exact_below_kib=0}"
        },
    ),
}


@pytest.mark.parametrize("case", some_quick(WHOLE_CASES, ["stage 2", "gathered again"]))
@on_ranks(2)
def test_parameters_of_one_graph_step_in_it(case):
    kind, options = WHOLE_CASES[case]
    freed = compare(kind, {**EAGER, **options}, whole=True)
    trained = sum(param.requires_grad for param in kind().parameters())
    assert freed == 3 * trained, "each parameter, in each step"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.slow(quick="test_steps_in_backward_have_the_same_bits")
@on_ranks(2)
def test_optimizers_that_step_by_element_have_the_same_states(optimizer):
    assert compare(Net, EAGER, optimizer=optimizer, steps=3) > 0


class Twice(Net):
    """Calls a block twice, so its gradient comes in two parts."""

    def forward(self, tokens, *args):
        return super().forward(tokens, *args) + 0.5 * super().forward(tokens, *args)


class Regularized(Net):
    """Reads parameters of its graph once more, in code that is not compiled."""

    @torch.compiler.disable
    def penalty(self):
        return sum(layer.up.weight.square().mean() for layer in self.layers)

    def forward(self, tokens, *args):
        return super().forward(tokens, *args) + self.penalty()


@pytest.mark.parametrize("kind", some_quick([Repeated, Shared, Twice], [Twice]))
@on_ranks(2)
def test_gradients_in_several_parts_are_complete_before_a_step(kind):
    compare(kind, EAGER)


@pytest.mark.parametrize("kind", some_quick([Shared, Twice, Regularized], [Regularized]))
@on_ranks(2)
def test_gradients_of_several_graphs_are_complete_before_a_step(kind):
    freed = compare(kind, EAGER, whole=True)
    count = len(list(kind().parameters()))
    assert freed == 3 * (count - len(kind().layers) if kind is Regularized else count)


@pytest.mark.parametrize("whole", [False, True])
@on_ranks(2)
def test_windows_step_in_their_last_backward(whole):
    assert compare(Net, EAGER, steps=3, window=2, whole=whole) > 0


@pytest.mark.inductor
@pytest.mark.slow(quick="test_steps_in_backward_have_the_same_bits")
@on_ranks(2)
def test_defaults_have_the_same_bits():
    assert compare(Net, {}) > 0


@pytest.mark.inductor
@pytest.mark.parametrize("stage", some_quick([1, 2, 3], [3]))
@on_ranks(2)
def test_defaults_have_the_same_bits_with_one_graph(stage):
    assert compare(partial(Net, Attention), {"zero_stage": stage}, whole=True) > 0


def _start(folder):
    """A program that begins with a compile cache; returns what it does, and what the cache did."""
    said = said_by_cache(folder)
    losses, tensors, freed = train(Net, {}, early=True, whole=True)
    return losses, [each.tolist() for each in tensors], freed, words(said)


@pytest.mark.inductor
@pytest.mark.slow(quick="test_defaults_have_the_same_bits_with_one_graph")
def test_a_warm_start_steps_in_backward(tmp_path):
    (cold, *_), (warm, *_) = (on_fresh_ranks(_start, tmp_path) for _ in range(2))
    assert cold[-1] != warm[-1] == ["hit"] * len(warm[-1])
    assert warm[2] > 0
    assert cold[:-1] == warm[:-1]


@contextlib.contextmanager
def _warnings():
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("zpasses").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("zpasses").removeHandler(handler)


# --- what cannot work -----------------------------------------------------------------------------
def after_backward(whole=False):
    model, optimizer = build(Net, EAGER, early=True, whole=whole)
    tokens = torch.arange(VOCAB).view(2, -1)
    for _ in range(2):  # blocks know their followers from the second step on
        optimizer.step()
        optimizer.zero_grad()
        model(tokens).backward()
    stepped = [param for param in model.parameters() if type(param.grad) is SteppedGrad]
    assert stepped
    return model, optimizer, tokens, stepped


@pytest.mark.parametrize(("watched", "whole"), [(False, False), (True, False), (False, True)])
@on_ranks(2)
def test_what_comes_too_late_is_an_error(watched, whole):
    """Also beside gradients of a class that has its own way with operators."""
    model, optimizer, tokens, stepped = after_backward(whole)
    others = [param for param in model.parameters() if type(param.grad) is not SteppedGrad]
    for param in others if watched else ():
        param.grad = watch(param.grad + 0, None)
    assert whole or others
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for late in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: zpasses.clip_grad_norm_(model.parameters(), 1.0),
        lambda: stepped[0].grad.mul_(2),
        lambda: stepped[0].grad.to_local() + 1,
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: scaler.unscale_(optimizer),
    ):
        with pytest.raises(ZpassesError, match="has stepped in backward"):
            late()
    with pytest.raises(ZpassesError, match=r"reads it again for a backward before optimizer.step"):
        model(tokens)
    optimizer.param_groups[0]["lr"] *= 2
    with pytest.raises(ZpassesError, match="its settings have changed since the backward"):
        optimizer.step()


@on_ranks(2)
def test_a_step_cannot_be_skipped():
    """A program that drops the gradients, as after a loss that is not finite, has stepped."""
    model, optimizer, tokens, _ = after_backward()
    optimizer.zero_grad()
    with pytest.raises(ZpassesError, match="A step cannot be skipped"):
        model(tokens)
    with _warnings() as said:
        optimizer.step()
    assert "were dropped or replaced between backward and AdamW.step()" in said[-1]
    model(tokens).backward()


@pytest.mark.parametrize("whole", [False, True])
@on_ranks(2)
def test_gradients_of_a_step_cannot_be_used_again(whole):
    """As without zero_grad() between steps, where gradients would add up, or in a second step."""
    model, optimizer, tokens, _ = after_backward(whole)
    optimizer.step()
    copy.deepcopy(model)
    with pytest.raises(ZpassesError, match=r"no other gradient of them has come since.*zero_grad"):
        optimizer.step()
    loss = model(tokens)
    with pytest.raises(ZpassesError, match=r"they cannot add up to those of the next backward"):
        loss.backward()


@pytest.mark.parametrize("whole", [False, True])
@on_ranks(2)
def test_checkpoints_between_backward_and_step_are_refused(whole):
    model, optimizer, _, _ = after_backward(whole)
    for save in (
        zpasses.full_state_dict,
        zpasses.training_state,
        lambda model: zpasses.save_safetensors(model, "unused"),
    ):
        with pytest.raises(ZpassesError, match="a checkpoint would mix parameters before and"):
            save(model)
    optimizer.step()
    zpasses.full_state_dict(model)


@on_ranks(2)
def test_another_optimizer_takes_over_when_the_first_is_gone():
    model, optimizer, tokens, _ = after_backward()
    optimizer.step()
    del optimizer
    gc.collect()
    model.zero_grad()
    model(tokens).backward()
    assert not any(type(param.grad) is SteppedGrad for param in model.parameters())
    model.zero_grad()
    other = zpasses.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(tokens)
    zpasses.step_in_backward(other)  # again, which changes nothing
    loss.backward()
    assert any(type(param.grad) is SteppedGrad for param in model.parameters())


@pytest.mark.parametrize("whole", [False, True])
@on_ranks(2)
def test_a_second_backward_of_one_forward_is_an_error(whole):
    model, _ = build(Net, EAGER, early=True, whole=whole)
    loss = model(torch.arange(VOCAB).view(2, -1))
    loss.backward(retain_graph=True)
    assert any(type(param.grad) is SteppedGrad for param in model.parameters())
    with pytest.raises(
        ZpassesError,
        match=r"was edited between a forward and its backward|A step cannot be skipped",
    ):
        loss.backward()


@on_ranks(2)
def test_gradients_are_freed_before_the_backward_ends():
    """Of what one process holds, the gradients of few blocks."""
    model, optimizer = build(Net, EAGER, early=True)
    tokens = torch.arange(VOCAB).view(2, -1)
    alive = []
    first = model.layers[0]
    first.register_full_backward_pre_hook(
        lambda module, grad: alive.append(
            [type(param.grad) for layer in model.layers for param in layer.parameters()]
        )
    )
    for _ in range(3):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert alive[-1].count(SteppedGrad) >= len(list(model.layers[-1].parameters()))


def test_what_cannot_step_in_backward_is_refused():
    with fake_world(2) as mesh:
        plain = nn.Linear(4, 4)
        with pytest.raises(ZpassesError, match="no parameter of this SGD is sharded"):
            zpasses.step_in_backward(torch.optim.SGD(plain.parameters()))
        model = zpasses.shard(copy.deepcopy(plain), mesh=mesh)
        with pytest.raises(ZpassesError, match="got Adafactor; expected an optimizer of torch"):
            zpasses.step_in_backward(zpasses.optim.Adafactor(model.parameters()))
        first = zpasses.step_in_backward(torch.optim.SGD(model.parameters()))
        assert zpasses.step_in_backward(first) is first
        with pytest.raises(ZpassesError, match="another optimizer steps one of these"):
            zpasses.step_in_backward(torch.optim.AdamW(model.parameters()))
        with pytest.raises(ZpassesError, match="step_in_backward"):
            zpasses.offload_optimizer(first)
        offloaded = torch.optim.AdamW(zpasses.shard(nn.Linear(4, 4), mesh=mesh).parameters())
        zpasses.offload_optimizer(offloaded)
        with pytest.raises(ZpassesError, match="rest on the host"):
            zpasses.step_in_backward(offloaded)


@on_ranks(1)
def test_parameters_with_hooks_step_when_step_is_called():
    torch._dynamo.reset()
    model = zpasses.shard(nn.Linear(8, 8), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options=EAGER)
    optimizer = zpasses.step_in_backward(torch.optim.SGD(model.parameters(), lr=1.0))
    weight, seen = model.get_parameter("weight"), []
    hooks = [param.register_hook(seen.append) for param in model.parameters()]
    with _warnings() as said:
        for _ in range(2):
            before = weight.full_tensor().clone()
            step(torch.ones(2, 8)).sum().backward()
            assert type(weight.grad) is not SteppedGrad
            optimizer.step()
            assert not torch.equal(before, weight.full_tensor())
            optimizer.zero_grad()
    assert len([text for text in said if "no parameter of this SGD has stepped" in text]) == 1
    assert len(seen) == 4
    hooks[0].remove()
    step(torch.ones(2, 8)).sum().backward()
    stepped = [type(param.grad) is SteppedGrad for param in model.parameters()]
    assert sorted(stepped) == [False, True]


@pytest.mark.parametrize("codegen", some_quick(["eager", "inductor"], ["eager"]))
@on_ranks(2)
def test_one_graph_frees_gradients_when_they_have_been_used(codegen, monkeypatch):
    options = {"codegen": codegen, "pipeline": "zero3{schedule.plan=single}"}
    model, optimizer = build(Net, options, early=True, whole=True)
    step_early, seen, counts = graph_steps.run_early_steps, [], []

    def counted(params, grads):
        counts.append(sum(not each.expired() for each in seen))
        seen.extend(StorageWeakRef(grad.to_local().untyped_storage()) for grad in grads)
        step_early(params, grads)

    monkeypatch.setattr(graph_steps, "run_early_steps", counted)
    model(torch.arange(VOCAB).view(2, -1)).backward()
    assert len(counts) >= len(model.layers)
    assert sum(counts) == 0
    optimizer.step()
