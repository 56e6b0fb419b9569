"""Trials of vector instructions: in a thread, stored for later processes of the same machine."""

import os
import platform
import subprocess
import sys
import threading

import filelock
import pytest
import torch
from torch import nn
from torch._inductor import config, cpu_vec_isa

import zpasses
from zpasses import compat
from zpasses.backend.cache import vector_instructions as trials
from zpasses.compat import vector_instructions
from zpasses.pipeline.options import Options
from zpasses.testing import run_in_fresh_ranks, world_mesh

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="Inductor tries x86 instructions only"
)


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """The threads that try instructions, which all work. The compile cache is empty."""
    threads = []

    def works(self, code):
        threads.append(threading.current_thread())
        return True

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", works)
    monkeypatch.setenv("ZPASSES_CACHE_DIR", str(tmp_path / "cache"))
    with config.patch({"cpp.vec_isa_ok": None}):
        forget()
        yield threads
        trials.finish_vector_instruction_trials()
    forget()


def forget():
    """As in a new process."""
    vector_instructions._forget(cpu_vec_isa)


def chosen():
    """The choice of this process; None if it has none."""
    has_one = cpu_vec_isa.valid_vec_isa_list.cache_info().currsize
    return vector_instructions._working(cpu_vec_isa) if has_one else None


def try_now(stored=True):
    trials.begin_vector_instruction_trials(Options(cache=stored))
    trials.finish_vector_instruction_trials()
    return chosen()


def stored_files(tmp_path):
    folder = tmp_path / "cache" / "v1" / "vector-instructions"
    return [each for each in folder.iterdir() if each.name != "lock"] if folder.exists() else []


def test_trials_run_beside_the_compile(tried, tmp_path):
    found = try_now(stored=False)
    assert tried
    assert threading.current_thread() not in tried
    assert stored_files(tmp_path) == []
    forget()
    assert cpu_vec_isa.valid_vec_isa_list()  # Inductor's own trials
    assert chosen() == found
    assert tried[-1] is threading.current_thread()


def test_a_later_process_reads_what_the_first_found(tried, tmp_path):
    found = try_now()
    assert len(stored_files(tmp_path)) == 1
    forget()
    tried.clear()
    assert try_now() == found
    forget()
    trials.recall_vector_instructions(Options())
    assert chosen() == found
    assert tried == []


@pytest.mark.parametrize("damage", ["no such file", "cut", "no JSON", "other JSON"])
def test_a_damaged_file_is_tried_again(tried, tmp_path, damage):
    found = try_now()
    (file,) = stored_files(tmp_path)
    if damage == "no such file":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-3])
    else:
        data = {"no JSON": b"}", "other JSON": b"[1, 2]"}[damage]
        trials._files().write(file.name, data)
    forget()
    tried.clear()
    trials.recall_vector_instructions(Options())
    assert compat.must_try_vector_instructions()
    assert try_now() == found
    assert tried
    assert len(stored_files(tmp_path)) == 1


def test_a_process_waits_for_the_trials_of_another(tried, tmp_path):
    found = try_now()
    (file,) = stored_files(tmp_path)
    data = file.read_bytes()
    file.unlink()
    forget()
    tried.clear()
    with filelock.FileLock(file.parent / "lock"):
        trials.begin_vector_instruction_trials(Options())
        file.write_bytes(data)
    trials.finish_vector_instruction_trials()
    assert chosen() == found
    assert tried == []


def test_a_process_waits_as_long_as_a_vote(tried):
    found = try_now()
    folder = trials._files().folder
    for file in folder.iterdir():
        file.unlink()
    forget()
    with filelock.FileLock(folder / "lock"):
        trials.begin_vector_instruction_trials(Options(agreement_timeout_s=0.05))
        trials.finish_vector_instruction_trials()
    assert chosen() == found


@pytest.mark.parametrize("killed", [True, False])
def test_a_failed_trial_is_not_stored_and_leaves_it_to_inductor(
    tried, tmp_path, monkeypatch, killed
):
    def fails(self, code):
        if not killed:
            raise RuntimeError("no compiler")
        return False

    with monkeypatch.context() as patched:
        patched.setattr(cpu_vec_isa.VecISA, "check_build", fails)
        assert try_now() is None
        assert stored_files(tmp_path) == []
        assert compat.must_try_vector_instructions()
    assert try_now() is not None


def test_settings_of_the_compile_hold_if_trials_began_before(tried):
    trials.begin_vector_instruction_trials(Options(cache=False))
    with config.patch({"cpp.vec_isa_ok": False}):
        trials.finish_vector_instruction_trials()
        assert cpu_vec_isa.valid_vec_isa_list() == []


@pytest.mark.slow(quick="the other tests of test_vector_instructions.py")
def test_a_program_ends_without_waiting_for_trials(tmp_path):
    """Another process holds the lock."""
    folder = tmp_path / "v1" / "vector-instructions"
    folder.mkdir(parents=True)
    program = (
        "from zpasses.backend.cache import vector_instructions as trials\n"
        "from zpasses.pipeline.options import Options\n"
        "trials.begin_vector_instruction_trials(Options())\n"
        "assert trials._trials is not None\n"
    )
    unset = ("TORCHINDUCTOR_VEC_ISA_OK",)
    env = {name: value for name, value in os.environ.items() if name not in unset}
    with filelock.FileLock(folder / "lock"):
        subprocess.run(
            [sys.executable, "-c", program],
            env={**env, "ZPASSES_CACHE_DIR": str(tmp_path)},
            timeout=900,
            check=True,
        )


def _begins_trials(options):
    """What began trials in a compile with these options of Inductor, and which choice was made."""
    config.cpp.vec_isa_ok = None
    forget()
    begun = []
    trials._Trials = lambda stored: begun.append(stored)
    model = zpasses.shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), mesh=world_mesh())
    zpasses.compile_blocks(model, "0", inductor=options, cache=False)
    model(torch.ones(2, 2)).sum().backward()
    return begun, list(map(str, cpu_vec_isa.valid_vec_isa_list()))


@pytest.mark.slow(quick="test_nothing_is_tried_that_the_user_decides")
@pytest.mark.inductor
def test_an_option_that_decides_is_kept():
    (rank,) = run_in_fresh_ranks(_begins_trials, {}, ranks=1)
    assert rank.ok, rank
    begun, works = rank.result
    assert begun == [False, False]  # by compile_blocks and by the backend; it is not stored
    assert works
    (rank,) = run_in_fresh_ranks(_begins_trials, {"cpp.vec_isa_ok": False}, ranks=1)
    assert rank.ok, rank
    assert rank.result == ([], [])


def test_folders_are_for_this_user_only(tried, tmp_path):
    try_now()
    for path in (tmp_path / "cache").rglob("*"):
        assert not path.stat().st_mode & 0o077, path


def test_nothing_is_tried_that_the_user_decides(tried):
    with config.patch({"cpp.vec_isa_ok": False}):
        assert try_now() is None
    assert tried == []
