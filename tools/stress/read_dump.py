"""A process without torch that reads dumps with every command, each in a fork of its own with
bounds on time and memory. `Readers` starts it, and hands it one dump after another.

It also notices what no command may do: print a character that steers a terminal, forge a line, end
an element of the page, and open a file that is neither in the dump nor a part of Python.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from click.testing import CliRunner

from zpasses.tools.cli.main import cli
from zpasses.tools.stress.cases import Outcome

__all__ = ["CPU_LIMIT_S", "FORGED", "MEMORY_LIMIT_MB", "Readers", "Reading"]

CPU_LIMIT_S = 5.0
"""CPU time that one command may take."""
MEMORY_LIMIT_MB = 500
"""Resident memory that a process may take."""
_ADDRESS_SPACE = 4 << 30
FORGED = "FORGED"
"""A dump that tries to forge a line has this word at its start."""

_COMMANDS = ("list", "show", "diff", "collectives", "memory", "timeline", "html")
_WITH_OUTPUT = ("timeline", "html")


@dataclass(frozen=True)
class Reading:
    """What the commands made of one dump."""

    outcome: Outcome
    detail: str
    seconds: float
    """Of CPU time, by the slowest command."""
    memory_mb: float


class Readers:
    """The process. Use it as a context manager."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", __name__)) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def read(
        self, dump: Path, output: Path, limit_s: float, commands: Sequence[str] = _COMMANDS
    ) -> Reading:
        """Read a dump with every command.

        Args:
            output: folder for the files that commands write.
            limit_s: wall time of all commands together.
        """
        job = {
            "dump": str(dump), "output": str(output), "limit_s": limit_s, "commands": list(commands)
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that reads dumps ended")
        return Reading(**json.loads(answer))


# --- in the process -------------------------------------------------------------------------------
def serve() -> None:
    """Answer each job on standard input with a Reading on standard output."""
    _warm_up()
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(asdict(_in_fork(job))), flush=True)


def _warm_up() -> None:
    """Import what commands import when they run, so that the forks inherit it."""
    for module in ("jinja2", "tabulate", "zpasses.inspect.report"):
        importlib.import_module(module)


def _in_fork(job: dict[str, Any]) -> Reading:
    """Run the commands in one fork, and check what they wrote in another, which has no bounds."""
    read = _result_of_fork(lambda progress: _read_all(job, progress), job)
    if read.memory_mb > MEMORY_LIMIT_MB and read.outcome in ("equal", "refused"):
        read = replace(read, outcome="hang", detail=f"it took {read.memory_mb:.0f} MB")
    if read.outcome not in ("equal", "refused"):
        return read
    checked = _result_of_fork(lambda _: _check_all(job), job)
    return read if checked.outcome == "equal" else replace(checked, seconds=read.seconds)


def _result_of_fork(work: Callable[[Path], Reading], job: dict[str, Any]) -> Reading:
    progress = Path(job["output"], "progress")
    progress.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            found = work(progress)
        except BaseException:
            found = Reading("crash", traceback.format_exc()[-1500:], 0, 0)
        progress.write_text(json.dumps(asdict(found)))
        os._exit(0)
    end = time.monotonic() + job["limit_s"]
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.wait4(child, 0)
            return Reading("hang", f"after {job['limit_s']:.0f} s: {_text(progress)}", 0, 0)
        time.sleep(0.005)
    seconds, memory = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        outcome: Outcome = "hang" if number == signal.SIGXCPU else "crash"
        name = signal.Signals(number).name
        return Reading(outcome, f"{name} in the command {_text(progress)}", seconds, memory)
    return replace(Reading(**json.loads(_text(progress))), memory_mb=memory)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else "(none)"


def _read_all(job: dict[str, Any], progress: Path) -> Reading:
    dump, output = job["dump"], Path(job["output"])
    slowest, refusals = 0.0, []
    with _watched_files(Path(dump), output) as opened:
        for command in job["commands"]:
            progress.write_text(command)
            arguments = [command, dump]
            if command in _WITH_OUTPUT:
                arguments += ["-o", str(output / f"{command}.out")]
            used = time.process_time()
            _limit_cpu(used + 2 * CPU_LIMIT_S)
            done = CliRunner().invoke(cli, arguments)
            took = time.process_time() - used
            slowest = max(slowest, took)
            if took > CPU_LIMIT_S:
                return Reading("hang", f"{command} took {took:.1f} s of CPU time", slowest, 0)
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                text = "".join(traceback.format_exception(*cast(Any, done.exc_info)))
                return Reading("crash", f"{command}: {text[-1500:]}", slowest, 0)
            if opened:
                return Reading("wrong", f"{command}: {opened[0]}", slowest, 0)
            (output / f"{command}.txt").write_bytes(done.stdout_bytes + done.stderr_bytes)
            if done.exit_code == 2:
                refusals.append(f"{command}: {done.output.strip()[-400:]}")
            del done
            gc.collect()  # a real command has a process of its own
    if refusals:
        return Reading("refused", refusals[0], slowest, 0)
    return Reading("equal", "every command shows it", slowest, 0)


def _check_all(job: dict[str, Any]) -> Reading:
    """Check what `_read_all` wrote."""
    for command in job["commands"]:
        for suffix in (".txt", ".out"):
            file = Path(job["output"], command + suffix)
            text = file.read_bytes().decode() if file.exists() else ""
            wrong = _forbidden(text) or (_forbidden_data(text) if suffix == ".out" else "")
            if wrong:
                return Reading("wrong", f"{command}: {wrong}", 0, 0)
    return Reading("equal", "", 0, 0)


def _limit_cpu(seconds: float) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, hard))


# --- what no command may do -----------------------------------------------------------------------
_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
_ENDS_ELEMENT = re.compile(rf"</script>\s*<script>{FORGED}")
_FORGED_LINE = re.compile(rf"^{FORGED}", re.MULTILINE)
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def _forbidden(text: str) -> str:
    """A character or line of an output that a dump has no right to, or an empty text."""
    unusual = {
        char for char in set(text) - {"\n", "\t"} if unicodedata.category(char) in _CATEGORIES
    }
    if unusual:
        return f"the output has {', '.join(sorted(map(ascii, unusual)))}"
    return "the output has a forged line" if _FORGED_LINE.search(text) else ""


def _forbidden_data(text: str) -> str:
    """As `_forbidden`, for the texts in the data of a page or of a trace."""
    match = _DATA.search(text)
    if match and _ENDS_ELEMENT.search(text):
        return "the page has a forged element"
    source = match[1] if match else text if text.startswith("{") else ""
    queue = [json.loads(source)] if source else []
    while queue:
        value = queue.pop()
        if isinstance(value, str) and (found := _forbidden(value)):
            return f"in its data, {found}: {value[:200]!r}"
        if isinstance(value, dict):
            queue += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            queue += [each for each in value if isinstance(each, (str, dict, list))]
    return ""


@contextlib.contextmanager
def _watched_files(dump: Path, output: Path) -> Iterator[list[str]]:
    """Yields a list of what was opened without right. It grows, and watching never ends, so call
    this in a fork.
    """
    found: list[str] = []
    inside, writable = os.path.realpath(dump), os.path.realpath(output)
    python = {os.path.realpath(each) for each in (sys.prefix, sys.base_prefix, *sys.path) if each}
    python.add(os.path.realpath(Path(__file__).parents[2]))

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.scandir", "os.listdir", "os.remove", "os.rename", "os.mkdir"):
            return
        path = arguments[0]
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # a descriptor
        real = os.path.realpath(os.fsdecode(path))
        flags = arguments[2] if event == "open" else 0
        writes = event not in ("open", "os.scandir", "os.listdir") or bool(
            flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if _is_below(real, [writable]) or real == os.devnull:
            return
        if writes or not _is_below(real, [inside, *python]):
            found.append(f"{event} of {real}")

    sys.addaudithook(watch)
    yield found


def _is_below(path: str, folders: Sequence[str] | set[str]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


if __name__ == "__main__":
    serve()
