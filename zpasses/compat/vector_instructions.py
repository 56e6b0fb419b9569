"""Which vector instructions Inductor's code for CPUs may use, remembered between processes.

In each process, Inductor finds out by compiling files and loading them in child processes, for each
set of instructions that the processor has, one after the other. On x86 that takes seven seconds
with an empty cache and two seconds later, and ranks of one machine wait for each other. A process
that loads stored code needs the answer as well.
"""

from __future__ import annotations

import contextlib
import platform
import threading
from collections import deque
from collections.abc import Sequence
from contextvars import copy_context
from typing import Any
from unittest import mock

__all__ = [
    "VectorInstructions",
    "must_try_vector_instructions",
    "remember_vector_instructions",
    "try_vector_instructions",
    "vector_instructions_key",
]

VectorInstructions = tuple[str, tuple[tuple[str, str], ...]]
"""The compiler and torch with which they were tried; name and compiler flags of those that work."""


def must_try_vector_instructions() -> bool:
    """Whether Inductor tries sets of instructions when this process generates code for CPUs.

    Not if it has done so, if the user decides, or if the processor is not an x86.
    """
    from torch._inductor import config, cpu_vec_isa

    return (
        _is_known(cpu_vec_isa)
        and config.cpp.vec_isa_ok is None
        and not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize
        and bool(_candidates(cpu_vec_isa))
    )


def vector_instructions_key() -> str:
    """Returns what the choice depends on: compiler, torch, and the processor's instructions."""
    from torch._inductor import cpu_vec_isa

    return " ".join([_toolchain(cpu_vec_isa), *map(str, _candidates(cpu_vec_isa))])


def try_vector_instructions() -> VectorInstructions | None:
    """Finds out which sets of instructions work, two at a time. Each takes a compiler and a child
    process.

    The choice of this process stays open, so another thread may do this.
    `remember_vector_instructions` makes it.

    Returns:
        None if one of them does not work. A compiler that was killed looks the same.
    """
    from torch._inductor import cpu_vec_isa

    candidates = _candidates(cpu_vec_isa)
    trials = [_trial_of(each) for each in candidates]
    waiting, works = deque(trials), set()

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                trial = waiting.popleft()
                with contextlib.suppress(Exception):  # whatever a compiler raises
                    if trial:
                        works.add(trial)

    # No pool, because a program that ends would wait for its threads. Each of these sees the
    # settings of Inductor that hold here.
    workers = [
        threading.Thread(target=copy_context().run, args=(work,), daemon=True) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    always = {"check_build": lambda self, code: True}
    everything = [_trial_of(each, **always) for each in candidates]
    complete = len(works) == len(trials) and all(everything)
    if not complete or _described(trials) != _described(everything):
        return None
    return _toolchain(cpu_vec_isa), _described(trials)


def remember_vector_instructions(known: VectorInstructions | None) -> bool:
    """Keeps this process from trying again what another process has found out.

    Does nothing if this process tried already, if the user decides about vector instructions, if
    compiler, torch or processor differ, or if some of the processor's instructions did not work.

    Args:
        known: from `try_vector_instructions`, perhaps of another process.

    Returns:
        Whether this process need not try.
    """
    from torch._inductor import config, cpu_vec_isa

    if (
        known is None
        or not _is_known(cpu_vec_isa)
        or config.cpp.vec_isa_ok is not None
        or cpu_vec_isa.valid_vec_isa_list.cache_info().currsize
        or _toolchain(cpu_vec_isa) != known[0]
    ):
        return False
    # Inductor asks its questions, and each has the answer yes.
    with mock.patch.object(cpu_vec_isa.VecISA, "check_build", return_value=True):
        if _working(cpu_vec_isa) == known[1]:
            return True
    _forget(cpu_vec_isa)
    return False


def _is_known(cpu_vec_isa: Any) -> bool:
    """Whether this torch finds out as this file expects."""
    names = ("supported_vec_isa_list", "x86_isa_checker", "_get_isa_dry_compile_fingerprint")
    return hasattr(getattr(cpu_vec_isa, "valid_vec_isa_list", None), "cache_clear") and all(
        hasattr(cpu_vec_isa, name) for name in names
    )


def _candidates(cpu_vec_isa: Any) -> list[Any]:
    """The sets that Inductor tries on this processor, the best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    has: set[str] = set(cpu_vec_isa.x86_isa_checker())
    return [isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= has]


def _trial_of(isa: Any, **members: Any) -> Any:
    """Returns another object of the set.

    Inductor remembers answers by object, and its own objects are equal to copies of them. A trial
    changes the flags of its object for a while.
    """
    kind: Any = type(isa)
    identity = {"__hash__": object.__hash__, "__eq__": object.__eq__}
    return type(kind.__name__, (kind,), {**identity, **members})()


def _described(sets: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    return tuple((str(isa), isa.build_arch_flags()) for isa in sets)


def _working(cpu_vec_isa: Any) -> tuple[tuple[str, str], ...]:
    return _described(cpu_vec_isa.valid_vec_isa_list())


def _forget(cpu_vec_isa: Any) -> None:
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for isa in cpu_vec_isa.supported_vec_isa_list:
        for kind in type(isa).__mro__:
            for value in vars(kind).values():
                getattr(value, "cache_clear", lambda: None)()
        for name in [name for name in vars(isa) if name.endswith("_supported")]:
            delattr(isa, name)


def _toolchain(cpu_vec_isa: Any) -> str:
    """The compiler, its version, and that of torch."""
    return str(cpu_vec_isa._get_isa_dry_compile_fingerprint(""))
