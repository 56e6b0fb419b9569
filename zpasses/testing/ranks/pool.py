"""Groups of rank processes: one shared by many calls, or one for a single call.

Functions must be importable by name (a function of a test module, not one inside another function),
with picklable arguments and results. After the time limit, or a few seconds after the first
failure, the ranks are killed.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zpasses.testing.ranks.outcome import (
    Outcome,
    RanksError,
    describe_failure,
    without_harness_frames,
)
from zpasses.testing.ranks.server import Call, RankSettings, serve

PATIENCE_VARIABLE = "ZPASSES_TEST_PATIENCE"
"""Environment variable with a factor of all time limits here, for slow or busy machines."""

GRACE_S = 5.0
"""Seconds that the other ranks have to finish or fail after the first rank failed."""

_START_S = 180.0
"""Seconds that the ranks of a new group have to start. The first ones wait for an import of torch
and its compilers. A call's own limit does not count them.
"""

_SHOWN_OUTPUT = 12_000
"""Characters at the end of a rank's output that a failure shows. A dead rank shows four times as
many, because its threads' C++ stacks are long.
"""

# Processes fork from a server that has imported torch and its compilers.
spawner = multiprocessing.get_context("forkserver")
spawner.set_forkserver_preload(["zpasses.testing.preload"])


def scaled(seconds: float) -> float:
    """A time limit times ZPASSES_TEST_PATIENCE.

    Raises:
        ValueError: if the environment variable is not a number above 0.
    """
    given = os.environ.get(PATIENCE_VARIABLE, "1")
    try:
        factor = float(given)
    except ValueError:
        factor = 0.0
    if not 0 < factor < math.inf:
        raise ValueError(f"got {PATIENCE_VARIABLE}={given!r}; expected a factor, such as 4")
    return seconds * factor


def run_on_ranks(
    fn: Callable[..., Any], *args: Any, ranks: int = 2, timeout_s: float = 120, **kwargs: Any
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on every rank of a gloo process group on this machine.

    A script calls it below `if __name__ == "__main__":`, because the ranks import the script.

    The ranks are a pool that lives as long as this process, so a call takes milliseconds instead of
    an import of torch. Before each call, the compiler is reset and every rank gets the same seed.

    Args:
        fn: a function that the ranks can import by name.
        args: picklable arguments.
        ranks: number of ranks.
        timeout_s: seconds after which the ranks are killed; ZPASSES_TEST_PATIENCE multiplies them.
        kwargs: picklable keyword arguments.

    Returns:
        What the ranks returned, in order of ranks.

    Raises:
        RanksError: if a rank raised, died, or did not finish within the time limit. The next call
            gets new processes.
        ValueError: if the ranks cannot import the function.
    """
    __tracebackhide__ = True  # pytest shows the caller, and the message
    outcomes = call_on_ranks(fn, args, kwargs, ranks=ranks, timeout_s=timeout_s)
    if not all(outcome.ok for outcome in outcomes):
        raise RanksError(describe_failure(fn.__name__, outcomes, scaled(timeout_s)))
    return [outcome.result for outcome in outcomes]


def call_on_ranks(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    ranks: int,
    timeout_s: float,
) -> list[Outcome]:
    """As `run_on_ranks`, but returns the outcome of each rank instead of raising."""
    _check_that_ranks_can_import(fn)
    pool = _pools.pop(ranks, None)
    if pool is not None and not pool.alive():
        pool.kill()
        pool = None
    pool = pool or _Ranks(ranks)
    keep = False
    try:
        outcomes = pool.call(fn, args, kwargs, timeout_s)
        keep = all(outcome.ok for outcome in outcomes)
    finally:
        # Also after an interrupt: a rank that still runs this call must not get the next one.
        if keep:
            _pools[ranks] = pool
        else:
            pool.kill()
    return outcomes


def run_in_fresh_ranks(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    timeout_s: float = 120,
    env: dict[str, str] | None = None,
    answers: int | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """Call `fn(*args, **kwargs)` on every rank of a new gloo group of new processes.

    It serves tests in which ranks fail, die, or must not have run anything before. A script calls
    it below `if __name__ == "__main__":`, because the ranks import the script.

    Args:
        fn: a function that the ranks can import by name.
        args: picklable arguments.
        ranks: number of ranks.
        timeout_s: seconds after which running ranks are killed; ZPASSES_TEST_PATIENCE multiplies
            them.
        env: environment variables, set before `fn` is imported (but after torch is).
        answers: number of ranks to wait for; None for all. A stopped rank never answers.
        kwargs: picklable keyword arguments.

    Returns:
        The outcome of each rank, with what it printed. A failure of the function raises nothing.

    Raises:
        RanksError: if a rank died before it could call the function.
        ValueError: if the ranks cannot import the function.
    """
    _check_that_ranks_can_import(fn)
    started = _Ranks(ranks, env)
    try:
        # There is no early deadline, because such a test is about what the other ranks do after one
        # failed.
        outcomes = started.call(fn, args, kwargs, timeout_s, grace_s=timeout_s, answers=answers)
        return started.finish(outcomes)
    finally:
        started.kill()


def _check_that_ranks_can_import(fn: Callable[..., Any]) -> None:
    """Raise ValueError if the running program is no file that the ranks can import."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None:
        return  # python -m
    if file is not None and not os.path.exists(file):
        raise ValueError(
            f"the ranks cannot import the running program, {file}. Save it as a file, and run that."
        )
    if file is None and getattr(fn, "__module__", None) == "__main__":
        name = getattr(fn, "__name__", repr(fn))
        raise ValueError(
            f"the ranks cannot import {name}, because the running program is no file (python -c, "
            "an interactive session, or a notebook). Put the function into a module."
        )


class _Ranks:
    """One gloo group of processes that take calls."""

    def __init__(self, count: int, env: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        # The store lives in this process, as torchrun's lives in its agent, so it survives the
        # death of any rank.
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self._logs = [Path(self._folder.name, f"{rank}.log") for rank in range(count)]
        self._connections: list[Connection] = []
        self._processes = []
        for rank, log in enumerate(self._logs):
            here, there = spawner.Pipe()
            settings = RankSettings(rank, count, self._store.port, str(log), env or {})
            process = spawner.Process(target=serve, args=(settings, there), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        self._ready = False

    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout_s: float,
        grace_s: float = GRACE_S,
        answers: int | None = None,
    ) -> list[Outcome]:
        packed = pickle.dumps(Call(fn, tuple(args), kwargs, os.getcwd()))
        if not self._ready:
            started = self._collect(_START_S, GRACE_S, len(self._processes))
            self._ready = all(started.get(rank) for rank in range(len(self._processes)))
            if not self._ready:
                self._check_start()
                return self._outcomes(started, [0] * len(self._logs))
        offsets = [log.stat().st_size if log.exists() else 0 for log in self._logs]
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(packed)
        replies = self._collect(timeout_s, grace_s, answers or len(self._processes))
        return self._outcomes(replies, offsets)

    def _check_start(self) -> None:
        """Raise RanksError if a rank died before its first line of code, which opens its log."""
        for rank, (process, log) in enumerate(zip(self._processes, self._logs, strict=True)):
            process.join(GRACE_S)
            if process.exitcode is not None and not log.exists():
                raise RanksError(
                    f"rank {rank} of {len(self._processes)} died with exit code "
                    f"{process.exitcode} before it could run anything; standard error has its "
                    "traceback. Ranks import the script that starts them, so a script must call "
                    'this below `if __name__ == "__main__":`.'
                )

    def _outcomes(
        self, replies: dict[int, tuple[bool, Any] | None], offsets: Sequence[int]
    ) -> list[Outcome]:
        if len(replies) < len(self._processes):
            self._show_stacks(replies)
        return [
            self._outcome(rank, rank in replies, replies.get(rank), offsets[rank])
            for rank in range(len(self._processes))
        ]

    def _collect(
        self, timeout_s: float, grace_s: float, answers: int
    ) -> dict[int, tuple[bool, Any] | None]:
        """Rank -> (succeeded, result or traceback); None for dead ranks. Ranks that did not answer
        in time are missing.
        """
        replies: dict[int, tuple[bool, Any] | None] = {}
        deadline = time.monotonic() + scaled(timeout_s)
        while len(replies) < answers:
            pending = {
                self._connections[rank]: rank
                for rank in range(len(self._processes))
                if rank not in replies
            }
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                reply = None
                with contextlib.suppress(EOFError, ConnectionError):
                    reply = _unpacked(connection.recv_bytes())  # type: ignore[union-attr]
                replies[pending[connection]] = reply  # type: ignore[index]
                if reply is None or not reply[0]:
                    deadline = min(deadline, time.monotonic() + scaled(grace_s))
        return replies

    def _outcome(
        self, rank: int, ended: bool, reply: tuple[bool, Any] | None, offset: int
    ) -> Outcome:
        process = self._processes[rank]
        if reply is None:
            if ended:
                process.join(GRACE_S)  # it may have closed its end a moment before it dies
            output = without_harness_frames(self._output(rank, offset, 4 * _SHOWN_OUTPUT))
            return Outcome(rank, exit_code=process.exitcode, output=output)
        succeeded, value = reply
        if succeeded:
            return Outcome(rank, result=value, output=self._output(rank, offset), reported=True)
        return Outcome(rank, error=value, output=self._output(rank, offset), reported=True)

    def _output(self, rank: int, offset: int, shown: int = _SHOWN_OUTPUT) -> str:
        if not self._logs[rank].exists():
            return ""
        with open(self._logs[rank], "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(offset, size - 4 * shown))
            return log.read().decode(errors="replace")[-shown:]

    def _show_stacks(self, replies: dict[int, Any]) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in replies and process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def finish(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Disconnect the ranks, and add their exit codes to the outcomes."""
        for connection in self._connections:
            connection.close()
        done = []
        for outcome, process in zip(outcomes, self._processes, strict=True):
            if outcome.reported:
                process.join(GRACE_S)
                outcome = dataclasses.replace(outcome, exit_code=process.exitcode)
            done.append(outcome)
        return done

    def kill(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(GRACE_S)
        self._folder.cleanup()


def _unpacked(reply: bytes) -> tuple[bool, Any]:
    try:
        succeeded, value = pickle.loads(reply)
    except Exception as error:
        return False, f"its result does not arrive here: {type(error).__name__}: {error}"
    return succeeded, value


_pools: dict[int, _Ranks] = {}
"""The pool of each number of ranks."""


@atexit.register
def close_pools() -> None:
    """Kill the ranks of this process. The next call starts new ones."""
    while _pools:
        _pools.popitem()[1].kill()
