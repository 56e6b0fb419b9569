"""A rank process: one member of a gloo group that runs calls until its connection closes."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import zpasses.graph.dialect  # noqa: F401 - as `import zpasses` does in a process that has torch
from zpasses import compat

START_S = 60.0
"""Seconds that the ranks of a group wait for each other at the start."""


@dataclass(frozen=True)
class RankSettings:
    """What a rank process is told at its start."""

    rank: int
    count: int
    """Ranks in the group."""
    port: int
    """Port of the group's store on this machine."""
    log: str
    """File for everything that the process prints."""
    env: dict[str, str]
    """Environment variables, set before the first call."""


@dataclass(frozen=True)
class Call:
    """A call of a function, in a working directory."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cwd: str


def serve(settings: RankSettings, connection: Connection) -> None:
    """Run calls until the other end closes the connection. The target of a rank process."""
    _redirect_output(settings.log)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(
        settings.env,
        RANK=str(settings.rank),
        LOCAL_RANK=str(settings.rank),
        WORLD_SIZE=str(settings.count),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", settings.port, is_master=False, timeout=timedelta(seconds=START_S)
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("ranks", store),  # type: ignore[attr-defined]
        rank=settings.rank,
        world_size=settings.count,
    )

    _reset_state()  # the first time takes long
    connection.send_bytes(pickle.dumps((True, None)))  # ready
    while (data := _next(connection)) is not None:
        connection.send_bytes(_run(data))
    dist.destroy_process_group()


def _redirect_output(log: str) -> None:
    with open(log, "a") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", 1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    compat.print_native_stacks_on_fatal_signals()
    faulthandler.enable(sys.stderr)
    stays_open = open(log, "a")  # noqa: SIM115 - until the process ends
    faulthandler.register(signal.SIGUSR1, file=stays_open, all_threads=True)


def _end_with_parent() -> None:
    """A rank must not outlive the process that started it, whatever it waits for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _next(connection: Connection) -> bytes | None:
    with contextlib.suppress(EOFError, ConnectionError):
        return connection.recv_bytes()
    return None


def _run(data: bytes) -> bytes:
    """Returns the pickled reply: whether the call returned, and its result or what failed."""
    try:
        call: Call = pickle.loads(data)
        os.chdir(call.cwd)
        _reset_state()
        return pickle.dumps((True, call.fn(*call.args, **call.kwargs)))
    except BaseException:  # whatever a test raises, pytest's outcomes included
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _reset_state() -> None:
    torch.compiler.reset()
    _collect_garbage(next(_calls))
    torch.manual_seed(0)
    random.seed(0)


_calls = itertools.count(1)
_CALLS_PER_FULL_COLLECTION = 40


def _collect_garbage(call: int) -> None:
    """Free what the last call has left. What is alive then stays: modules and caches of compilers,
    which are so many objects that a look at them takes longer than most calls.
    """
    if call % _CALLS_PER_FULL_COLLECTION == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
