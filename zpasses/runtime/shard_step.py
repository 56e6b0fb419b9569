"""Steps on the shards themselves, for optimizers that compute element by element.

DTensor's dispatch finds out for each operator how its results are placed. That takes ten times as
long as the operators themselves, and for a list of tensors, the first time, the square of its
length. The answer is known: everything is placed as the parameter. So the step sees plain tensors
that share memory with the shards, and what it makes becomes DTensors again. Kernels and bits are
the same. On accelerators, torch also chooses `foreach` by itself for plain tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zpasses import compat
from zpasses.runtime.inplace import is_sharded, plain_scalar
from zpasses.runtime.param_value import mark_edited
from zpasses.runtime.watched import watch_if_needed

_BY_ELEMENT = frozenset(
    (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    )
)
"""Subclasses may compute anything."""

_NUMBERS = frozenset(("step", "mu_product", "eta", "mu"))
"""Keys of the states of these optimizers that are no values of each element."""


def steps_by_element(optimizer: Optimizer) -> bool:
    """Whether each element of a parameter steps by itself."""
    return type(optimizer) in _BY_ELEMENT and not any(
        group.get("differentiable") for group in optimizer.param_groups
    )


@contextmanager
def on_shards(optimizer: Optimizer) -> Iterator[None]:
    """Inside, an optimizer has this rank's rows in place of DTensors, if it steps by element.

    Nothing changes if a gradient or state is not placed as its parameter is. That is equal on all
    ranks.

    Args:
        optimizer: one whose groups nothing else has. Afterwards, their parameters are gone.
    """
    rows = _rows_by_param(optimizer) if steps_by_element(optimizer) else None
    if rows is None:
        yield
        return
    state, own = optimizer.state, defaultdict[Any, Any](dict)
    for param, local in rows.items():
        entries = state.get(param)
        if entries:
            own[local] = entries if local is param else _map(compat.local_of, entries)
    for group in optimizer.param_groups:
        group["params"] = [rows[param] for param in group["params"]]
    given = {name: value for name, value in vars(optimizer).items() if isinstance(value, DTensor)}
    vars(optimizer).update(_map(plain_scalar, given), state=own)
    try:
        yield
    except BaseException:
        for param in rows:
            mark_edited(param, f"a {type(optimizer).__name__}.step() that raised")
        raise
    finally:
        vars(optimizer).update(given, state=state)
        for group in optimizer.param_groups:
            group["params"] = []
        for param, local in rows.items():
            if own.get(local):
                _store(state, param, own[local])


def _rows_by_param(optimizer: Optimizer) -> dict[Tensor, Tensor] | None:
    """Returns plain tensors with the gradients of the parameters; None if one cannot be given."""
    state: Any = optimizer.state
    rows = dict[Tensor, Tensor]()
    for group in optimizer.param_groups:
        for param in group["params"]:
            entries = state.get(param) or {}
            if not isinstance(param, DTensor):
                rows[param] = param
                continue
            grad = param.grad
            if grad is not None and not (grad.dtype == param.dtype and _placed_as(param, grad)):
                return None
            for key, value in entries.items():
                if isinstance(value, Tensor) and not (
                    type(value) is Tensor if key in _NUMBERS else _placed_as(param, value)
                ):
                    return None
            local = compat.local_of(param)
            if type(local) not in (Tensor, nn.Parameter) or not is_sharded(param):
                return None
            made = rows[param] = local.detach()
            if grad is not None:
                made.grad = compat.local_of(cast(DTensor, grad))
    return rows


def _placed_as(param: DTensor, value: Tensor) -> bool:
    if not isinstance(value, DTensor) or type(compat.local_of(value)) is not Tensor:
        return False
    own, other = compat.spec_of(param), compat.spec_of(value)
    return own is other or (own.placements == other.placements and own.mesh == other.mesh)


def _map(function: Any, values: dict[Any, Any]) -> dict[Any, Any]:
    """Apply a function to the DTensors of a dict."""
    return {
        key: function(value) if isinstance(value, DTensor) else value
        for key, value in values.items()
    }


def _store(state: Any, param: Any, own: dict[Any, Any]) -> None:
    """Write what a step has made for a parameter to the state of the optimizer."""
    entries = state.get(param)
    if entries is None:
        entries = state[param] = {}
    for key, value in own.items():
        before = entries.get(key)
        if value is compat.local_part(before):
            continue
        if isinstance(param, DTensor) and isinstance(value, Tensor) and key not in _NUMBERS:
            spec = compat.plain_spec(compat.spec_of(param))
            value = watch_if_needed(compat.wrap_local(value, spec))
        entries[key] = value
