"""The actions of the programs of the suite `programs`: plain torch code on one model.

The same code runs on the sharded model and on unsharded references, so a program is right if all
show the same values. The types of an action's arguments say what is drawn for it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NewType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import zpasses
from zpasses.runtime.offloaded import is_offloaded
from zpasses.tools.stress.drawn_models import WIDTH

Rows = tuple[int, int]
"""Rows of the batch of rank 0 and of rank 1."""
Through = Literal["compiled", "module"]
Edit = NewType("Edit", str)
"""A key of EDITS."""
DeviceBytes = NewType("DeviceBytes", str)
"""An argument of `zpasses.offload_optimizer`."""
Saved = Literal["copy_", "data.copy_", "data ="]


class InjectedError(Exception):
    """The exception that programs raise and catch."""


@dataclass
class Side:
    """A model in training: the sharded one, or an unsharded one on the data of one rank."""

    rank: int
    seed: int
    dtype: torch.dtype
    """The dtype of the data."""
    model: nn.Module
    compile: Callable[[nn.Module], Callable[[Tensor], Tensor]]
    """Makes what calls a model, compiled if the model is sharded."""
    build: Callable[[nn.Module], torch.optim.Optimizer]
    """Makes the optimizer of a model."""
    sharded: bool = False
    rows_factor: int = 1
    """How many times the rows that an action names a batch has."""
    autocast: bool = False
    """Whether the model is called within `torch.autocast` to bfloat16."""
    batches: int = 0
    shown: list[Tensor] = field(default_factory=list)
    """What the current action returned, to compare."""
    averaged: list[Tensor] = field(default_factory=list)
    """As `shown`, for values that the sharded model averages over the ranks."""
    saved: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.call, self.optimizer = self.compile(self.model), self.build(self.model)
        self.saved["state"] = _clones(self.model.state_dict())

    @property
    def params(self) -> list[Any]:
        return list(self.model.parameters())

    @property
    def trained(self) -> list[Any]:
        return [param for param in self.params if param.requires_grad]

    def draw(self, *shape: int) -> Tensor:
        """Random numbers, which are the same on every side and rank if the shape is."""
        self.batches += 1
        seed = self.seed * 1000 + self.batches
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=self.dtype)

    def batch(self, rows: Rows) -> Tensor:
        """The next batch of this side's rank."""
        first, both = rows[0] * self.rows_factor, sum(rows) * self.rows_factor
        drawn = self.draw(both, WIDTH)
        return drawn[:first] if self.rank == 0 else drawn[first:]

    def run(self, x: Tensor, through: Through = "compiled") -> Tensor:
        return self.result(self.model if self.sharded and through == "module" else self.call, x)

    def result(self, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return call(x)

    def loss(self, x: Tensor, through: Through = "compiled") -> Tensor:
        return self.run(x, through).square().mean()

    def show(self, *values: Tensor | None) -> None:
        self.shown += [_full(each) for each in values if each is not None]

    def use(self, model: nn.Module) -> None:
        """Train another model from now on."""
        self.model = model
        self.call, self.optimizer = self.compile(model), self.build(model)

    def window(self, kind: str, backwards: int) -> AbstractContextManager[Any]:
        if not self.sharded or kind == "none":
            return contextlib.nullcontext()
        count = backwards if kind == "count" else None
        return zpasses.coalesce_grad_reduction(self.model, count)

    def full_state(self) -> dict[str, Tensor]:
        """A state dict of drawn full tensors."""
        return {
            name: self.draw(*value.shape).abs_().to(value.dtype)
            for name, value in self.model.state_dict().items()
        }

    def load_assigned(self, state: dict[str, Tensor]) -> None:
        """Load a state dict in place of the parameters, which the optimizer does not know then."""
        self.model.load_state_dict(state, assign=True)
        self.optimizer = self.build(self.model)


def _full(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def _clones(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in state.items()}


# --- training -------------------------------------------------------------------------------------
def backward(
    side: Side,
    rows: Rows,
    micro: Literal[1, 2, 3],
    window: Literal["none", "exit", "count", "last"],
    form: Literal["plain", "two forwards", "input gradient"],
    through: Through,
) -> None:
    """One or several micro-batches."""
    with side.window(window, micro) as opened:
        for at in range(micro):
            x = side.batch(rows).requires_grad_(form == "input gradient")
            loss = side.loss(x, through)
            if form == "two forwards":
                loss = loss + side.loss(side.batch(rows), through)
            if opened is not None and window == "last" and at == micro - 1:
                opened.last()
            loss.backward()
            side.show(loss, x.grad)


def clip(side: Side, kind: Literal["norm", "inf", "value", "zpasses"], bound: float) -> None:
    if kind == "value":
        nn.utils.clip_grad_value_(side.params, bound / 10)
    elif kind == "zpasses" and side.sharded:
        side.show(zpasses.clip_grad_norm_(side.params, bound))
    else:
        order = float("inf") if kind == "inf" else 2.0
        side.show(nn.utils.clip_grad_norm_(side.params, bound, order))


def step(side: Side, rate: float) -> None:
    for group in side.optimizer.param_groups:
        group["lr"] = group["lr"] * rate
    side.optimizer.step()


def zero_grad(side: Side, set_to_none: bool) -> None:
    side.optimizer.zero_grad(set_to_none)


def autograd_grad(side: Side, rows: Rows) -> None:
    """Gradients that are returned, and leave `param.grad` alone."""
    found = torch.autograd.grad(side.loss(side.batch(rows)), side.trained, allow_unused=True)
    side.averaged += [_full(each) for each in found if each is not None]


def scale_grads(side: Side, way: Literal["mul_", "=", "foreach", "drop"], factor: float) -> None:
    grads = [param for param in side.params if param.grad is not None]
    if way == "foreach" and grads:
        torch._foreach_mul_([param.grad for param in grads], factor)
    for param in grads if way != "foreach" else ():
        if way == "mul_":
            param.grad.mul_(factor)
        else:
            param.grad = param.grad * factor if way == "=" else None


def new_optimizer(side: Side, loads: bool) -> None:
    """The same kind of optimizer, maybe with the state of the old one."""
    state = copy.deepcopy(side.optimizer.state_dict())
    side.optimizer = side.build(side.model)
    if loads:
        side.optimizer.load_state_dict(state)


def offload_again(side: Side, device_bytes: DeviceBytes) -> None:
    """Decide again which states of an offloaded optimizer stay on the device."""
    if is_offloaded(side.optimizer):
        zpasses.offload_optimizer(side.optimizer, device_bytes=device_bytes)


# --- other uses of a model ------------------------------------------------------------------------
def evaluate(
    side: Side,
    rows: Rows,
    grad: Literal["enable_grad", "no_grad", "inference_mode"],
    training: bool,
    through: Through,
) -> None:
    side.model.train(training)
    with getattr(torch, grad)():
        side.show(side.run(side.batch(rows), through))
    side.model.train()


def full_state_dict(side: Side) -> None:
    """Shows no buffers, which are those of the first rank."""
    state = zpasses.full_state_dict(side.model) if side.sharded else side.model.state_dict()
    side.show(*(state[name] for name, _ in side.model.named_parameters()))


def freeze(side: Side, part: Literal["first layer", "biases", "every other"], frozen: bool) -> None:
    """The head stays trained."""
    for at, (name, param) in enumerate(side.model.named_parameters()):
        chosen = {"first layer": "layers.0." in name, "biases": "bias" in name}
        if chosen.get(part, at % 2 == 0) and "head" not in name and "embed" not in name:
            param.requires_grad_(not frozen)


def hook(side: Side, kind: Literal["tensor", "post accumulate"], factor: float) -> None:
    """A hook on the first trained parameter, in place of an earlier one."""
    if "hook" in side.saved:
        side.saved.pop("hook").remove()
    param = side.trained[0]

    def scale(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad * factor

    def scale_later(param: Tensor) -> None:
        if param.grad is not None:
            param.grad.mul_(factor)

    if kind == "tensor":
        side.saved["hook"] = param.register_hook(scale)
    else:
        side.saved["hook"] = param.register_post_accumulate_grad_hook(scale_later)


def fail(
    side: Side, rows: Rows, where: Literal["forward", "output", "input", "parameter", "window"]
) -> None:
    """An exception that the program catches, before it drops the gradients."""

    def throw(*_: object) -> None:
        raise InjectedError

    x = side.batch(rows).requires_grad_(where == "input")
    layer = side.model.get_submodule("layers.0")
    with contextlib.ExitStack() as hooks, contextlib.suppress(InjectedError):
        if where == "forward":
            hooks.callback(layer.register_forward_hook(torch.compiler.disable(throw)).remove)
        if where == "parameter":
            handle = side.trained[-1].register_hook(throw)
            hooks.callback(handle.remove)
        if where == "input":
            x.register_hook(throw)
        with side.window("exit" if where == "window" else "none", 1):
            y = side.run(x)
            if where == "output":
                y.register_hook(throw)
            y.square().mean().backward()
            if where == "window":
                throw()
    side.optimizer.zero_grad()


# --- copies and averages --------------------------------------------------------------------------
def train_copy(side: Side, keeps: bool) -> None:
    """Train a copy from now on, and the original again at the next such action."""
    if "original" in side.saved:
        side.use(side.saved.pop("original"))
        return
    if keeps:
        side.saved["original"] = side.model
    side.use(copy.deepcopy(side.model))


def average_model(side: Side, rows: Rows, grad: bool, compiled: bool) -> None:
    """Update an `AveragedModel`, and evaluate it."""
    average = side.saved.setdefault("average", None) or AveragedModel(side.model)
    side.saved["average"] = average
    average.update_parameters(side.model)
    average.eval()
    call = average if side.sharded and not compiled else side.compile(average)
    with torch.set_grad_enabled(grad):
        side.show(side.result(call, side.batch(rows)))


def moving_average(side: Side, rows: Rows, way: Saved, grad: bool) -> None:
    """Store the parameters, evaluate a moving average in their place, and restore them."""
    with torch.no_grad():
        shadow = side.saved.setdefault("shadow", [p.detach().clone() for p in side.params])
        for average, param in zip(shadow, side.params, strict=True):
            average.lerp_(param.detach(), 0.5)
        kept = [param.detach().clone() for param in side.params]
    for values in (shadow, kept):
        with torch.no_grad():
            for param, value in zip(side.params, values, strict=True):
                _assign(param, value, way)
        with torch.set_grad_enabled(grad):
            side.show(side.run(side.batch(rows)))


def _assign(param: nn.Parameter, value: Tensor, way: Saved) -> None:
    if way == "copy_":
        param.copy_(value)
    elif way == "data.copy_":
        param.data.copy_(value)
    else:
        param.data = value.clone()


# --- edits ----------------------------------------------------------------------------------------
def edit(side: Side, way: Edit, factor: float) -> None:
    """Change all parameters."""
    with torch.no_grad():
        EDITS[way](side, factor)


def edit_before_backward(side: Side, rows: Rows, way: Edit, factor: float) -> None:
    """Plain torch raises, if backward reads what was edited."""
    loss = side.loss(side.batch(rows))
    edit(side, way, factor)
    loss.backward()
    side.show(loss)


def save_state(side: Side) -> None:
    side.saved["state"] = _clones(side.model.state_dict())


def _each(change: Callable[[nn.Parameter, float], object]) -> Callable[[Side, float], None]:
    def edit(side: Side, factor: float) -> None:
        for param in side.params:
            change(param, factor)

    return edit


def _on_gradients(change: Callable[[nn.Parameter, Tensor, float], object]) -> Any:
    return _each(lambda p, f: None if p.grad is None else change(p, p.grad, f))


def _set_data(param: nn.Parameter, factor: float) -> None:
    value = param.data * factor
    param.data = value
    value.mul_(factor)  # which is the parameter's memory from now on


def _in_local_shards(side: Side, factor: float) -> None:
    inside = zpasses.local_shards(side.model) if side.sharded else contextlib.nullcontext()
    with inside:
        for param in side.model.parameters():
            param.mul_(factor)


def _apply(side: Side, factor: float) -> None:
    def change(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.mul_(factor)

    side.model.apply(change)


def _copy_full(side: Side, factor: float) -> None:
    for param in side.params:
        param.copy_(side.draw(*param.shape).mul_(factor))
        param.data.lerp_(side.draw(*param.shape).to(param.dtype), factor / 2)
        param.add_(torch.ones(param.shape[-1:], dtype=param.dtype))


def _use_vector(side: Side, factor: float) -> None:
    vector = nn.utils.parameters_to_vector(side.params)
    nn.utils.vector_to_parameters(vector * factor, side.params)
    for param in side.params:
        param.data.view(-1).mul_(factor)


def _edit_rows(param: nn.Parameter, factor: float) -> None:
    if param.dim():
        param.data[:1].mul_(factor)
        param[0].add_(factor)
        param.data[-1] = factor


def _edit_views(param: nn.Parameter, factor: float) -> None:
    """Views across the dimension that is cut, which are copies."""
    if param.dim():
        for part in param.data.chunk(2):
            part[0].mul_(factor)
    if param.dim() == 2:
        param.data.t().mul_(factor)
        param.data.t()[0].zero_()


def _draw_numbers(param: nn.Parameter, factor: float) -> None:
    torch.manual_seed(param.numel())
    nn.init.normal_(param)
    param.add_(torch.randn_like(param), alpha=factor)


def _swap_and_restore(side: Side, factor: float) -> None:
    kept = [param.data for param in side.params]
    for param in side.params:
        param.data = param.data * 3
    side.show(side.run(side.batch((2, 2))))
    for param, value in zip(side.params, kept, strict=True):
        param.data = value
        value.mul_(factor)


def _rows_of_rank(param: Tensor) -> Tensor:
    return (param.to_local() if isinstance(param, DTensor) else param).data


def _lerp(side: Side, factor: float) -> None:
    others = [param.detach().neg() for param in side.params]
    torch._foreach_lerp_(side.params, others, factor / 2)
    full = [side.draw(*param.shape).to(param.dtype) for param in side.params]
    torch._foreach_add_(side.params, full)
    torch._foreach_copy_([p.data for p in side.params], [p * factor for p in side.params])


EDITS: Mapping[str, Callable[[Side, float], object]] = {
    "mul_": _each(lambda p, f: p.mul_(f)),
    "detached mul_": _each(lambda p, f: p.detach().mul_(f)),
    "sub_ gradient": _on_gradients(lambda p, g, f: p.sub_(f * g)),
    "add_ gradient": _on_gradients(lambda p, g, f: p.add_(g, alpha=-f)),
    "init.constant_": _each(lambda p, f: nn.init.constant_(p, f / 8)),
    "local_shards": _in_local_shards,
    "apply": _apply,
    "load full": lambda side, _: side.model.load_state_dict(side.full_state()),
    "load own": lambda side, _: side.model.load_state_dict(side.saved["state"]),
    "copy_ full": _copy_full,
    "vector_to_parameters": _use_vector,
    "foreach_mul": lambda side, f: torch._foreach_mul_(side.params, f),
    "foreach_lerp": _lerp,
    "data.mul_": _each(lambda p, f: p.data.mul_(f)),
    "data =": _each(_set_data),
    "data.copy_": _each(lambda p, f: p.data.copy_(p.detach() * f)),
    "view of data": _each(lambda p, f: p.data.view_as(p).mul_(f)),
    "rows": _each(_edit_rows),
    "views of copies": _each(_edit_views),
    "random numbers": _each(_draw_numbers),
    "swapped and restored": _swap_and_restore,
    "state dict": lambda side, f: [value.mul_(f) for value in side.model.state_dict().values()],
    "load full, assign": lambda side, _: side.load_assigned(side.full_state()),
    "load own, assign": lambda side, _: side.load_assigned(_clones(side.saved["state"])),
    "rows of the rank": _each(lambda p, f: _rows_of_rank(p).mul_(f)),
}
"""Ways to change all parameters by a factor. Each runs under `no_grad`."""


ACTIONS: Mapping[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        *(backward, clip, step, zero_grad, autograd_grad, scale_grads, new_optimizer, evaluate),
        *(full_state_dict, freeze, hook, fail, train_copy, average_model, moving_average, edit),
        *(edit_before_backward, save_state, offload_again),
    )
}
"""Name -> action."""
