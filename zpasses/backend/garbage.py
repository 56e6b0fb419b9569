"""Python's garbage collector during a compile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from zpasses import compat

__all__ = ["no_garbage_collection", "no_garbage_collection_in_compiles"]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Context manager: no cyclic garbage is collected inside it.

    The nodes and fake tensors of a large graph are millions of objects that stay, and each full
    collection visits all of them: with 80 layers of Llama a third of the processor time.
    """
    paused = _Paused()
    paused.start()
    try:
        yield
    finally:
        paused.end()


def no_garbage_collection_in_compiles() -> None:
    """From now on, no cyclic garbage is collected while torch compiles, with Dynamo's trace.

    It applies to all compiles of this process, because what runs before the backend is called does
    not know the backend. Further calls do nothing.
    """
    compat.call_around_compiles(_compile.start, _compile.end)


class _Paused:
    """A time without garbage collection."""

    def __init__(self) -> None:
        self._enabled = False

    def start(self, _: object = None) -> None:
        self._enabled = gc.isenabled()
        gc.disable()

    def end(self, _: object = None) -> None:
        if self._enabled:
            gc.enable()


_compile = _Paused()
