"""Python's garbage collector during a compile."""

from __future__ import annotations

from zpasses import compat
from zpasses.garbage import PausedCollection


def no_garbage_collection_in_compiles() -> None:
    """From now on, no cyclic garbage is collected while torch compiles, with Dynamo's trace.

    It applies to all compiles of this process, because what runs before the backend is called does
    not know the backend. Further calls do nothing.
    """
    compat.call_around_compiles(_compile.start, _compile.end)


_compile = PausedCollection()
