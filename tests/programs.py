"""Run Python programs in processes that fork from the server of `zpasses.testing.ranks`.

A new interpreter imports torch and its compilers for seconds; a fork has them already. A test of
what a program does runs forks. A test of how a user starts the program runs `subprocess`.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zpasses.testing.ranks.pool import spawner

__all__ = ["ForkedPython", "forked_or_started", "forked_subprocess", "run_program", "start_python"]

forked_or_started = pytest.mark.parametrize(
    "forked",
    [
        pytest.param(True, id="forked"),
        pytest.param(False, id="started", marks=pytest.mark.slow(quick="forked")),
    ],
)
"""Runs a test with forks, and with the command of a user, which takes longer."""


class ForkedPython:
    """A replacement of `subprocess.Popen` for commands that start with `sys.executable`.

    Standard output and standard error go to one file.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: Any,
        stderr: int = subprocess.STDOUT,
        stdin: int = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        start_new_session: bool = True,
        daemon: bool = True,
    ) -> None:
        executable, *words = map(str, command)
        assert executable == sys.executable
        assert stderr == subprocess.STDOUT
        assert stdin == subprocess.DEVNULL
        assert start_new_session
        environment = dict(os.environ if env is None else env)
        self._process = spawner.Process(
            target=_run,
            args=(words, environment, str(cwd or Path.cwd()), stdout.name),
            daemon=daemon,
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class forked_subprocess:
    """A replacement of the module `subprocess` in modules that start Python programs."""

    Popen = ForkedPython
    STDOUT = subprocess.STDOUT
    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired


def start_python(
    *command: object, cwd: Path | None = None, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND...` in a new interpreter. `variables` are added to the environment."""
    arguments = [sys.executable, *map(str, command)]
    env = {**os.environ, **(variables or {})}
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=900, check=False, cwd=cwd, env=env
    )


def run_program(
    *command: object,
    ranks: int | None = None,
    forked: bool = True,
    timeout: float = 900,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run `python COMMAND...` in one process, or in `ranks` processes with the environment
    variables of torchrun. `variables` are added to the environment. If it is not forked, run it as
    a user does, with torchrun for `ranks`.

    Returns the result of each process, or that of the user's command. `stdout` holds standard
    output and standard error of each process.
    """
    if not forked:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
        started_by = torchrun if ranks else ()
        return [start_python(*started_by, *command, cwd=cwd, variables=variables)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = [sys.executable, *map(str, command)]
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        started = []
        for rank in range(ranks or 1):
            of_rank = ranks and {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            with open(Path(folder, f"{rank}.log"), "w") as log:
                started.append(
                    ForkedPython(
                        arguments,
                        stdout=log,
                        env={**os.environ, **(variables or {}), **(of_rank or {})},
                        cwd=cwd,
                        daemon=False,  # it may start processes; it is killed below
                    )
                )
        try:
            for each in started:
                each.wait(max(deadline - time.monotonic(), 0.0))
        finally:
            for each in started:
                each.kill()
        return [
            subprocess.CompletedProcess(
                arguments, each.returncode, Path(folder, f"{rank}.log").read_text(), ""
            )
            for rank, each in enumerate(started)
        ]


def _run(words: list[str], environment: dict[str, str], cwd: str, log: str) -> None:
    os.setsid()
    with open(log, "a") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
