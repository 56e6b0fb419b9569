"""Runs a user's program, with all the processes that it starts, within a time limit."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zpasses.errors import ZpassesError
from zpasses.probe import Request, all_reported, write_request

_TAIL_LINES = 60  # the report of torchrun takes 40 at its end
_POLL_S = 0.2


class ProgramError(ZpassesError):
    """A program cannot be started."""


def with_own_interpreter(command: Sequence[str]) -> list[str]:
    """Returns the command with this environment's interpreter and torchrun, which may not be on
    PATH: `train.py ...` or `torchrun ... train.py ...`.
    """
    if command[0].endswith(".py"):
        return [sys.executable, *command]
    if command[0] == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    return list(command)


def run_limited(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float,
    finished: Callable[[], bool] | None = None,
) -> tuple[str | None, str]:
    """Run a program until it ends, its time is over, or it has done what is wanted.

    Args:
        command: the program and its arguments.
        environment: its environment variables.
        log: file for its output.
        timeout_s: seconds after which it is killed.
        finished: whether it has done what is wanted; it is killed then.

    Returns:
        What went wrong (None if nothing), and the last lines of the output.

    Raises:
        ProgramError: if there is no such program.
    """
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ProgramError(
                f"{command[0]} cannot be run: {error.strerror}; expected a Python file or a "
                "command, with its arguments."
            ) from error
        try:
            failure = _wait(process, timeout_s, finished)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # the process group includes the ranks that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    return failure, "\n".join(lines[-_TAIL_LINES:])


def run_probed(
    command: Sequence[str],
    request: Request,
    folder: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    *,
    until_reported: bool = True,
) -> tuple[str | None, str]:
    """Run a training program with a request for zpasses, as `run_limited` does.

    Args:
        folder: an empty folder for the request, the reports and the file `log.txt`.
        environment: further environment variables.
        until_reported: kill the program when all ranks have written their reports.
    """
    return run_limited(
        with_own_interpreter(command),
        {**os.environ, **(environment or {}), **write_request(folder, request)},
        folder / "log.txt",
        timeout_s,
        functools.partial(all_reported, folder) if until_reported else None,
    )


def _wait(
    process: subprocess.Popen[bytes], timeout_s: float, finished: Callable[[], bool] | None
) -> str | None:
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        try:
            status = process.wait(left if finished is None else min(left, _POLL_S))
        except subprocess.TimeoutExpired:
            if finished is not None and finished():
                return None
            continue
        if status == 0:
            return None
        return (
            f"ended with status {status}"
            if status > 0
            else f"died of {signal.Signals(-status).name}"
        )
    return f"did not end within {timeout_s:g} s"
