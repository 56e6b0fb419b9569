"""The vector instructions of Inductor's code for CPUs: tried while a graph is traced, and stored
for later processes on machines of the same kind.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import json
import logging
import threading

import filelock

from zpasses import compat
from zpasses.backend.cache.store import CacheFiles, make_private
from zpasses.pipeline.options import Options
from zpasses.ranks.vote import current_timeout_s, vote_timeout

__all__ = [
    "begin_vector_instruction_trials",
    "finish_vector_instruction_trials",
    "recall_vector_instructions",
]

log = logging.getLogger("zpasses")


class _Trials:
    """Trials of one process, in a thread of their own. Settings are those of the thread that starts
    them.
    """

    def __init__(self, stored: bool) -> None:
        self._stored = stored
        self._known: compat.VectorInstructions | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="zpasses-vector-instructions", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        self._thread.join()
        compat.remember_vector_instructions(self._known)

    def _run(self) -> None:
        try:
            self._known = _stored_or_tried() if self._stored else compat.try_vector_instructions()
        except Exception as error:  # whatever a compiler raises: Inductor will say it again
            log.info("vector instructions were not tried: %s", error)


_trials: _Trials | None = None
_starting = threading.Lock()


def begin_vector_instruction_trials(options: Options) -> None:
    """Starts to try vector instructions in a thread, if a compile for CPUs with these options would
    try them.

    Most of the time passes in compilers and other child processes. With the compile cache, the
    processes of one machine wait for the first of them, as long as for votes, and read what it has
    found.
    """
    global _trials
    if options.codegen != "inductor" or _are_given(options):
        return
    with _starting, vote_timeout(options.agreement_timeout_s):
        if _trials is None and compat.must_try_vector_instructions():
            _trials = _Trials(stored=options.cache)


def finish_vector_instruction_trials() -> None:
    """Waits for the trials that have begun, and makes the choice of this process.

    Without an answer, Inductor tries for itself.
    """
    global _trials
    with _starting:
        if _trials is not None:
            compat.import_inductor_lowering()  # is needed next, and takes part of the wait
            _trials.finish()
            _trials = None


def recall_vector_instructions(options: Options) -> None:
    """Makes the choice of this process as an earlier one did, if that is stored."""
    if _are_given(options):
        return
    finish_vector_instruction_trials()
    if compat.must_try_vector_instructions():
        compat.remember_vector_instructions(_read())


def _are_given(options: Options) -> bool:
    """Whether options of Inductor say whether vector instructions work. They hold in the compile,
    and not here.
    """
    return "cpp.vec_isa_ok" in options.inductor


def _stored_or_tried() -> compat.VectorInstructions | None:
    lock = _files().folder / "lock"
    with contextlib.ExitStack() as stack:
        try:
            make_private(lock.parent)
            stack.enter_context(filelock.FileLock(lock, timeout=current_timeout_s(), mode=0o600))
        except OSError as error:  # a timeout, too
            log.info("vector instructions are tried without a lock: %s", error)
        known = _read()
        if known is None:
            known = compat.try_vector_instructions()
            if known is not None:
                _write(known)
            else:
                log.info("vector instructions: not all work here; Inductor tries them itself")
        return known


def _files() -> CacheFiles:
    return CacheFiles.of("vector-instructions")


def _name() -> str:
    return hashlib.sha256(compat.vector_instructions_key().encode()).hexdigest()[:24]


def _read() -> compat.VectorInstructions | None:
    data = _files().read(_name())
    try:
        found = json.loads(data) if data is not None else None
        return (found[0], tuple((name, flags) for name, flags in found[1])) if found else None
    except (ValueError, TypeError, LookupError):
        return None


def _write(known: compat.VectorInstructions) -> None:
    _files().write(_name(), json.dumps(known).encode())
