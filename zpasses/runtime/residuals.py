"""Residuals of error feedback, which belong to parameters (`zpasses.graph.error_feedback`).

A residual is made of zeros when a gradient of its parameter is first encoded, and lives as long as
the parameter. All graphs that encode a gradient of the parameter write to the same tensor, so both
halves of a graph break, recompilations and the ends of windows continue from one another. A deep
copy of a parameter has none. Edits of the parameter keep it. `zpasses.load_training_state` drops
it, so a run that resumes is the same in this process and in a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zpasses import compat
from zpasses.graph.error_feedback import Residual
from zpasses.runtime.layout import layout_of
from zpasses.runtime.param_conversion import local_shards_node
from zpasses.runtime.windows import GRAD_STATE_ATTRIBUTE, grad_state_of

_Code = Callable[[list[Any]], Any]


def with_residuals(code: _Code, residuals: Sequence[Residual], order: Mapping[str, int]) -> _Code:
    """Give the code of a backward graph the residuals of its call, as its last inputs.

    Args:
        code: takes one list.
        residuals: those that the graph takes.
        order: name of a sharded input -> its position among the sharded inputs of the call.
    """
    positions = [order[each.param] for each in residuals]

    def held_residuals() -> list[Tensor]:
        source = local_shards_node()
        assert source is not None, "a gradient is reduced, but no parameter of the call is trained"
        consumers = compat.grad_consumers(source)
        result = []
        for position, residual in zip(positions, residuals, strict=True):
            held = residual_of(source.zpasses_params[position], residual)
            # A gradient that nobody gets must not take the residual with it.
            lost = compat.will_accumulate(consumers[position]) is False
            result.append(held.clone() if lost else held)
        return result

    def run(args: list[Any]) -> Any:
        # While the code runs, nothing here may refer to the consumers of gradients: one that is
        # held may have hooks, so its reduction would be awaited at once.
        args.extend(held_residuals())
        return code(args)

    return run


def drop_residuals(params: Iterable[Any]) -> None:
    """Let the error feedback of these parameters begin with zeros again."""
    for param in params:
        state = getattr(param, GRAD_STATE_ATTRIBUTE, None)
        if state is not None:
            state.residuals.clear()


def residual_of(param: Any, residual: Residual) -> Tensor:
    """Return the residual of a parameter, which the next encode writes in place; zeros at first.

    Encodings that cut blocks differently have residuals of their own.
    """
    held = grad_state_of(param).residuals
    found = held.get((residual.shape, residual.number))
    if found is None:
        local = compat.local_of(param)
        kind = layout_of(param).mesh.device_type  # the shard may rest on the host
        device = local.device if local.device.type == kind else torch.device(kind)
        found = local.new_zeros(residual.shape, dtype=torch.float32, device=device)
        held[residual.shape, residual.number] = found
    return found
