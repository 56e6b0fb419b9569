"""Trials of vector instructions: in a thread, stored for later processes of the same machine."""

import platform
import threading

import filelock
import pytest
from torch._inductor import config, cpu_vec_isa

from zpasses import compat
from zpasses.backend.cache import vector_instructions as trials
from zpasses.compat import vector_instructions
from zpasses.ranks.vote import vote_timeout

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


def try_now(stored=True):
    trials.begin_vector_instruction_trials(stored=stored)
    trials.finish_vector_instruction_trials()
    return compat.known_vector_instructions()


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
    assert compat.known_vector_instructions() == found
    assert tried[-1] is threading.current_thread()


def test_a_later_process_reads_what_the_first_found(tried, tmp_path):
    found = try_now()
    assert len(stored_files(tmp_path)) == 1
    forget()
    tried.clear()
    assert try_now() == found
    forget()
    trials.recall_vector_instructions()
    assert compat.known_vector_instructions() == found
    assert tried == []


def test_a_graph_that_is_stored_stores_what_inductor_found(tried, tmp_path):
    trials.store_vector_instructions()
    assert stored_files(tmp_path) == []  # nothing is known
    assert cpu_vec_isa.valid_vec_isa_list()
    found = compat.known_vector_instructions()
    trials.store_vector_instructions()
    forget()
    tried.clear()
    trials.recall_vector_instructions()
    assert compat.known_vector_instructions() == found
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
    trials.recall_vector_instructions()
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
        trials.begin_vector_instruction_trials(stored=True)
        file.write_bytes(data)
    trials.finish_vector_instruction_trials()
    assert compat.known_vector_instructions() == found
    assert tried == []


def test_a_process_waits_as_long_as_a_vote(tried):
    found = try_now()
    folder = trials._files().folder
    for file in folder.iterdir():
        file.unlink()
    forget()
    with filelock.FileLock(folder / "lock"), vote_timeout(0.05):
        assert try_now() == found


def test_a_failed_trial_leaves_it_to_inductor(tried, monkeypatch):
    def fails(self, code):
        raise RuntimeError("no compiler")

    with monkeypatch.context() as patched:
        patched.setattr(cpu_vec_isa.VecISA, "check_build", fails)
        assert try_now() is None
    assert compat.must_try_vector_instructions()
    assert cpu_vec_isa.valid_vec_isa_list()


def test_nothing_is_tried_that_the_user_decides(tried):
    with config.patch({"cpp.vec_isa_ok": False}):
        assert try_now() is None
    assert tried == []
