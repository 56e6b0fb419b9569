"""The autograd engine: the backward that runs, and where its gradients go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._C import DisableTorchFunctionSubclass

__all__ = [
    "DisableTorchFunctionSubclass",
    "current_autograd_node",
    "current_engine_run",
    "grad_consumers",
    "in_backward",
    "queue_engine_callback",
    "will_accumulate",
]


def current_engine_run() -> int:
    """Number of the innermost run of the autograd engine that calls this; raises RuntimeError
    outside a backward."""
    number = cast(Any, torch._C)._current_graph_task_id()
    if number < 0:
        raise RuntimeError("no backward is running")
    return int(number)


def queue_engine_callback(fn: Callable[[], None]) -> None:
    """Call `fn` when the current run of the engine has succeeded. The engine holds it until that
    run is over, whatever its end."""
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(fn)


def in_backward() -> bool:
    return current_autograd_node() is not None


def current_autograd_node() -> Any:
    """The node of autograd that runs right now; None outside a backward."""
    return cast(Any, torch._C)._current_autograd_node()


def grad_consumers(source: Any) -> list[Any]:
    """For each input of a node of autograd what takes its gradient; None where nothing does."""
    return [taker for taker, _ in source.next_functions]


def will_accumulate(taker: Any) -> bool | None:
    """Whether the current run of the engine adds a gradient to `param.grad`; None if it hands it to
    somebody else."""
    if taker is None:
        return False
    if not hasattr(taker, "variable"):
        return None  # no leaf: autograd goes on behind it
    try:
        return bool(cast(Any, torch._C)._will_engine_execute_node(taker))
    except RuntimeError:  # torch.autograd.grad asks for it
        return None
