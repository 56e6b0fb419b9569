"""Run test functions on real gloo ranks.

`run_on_ranks` sends a function to a pool of rank processes that lives as long as the test session,
so a test takes milliseconds instead of an import of torch. `run_in_fresh_ranks` starts processes
for one function only and reports the outcome of each rank. It serves tests in which ranks fail,
die, or must not have run anything before.

Functions must be module-level functions of a test module, with picklable arguments and results.
After the time limit, or a few seconds after the first failure, the ranks are killed. The error then
shows the output and the stack of each of them.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "Outcome",
    "RanksError",
    "close_pools",
    "run_in_fresh_ranks",
    "run_on_ranks",
    "world_mesh",
]

GRACE_S = 5.0
"""Seconds that the other ranks have to finish or fail after the first rank failed."""

_START_S = 60.0

# Processes fork from a server that has imported torch and its compilers, but no module of zpasses.
spawner = multiprocessing.get_context("forkserver")
spawner.set_forkserver_preload(["tests.preload"])


class RanksError(AssertionError):
    """A function failed on at least one rank; the message holds every rank's traceback and
    output.
    """


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank."""

    rank: int
    result: Any = None
    error: str = ""
    """Traceback of the exception; "" if it returned or died."""
    exit_code: int | None = None
    """Exit code of its process, negative for a signal; None if it had to be killed."""
    output: str = ""
    """The end of its output."""
    reported: bool = False
    """Whether it returned or raised; False if it died or hung."""

    @property
    def ok(self) -> bool:
        return self.reported and not self.error

    @property
    def timed_out(self) -> bool:
        return not self.reported and self.exit_code is None

    def __str__(self) -> str:
        if self.ok:
            return f"--- rank {self.rank}: done"
        what = (
            "failed"
            if self.error
            else "did not finish"
            if self.timed_out
            else f"died with exit code {self.exit_code}"
        )
        output = f"\n[its output]\n{self.output}" if self.output else ""
        return f"--- rank {self.rank}: {what}\n{self.error}{output}"


def run_on_ranks(
    fn: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 120, **kwargs: Any
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on every rank of a gloo process group. Returns the results of the
    ranks.

    Tests share the ranks. Before each call, Dynamo is reset and every rank gets the same seed.

    Raises:
        RanksError: if a rank raised, died, or did not finish within `timeout` seconds. The next
            call gets new processes.
    """
    pool = _pools.get(ranks)
    if pool is None or not pool.alive():
        pool = _pools[ranks] = _Ranks(ranks)
    outcomes = pool.call((fn, args, kwargs), timeout)
    if not all(outcome.ok for outcome in outcomes):
        pool.kill()
        del _pools[ranks]
        raise RanksError(f"{fn.__name__} failed\n" + "\n".join(map(str, outcomes)))
    return [outcome.result for outcome in outcomes]


def run_in_fresh_ranks(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    answers: int | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """Call `fn(*args, **kwargs)` on every rank of a new gloo group of new processes. Returns the
    outcome of each rank, and never raises.

    Args:
        timeout: seconds after which running ranks are killed.
        env: environment variables, set before zpasses is imported (but after torch is).
        answers: number of ranks to wait for; None for all. A stopped rank never answers.
    """
    job = _Ranks(ranks, env or {})
    try:
        # There is no early deadline, because such a test is about what the other ranks do after one
        # failed.
        outcomes = job.call((fn, args, kwargs), timeout, grace=timeout, answers=answers)
        return job.finish(outcomes)
    finally:
        job.kill()


def world_mesh() -> Any:
    """The one-dimensional CPU mesh of all ranks. Call it inside a rank."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


class _Ranks:
    """One gloo group of processes that take calls."""

    def __init__(self, count: int, env: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        # The store lives in this process, as torchrun's lives in its agent, so it survives the
        # death of any rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._logs = [Path(self._folder.name, f"{rank}.log") for rank in range(count)]
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = spawner.Pipe()
            process = spawner.Process(
                target=_serve,
                args=(rank, count, self._store.port, there, str(self._logs[rank]), env or {}),
                daemon=True,
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def call(
        self,
        job: tuple[Any, ...],
        timeout: float,
        grace: float = GRACE_S,
        answers: int | None = None,
    ) -> list[Outcome]:
        packed = pickle.dumps(job)
        offsets = [log.stat().st_size if log.exists() else 0 for log in self._logs]
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(packed)
        replies = self._collect(timeout, grace, answers or len(self._processes))
        if len(replies) < len(self._processes):
            self._show_stacks(replies)
        return [
            self._outcome(rank, replies.get(rank), offsets[rank])
            for rank in range(len(self._processes))
        ]

    def _collect(
        self, timeout: float, grace: float, answers: int
    ) -> dict[int, tuple[bool, Any] | None]:
        """Rank -> (succeeded, result or traceback); None for dead ranks. Ranks that did not answer
        in time are missing.
        """
        replies: dict[int, tuple[bool, Any] | None] = {}
        deadline = time.monotonic() + timeout
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
                    reply = pickle.loads(connection.recv_bytes())
                replies[pending[connection]] = reply
                if reply is None or not reply[0]:
                    deadline = min(deadline, time.monotonic() + grace)
        return replies

    def _outcome(self, rank: int, reply: tuple[bool, Any] | None, offset: int) -> Outcome:
        process = self._processes[rank]
        if reply is None:
            process.join(0.5)  # it may have closed its end a moment before it dies
            return Outcome(rank, exit_code=process.exitcode, output=self._output(rank, offset))
        succeeded, value = reply
        if succeeded:
            return Outcome(rank, result=value, reported=True)
        return Outcome(rank, error=value, output=self._output(rank, offset), reported=True)

    def _output(self, rank: int, offset: int) -> str:
        with open(self._logs[rank], errors="replace") as log:
            log.seek(offset)
            return log.read()[-6000:]

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
                outcome = Outcome(
                    outcome.rank,
                    outcome.result,
                    outcome.error,
                    process.exitcode,
                    outcome.output,
                    True,
                )
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


_pools: dict[int, _Ranks] = {}


@atexit.register
def close_pools() -> None:
    while _pools:
        _pools.popitem()[1].kill()


def _serve(
    rank: int, count: int, port: int, connection: Connection, log: str, env: dict[str, str]
) -> None:
    """Run calls in a rank process until the other end closes the connection."""
    with open(log, "a") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", 1, closefd=False),
        os.fdopen(2, "w", 1, closefd=False),
    )
    faulthandler.enable(sys.__stderr__)
    stays_open = open(log, "a")  # noqa: SIM115 - until the process ends
    faulthandler.register(signal.SIGUSR1, file=stays_open, all_threads=True)
    os.environ.update(
        env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), OMP_NUM_THREADS="1"
    )
    torch.set_num_threads(1)
    job = _next(connection)
    if job is None:
        return
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_START_S))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("ranks", store), rank=rank, world_size=count
    )
    while job is not None:
        connection.send_bytes(pickle.dumps(_run(job)))
        job = _next(connection)
    dist.destroy_process_group()


def _next(connection: Connection) -> bytes | None:
    with contextlib.suppress(EOFError, ConnectionError):
        return connection.recv_bytes()
    return None


def _run(job: bytes) -> tuple[bool, Any]:
    try:
        fn, args, kwargs = pickle.loads(job)
        with _clean_state():
            result = fn(*args, **kwargs)
            pickle.dumps(result)
        return True, result
    except BaseException:  # whatever a test raises, pytest's outcomes included
        return False, traceback.format_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextlib.contextmanager
def _clean_state() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    random.seed(0)
    yield
