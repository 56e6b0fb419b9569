"""Steps of optimizers that began and did not end, because they raised.

A rank whose program catches the error goes on with parameters that the step changed in part, or not
at all, while other ranks have made the whole step. So the next graph or step says what the aborted
step has changed, and ranks compare that (zpasses.runtime.run_checks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zpasses.runtime.watched import memory_of

__all__ = ["begin_step", "end_step", "take_aborted_steps", "with_watched_closure"]


@dataclass(frozen=True)
class _Step:
    optimizer: str
    groups: Sequence[str]
    params: Sequence[Tensor]
    before: Sequence[int]
    """Edits of each parameter before the step."""

    def describe(self) -> str:
        """Says what the step has changed, by positions among the parameters of the optimizer."""
        changed = [
            f"{i} ({now - before}x)"
            for i, (now, before) in enumerate(zip(_edits(self.params), self.before, strict=True))
            if now != before
        ]
        named = f", numbers {', '.join(changed[:8])}" if changed else ""
        more = " ..." if len(changed) > 8 else ""
        return (
            f"{self.optimizer}.step() that raised after it had changed {len(changed)} of "
            f"{len(self.params)} parameters{named}{more}"
        )


# Hooks of optimizers belong to the process. Identity of an optimizer -> its step.
_open_steps: dict[int, _Step] = {}
_aborted: dict[str, list[str]] = {}
"""Process group -> what its next event says."""

_closures: list[object] = []
"""Closures that run now, inside a step."""


def begin_step(optimizer: object, groups: Sequence[str], params: Sequence[Tensor]) -> None:
    """Called before a step of an optimizer.

    Args:
        groups: process groups of its sharded parameters.
        params: the sharded parameters.
    """
    _abort(_open_steps.pop(id(optimizer), None))  # it raised, or another optimizer had its id
    if params:
        name = type(optimizer).__name__
        _open_steps[id(optimizer)] = _Step(name, groups, params, _edits(params))


def end_step(optimizer: object) -> None:
    """Called after a step that did not raise."""
    _open_steps.pop(id(optimizer), None)


def take_aborted_steps(group: str) -> str:
    """Returns which steps were aborted since the last call for a group; "" if none were."""
    if not _closures:
        while _open_steps:
            _abort(_open_steps.popitem()[1])
    return " and ".join(_aborted.pop(group, ()))


def _abort(step: _Step | None) -> None:
    for name in step.groups if step is not None else ():
        _aborted.setdefault(name, []).append(step.describe())  # type: ignore[union-attr]


def with_watched_closure(closure: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the closure of a step, which may run graphs before the step ends."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _closures.append(closure)
        try:
            return closure(*args, **kwargs)
        finally:
            _closures.pop()

    return run


def _edits(params: Sequence[Tensor]) -> list[int]:
    return [memory.edits if (memory := memory_of(param)) is not None else 0 for param in params]
