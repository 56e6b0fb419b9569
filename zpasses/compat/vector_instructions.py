"""Which vector instructions Inductor's code for CPUs may use, remembered between processes.

In each process, Inductor finds out by compiling files and loading them in child processes, for each
set of instructions that the processor has, one after the other. On x86 that takes seven seconds
with an empty cache and two seconds later, and ranks of one machine wait for each other. A process
that loads stored code needs the answer as well.
"""

from __future__ import annotations

import copy
import platform
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any
from unittest import mock

__all__ = [
    "VectorInstructions",
    "known_vector_instructions",
    "must_try_vector_instructions",
    "remember_vector_instructions",
    "try_vector_instructions",
    "vector_instructions_key",
]

VectorInstructions = tuple[str, tuple[tuple[str, str], ...]]
"""The compiler and torch with which they were tried; name and compiler flags of those that work."""


def known_vector_instructions() -> VectorInstructions | None:
    """Returns what this process has found out; None if it has not tried."""
    from torch._inductor import cpu_vec_isa

    if not _is_known(cpu_vec_isa) or not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
        return None
    return _toolchain(cpu_vec_isa), _working(cpu_vec_isa)


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


def try_vector_instructions() -> VectorInstructions:
    """Finds out which sets of instructions work, two at a time. Each takes a compiler and a child
    process.

    The choice of this process stays open, so another thread may do this.
    `remember_vector_instructions` makes it.
    """
    from torch._inductor import cpu_vec_isa

    # A trial of an object of Inductor changes its flags for a while.
    candidates = [copy.copy(each) for each in _candidates(cpu_vec_isa)]
    with ThreadPoolExecutor(2) as pool:
        # Each thread sees the settings of Inductor that hold here.
        works = [pool.submit(copy_context().run, bool, each) for each in candidates]
    working = [isa for isa, each in zip(candidates, works, strict=True) if each.result()]
    return _toolchain(cpu_vec_isa), tuple((str(isa), isa.build_arch_flags()) for isa in working)


def remember_vector_instructions(known: VectorInstructions | None) -> bool:
    """Keeps this process from trying again what another process has found out.

    Does nothing if this process tried already, if the user decides about vector instructions, if
    compiler, torch or processor differ, or if some of the processor's instructions did not work.

    Args:
        known: from `known_vector_instructions` of the other process, or from
            `try_vector_instructions`.

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
    _forget(cpu_vec_isa)  # what trials of this process have left
    # Inductor asks its questions, and each has the answer yes.
    with mock.patch.object(cpu_vec_isa.VecISA, "check_build", return_value=True):
        if _working(cpu_vec_isa) == known[1]:
            return True
    _forget(cpu_vec_isa)
    return False


def _is_known(cpu_vec_isa: Any) -> bool:
    """Whether this torch finds out as this file expects."""
    return hasattr(getattr(cpu_vec_isa, "valid_vec_isa_list", None), "cache_clear")


def _candidates(cpu_vec_isa: Any) -> list[Any]:
    """The sets that Inductor tries on this processor, the best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    has: set[str] = set(cpu_vec_isa.x86_isa_checker())
    return [isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= has]


def _working(cpu_vec_isa: Any) -> tuple[tuple[str, str], ...]:
    return tuple((str(isa), isa.build_arch_flags()) for isa in cpu_vec_isa.valid_vec_isa_list())


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
