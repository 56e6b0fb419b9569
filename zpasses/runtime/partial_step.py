"""The step of an optimizer on a part of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zpasses import compat
from zpasses.errors import ZpassesError
from zpasses.runtime.offloaded import OFFLOAD_ATTRIBUTE, is_offloaded
from zpasses.runtime.shard_step import on_shards, steps_by_element

Part = Mapping[int, Sequence[Tensor]]
"""Number of a parameter group -> those of its parameters that step."""


class PartialStep:
    """The step of an optimizer on a part of its parameters, without its hooks.

    It runs on a stand-in that has the same state, so nothing of the optimizer changes if a step
    raises. Settings and attributes are as they were when this was made. What the parts wrote to
    them is equal, and is written to the optimizer by `finish`: a counter counts one step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = dict(vars(optimizer))
        self._changed: dict[tuple[int | None, str], Any] | None = None

    def on(self, part: Part, state: Any = None) -> Optimizer:
        """Returns a stand-in that holds only these parameters.

        Args:
            state: the state of the parameters; None takes that of the optimizer.
        """
        made = object.__new__(type(self._optimizer))
        groups = [
            _group_of(group, part.get(number, ()))
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        made.__dict__ = {**self._attributes, **_replaced(groups)}
        if state is not None:
            made.state = state
        return made

    def run(self, part: Part, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}) -> None:
        """Step these parameters.

        Raises:
            ZpassesError: if the optimizer writes to its settings what it computes from parameters:
                each part has others.
        """
        made = self.on(part)
        with on_shards(made):
            compat.step_without_hooks(made, *args, **kwargs)
        changed = self._changes(made)
        before, self._changed = self._changed, changed
        if before is None:
            return
        for key in {**before, **changed}:
            one, other = before.get(key), changed.get(key)
            if not isinstance(one, Tensor) and one != other:
                raise ZpassesError(
                    f"{type(self._optimizer).__name__} computes {key[1]!r} from all parameters "
                    f"together: it is {one!r} for one part of them and {other!r} for another. Such "
                    "an optimizer cannot step in parts, so its states cannot be offloaded. These "
                    "parts have stepped already: start again without offload_optimizer."
                )

    def finish(self) -> None:
        """Give the optimizer the settings and attributes that the parts have written."""
        for (number, name), value in (self._changed or {}).items():
            if number is None:
                setattr(self._optimizer, name, value)
            else:
                self._optimizer.param_groups[number][name] = value

    def _changes(self, made: Optimizer) -> dict[tuple[int | None, str], Any]:
        """Returns what a part has written: number of the group or None, and name -> value."""
        replaced = _replaced([])
        owners: list[tuple[int | None, dict[str, Any], dict[str, Any]]] = [
            (None, self._attributes, {k: v for k, v in vars(made).items() if k not in replaced})
        ]
        pairs = zip(self._optimizer.param_groups, made.param_groups, strict=True)
        for number, (group, own) in enumerate(pairs):
            owners.append((number, group, {k: v for k, v in own.items() if k not in _MEMBERS}))
        return {
            (number, name): value
            for number, before, after in owners
            for name, value in after.items()
            if before.get(name, replaced) is not value
        }


_MEMBERS = ("params", "param_names")


def _group_of(group: dict[str, Any], params: Sequence[Tensor]) -> dict[str, Any]:
    made = {**group, "params": list(params)}
    if "param_names" in group:
        names = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
        made["param_names"] = [names.get(id(param)) for param in params]
    return made


def _replaced(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What a stand-in has of its own. It has no hooks: a step inside of the step runs none."""
    hooks = dict[str, Any]((name, {}) for name in compat.STEP_HOOKS)
    return {"param_groups": groups, OFFLOAD_ATTRIBUTE: None, **hooks}


# --- as the last hook before a step ---------------------------------------------------------------
def step_on_shards(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the step of an optimizer run on the shards of its parameters, if it can (on_shards).

    A global hook before steps. Those of offloaded optimizers are partial steps already.
    """
    if is_offloaded(optimizer) or not steps_by_element(optimizer):
        return
    groups = optimizer.param_groups
    if any(isinstance(param, DTensor) for group in groups for param in group["params"]):
        run_last(optimizer, _whole_step)


def run_last(optimizer: Optimizer, hook: Callable[..., Any]) -> None:
    """Move a hook before the steps of an optimizer behind its others. For global hooks, which run
    before those.
    """
    handle = getattr(optimizer, _HANDLE, None)
    if handle is not None:
        handle.remove()
    setattr(optimizer, _HANDLE, optimizer.register_step_pre_hook(hook))


_HANDLE = "_zpasses_last_hook"

EARLY_ATTRIBUTE = "_zpasses_early_steps"
"""Attribute of an optimizer that has stepped on a part of its parameters in backward. Its `finish`
returns the partial step of the rest (zpasses.runtime.early_steps)."""


@compat.dynamo_disable
def _whole_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do the whole step.

    Returns:
        Arguments with which the `step` of its class has nothing left to do.
    """
    args, kwargs = with_evaluated_closure(args, kwargs)
    early: Any = getattr(optimizer, EARLY_ATTRIBUTE, None)
    stepped = PartialStep(optimizer) if early is None else early.finish(optimizer)
    part = {
        number: [param for param in group["params"] if param.grad is not None]
        for number, group in enumerate(optimizer.param_groups)
    }
    stepped.run(part, args[1:], kwargs)
    stepped.finish()
    return (PartialStep(optimizer).on({}), *args[1:]), kwargs


def with_evaluated_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure of a step once, and hand on what it returned."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return args, kwargs
    with torch.enable_grad():
        loss = closure()

    def known() -> Any:
        return loss

    if len(args) > 1:
        return (args[0], known, *args[2:]), kwargs
    return args, {**kwargs, "closure": known}
