"""Stacks: room for deep Python calls, who called, and what a fatal signal prints."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch

_R = TypeVar("_R")
_SLOTS = (1 << 17) + (1 << 10)
"""Just above 1 MiB of 8-byte slots, so that CPython allocates a piece of 2 MiB, and a MiB of it is
left: frames of a few hundred bytes each, several thousand deep."""


def call_with_stack_room(function: Callable[[], _R]) -> _R:
    """Returns `function()`, whose Python calls find a MiB of stack ready.

    CPython 3.11 and later keep the frames of Python functions in pieces of 16 KiB. A piece is
    mapped when a call does not fit the last one, and unmapped when that call returns. Where the
    end of a piece falls into a hot loop, every call in it costs two system calls and a page fault:
    while AOTAutograd traces a large graph, up to a fifth of the processor time. One frame that
    claims more than a piece gets a larger piece, and the calls below it use the rest. Pages that
    no frame touches take no memory.
    """
    return _roomy(function)  # type: ignore[no-any-return]


def _call(function: Callable[[], _R]) -> _R:
    return function()


_roomy = types.FunctionType(_call.__code__.replace(co_stacksize=_SLOTS), globals(), "_roomy")


def is_called_by(function: Callable[..., Any], depth: int = 1) -> bool:
    """Whether the function that calls this one was called by `function`, a Python function.

    Args:
        depth: 2 asks who called its caller.
    """
    return sys._getframe(1 + depth).f_code is getattr(function, "__code__", None)


def is_saving_checkpoint() -> bool:
    """Whether torch's code of checkpoints calls the function that calls this one. It keeps no
    tensor that it reads from a state dict.
    """
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return bool(caller.startswith(_CHECKPOINTS))


_CHECKPOINTS = ("torch.distributed.checkpoint", "torch.distributed._state_dict_utils")


def module_among_callers(names: Collection[str]) -> str | None:
    """Returns the name of the innermost of these modules that is executing a call in this thread;
    None if none is.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if (name := frame.f_globals.get("__name__")) in names:
            return str(name)
        frame = frame.f_back
    return None


def print_native_stacks_on_fatal_signals() -> None:
    """Let SIGABRT, SIGSEGV and the like print the C++ stack of each thread before they end the
    process. Python's faulthandler, enabled later, prints its stacks first.
    """
    torch._C._set_print_stack_traces_on_fatal_signal(True)
