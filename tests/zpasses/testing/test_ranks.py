"""Tests of the harness that runs tests on real ranks."""

import ctypes
import os
import re
import signal
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.programs import start_python
from zpasses.testing import RanksError, run_in_fresh_ranks, run_on_ranks

pytestmark = pytest.mark.processes


def _sum_of_ranks(plus):
    value = torch.tensor([float(dist.get_rank() + plus)])
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def _fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("expected failure")
    dist.barrier()


def _assert_first_rank():
    assert [dist.get_rank(), "x"] == [0, "x"]


def _sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(100)


def _die_on(rank):
    print("last words", flush=True)
    if dist.get_rank() == rank:
        os._exit(7)
    return "alive"


def _aborts():
    ctypes.CDLL(None).abort()


def _environment(name):
    return os.environ.get(name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_returns_its_result(ranks):
    total = ranks * (ranks + 1) / 2
    assert run_on_ranks(_sum_of_ranks, 1, ranks=ranks) == [(rank, total) for rank in range(ranks)]


def test_failing_rank_is_shown_and_waiting_ranks_are_killed(monkeypatch):
    run_on_ranks(_sum_of_ranks, 0)  # the ranks have started
    monkeypatch.setenv("ZPASSES_TEST_PATIENCE", "0.2")  # the others are killed within a second
    with pytest.raises(RanksError, match=r"rank 1: failed\n(.*\n)*ValueError: expected failure"):
        run_on_ranks(_fail_on, 1, timeout_s=10_000)
    monkeypatch.undo()
    # The next call gets new processes.
    assert run_on_ranks(_sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def test_failed_assertion_shows_the_values():
    with pytest.raises(RanksError, match=r"AssertionError: assert \[1, 'x'\] == \[0, 'x'\]"):
        run_on_ranks(_assert_first_rank)


def test_a_hanging_rank_is_killed_at_its_multiplied_limit_and_its_stack_is_shown(monkeypatch):
    run_on_ranks(_sum_of_ranks, 0)  # the ranks have started
    monkeypatch.setenv("ZPASSES_TEST_PATIENCE", "0.004")
    with pytest.raises(RanksError, match=r"rank 1 of 2 did not finish within 4 s") as error:
        run_on_ranks(_sleep_on, 1, timeout_s=1000)
    assert re.search(r"rank 1: did not finish\n(.*\n)*.*in _sleep_on", str(error.value))
    for wrong in ("soon", "0", "nan", "inf"):
        monkeypatch.setenv("ZPASSES_TEST_PATIENCE", wrong)
        with pytest.raises(ValueError, match=f"got ZPASSES_TEST_PATIENCE='{wrong}'"):
            run_on_ranks(_sum_of_ranks, 0)


def test_fresh_ranks_report_exit_codes_and_output():
    survivor, dead = run_in_fresh_ranks(_die_on, 1, timeout_s=30)
    assert (survivor.ok, survivor.result, survivor.exit_code is not None) == (True, "alive", True)
    assert (dead.reported, dead.exit_code, dead.output) == (False, 7, "last words\n")


def test_a_fatal_signal_shows_python_and_native_stacks():
    dead, _ = run_in_fresh_ranks(_aborts, timeout_s=30)
    assert dead.exit_code == -signal.SIGABRT
    assert re.search(r"Fatal Python error: Aborted\n(.*\n)*.*in _aborts\n", dead.output)
    assert re.search(r"frame #\d+: abort \+ 0x\w+ in libc", dead.output)


def test_fresh_ranks_get_their_environment():
    name = "SOME_SETTING"
    fresh = run_in_fresh_ranks(_environment, name, env={name: "on"})
    assert [each.result for each in fresh] == ["on", "on"]
    assert run_on_ranks(_environment, name) == [None, None]


def _deletes_its_log():
    Path(os.readlink("/proc/self/fd/1")).unlink()
    return _die_on(1)


def test_a_rank_without_a_log_has_no_output():
    alive, dead = run_in_fresh_ranks(_deletes_its_log, timeout_s=30)
    assert (alive.result, alive.output) == ("alive", "")
    assert (dead.exit_code, dead.output) == (7, "")


# --- programs ------------------------------------------------------------------------------------
SCRIPT = """
from dataclasses import dataclass

import torch.distributed as dist

from zpasses.testing import run_in_fresh_ranks, run_on_ranks


@dataclass
class Answer:
    rank: int


def answer():
    print("asked")
    return Answer(dist.get_rank())


{guard}
    print(run_on_ranks(answer))
    print([(each.result, each.output) for each in run_in_fresh_ranks(answer)])
"""


def _run_script(folder, guard):
    script = folder / "script.py"
    script.write_text(SCRIPT.format(guard=guard))
    return start_python(script)


@pytest.mark.slow(quick="test_every_rank_returns_its_result")
def test_a_script_runs_its_own_functions(tmp_path):
    done = _run_script(tmp_path, 'if __name__ == "__main__":')
    assert done.stdout.splitlines() == [
        "[Answer(rank=0), Answer(rank=1)]",
        "[(Answer(rank=0), 'asked\\n'), (Answer(rank=1), 'asked\\n')]",
    ], done


@pytest.mark.slow(quick="test_functions_of_a_program_without_a_file_are_refused")
def test_a_script_that_the_ranks_cannot_import_is_told_why(tmp_path):
    done = _run_script(tmp_path, "if True:")
    assert done.returncode == 1
    assert "RanksError: rank 0 of 2 died with exit code 1" in done.stderr
    assert 'below `if __name__ == "__main__":`' in done.stderr


@pytest.mark.parametrize("file", ["<stdin>", None])
def test_functions_of_a_program_without_a_file_are_refused(monkeypatch, file):
    main = types.ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(_sum_of_ranks, "__module__", "__main__")
    for call in (run_on_ranks, run_in_fresh_ranks):
        with pytest.raises(ValueError, match="the ranks cannot import"):
            call(_sum_of_ranks, 0)


PROJECT = """
import pytest
import torch.distributed as dist

from zpasses.testing import run_on_ranks


def meet(x):
    dist.barrier()
    assert x < 3, "too many"
    return x


@pytest.mark.parametrize("x", range(4))
def test_ranks_meet(x):
    assert run_on_ranks(meet, x) == [x, x]
"""


@pytest.mark.slow(quick="test_failed_assertion_shows_the_values")
def test_a_project_of_its_own_runs_in_parallel(tmp_path):
    (tmp_path / "test_project.py").write_text(PROJECT)
    done = start_python("-m", "pytest", "-n", "2", cwd=tmp_path)
    assert "1 failed, 3 passed" in done.stdout, done.stdout
    assert re.search(r"AssertionError: too many\nE +assert 3 < 3\n", done.stdout), done.stdout
    assert "def run_on_ranks" not in done.stdout, "the traceback ends in the test"
