"""The step of an optimizer on a part of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zpasses import compat
from zpasses.errors import ZpassesError
from zpasses.runtime.offloaded import OFFLOAD_ATTRIBUTE
from zpasses.runtime.shard_step import on_shards

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
        changed = self.changes(made)
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

    def changes(self, made: Optimizer) -> dict[tuple[int | None, str], Any]:
        """Returns what a stand-in's step has written to settings and attributes: number of the
        group or None, and name -> value.
        """
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
