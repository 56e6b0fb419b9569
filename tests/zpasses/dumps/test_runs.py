"""Tests of the folder of a dump: it holds one run."""

import json
import re

import pytest

from tests.zpasses.inspect.real import dump_training_step
from zpasses.dumps import OtherRunError, read, runs
from zpasses.dumps.reader import HEADER
from zpasses.dumps.runs import create_rank_folder


@pytest.fixture
def another_process(monkeypatch):
    """Makes the following calls those of another run."""

    def switch(name="another"):
        monkeypatch.setattr(runs, "_runs", {})
        monkeypatch.setattr(runs, "_claimed", set())
        monkeypatch.setattr(runs, "_PROCESS", name)

    return switch


def test_the_dump_of_another_run_is_refused(tmp_path, monkeypatch):
    folder = create_rank_folder(tmp_path, 0, 2)
    assert create_rank_folder(tmp_path, 0, 2) == folder  # another compile of this run
    create_rank_folder(tmp_path, 1, 2)
    monkeypatch.setattr(runs, "_claimed", set())  # as in a process that shares the store
    with pytest.raises(OtherRunError, match=r"another run, which wrote rank0.*name a new folder"):
        create_rank_folder(tmp_path, 0, 2)
    with pytest.raises(OtherRunError, match=r"another run on 2 ranks; this run has 4"):
        create_rank_folder(tmp_path, 2, 4)
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["rank0", "rank1", HEADER]


def test_forks_of_one_process_are_runs_of_their_own(tmp_path, another_process, monkeypatch):
    create_rank_folder(tmp_path, 0, 2)
    another_process(runs._PROCESS)
    monkeypatch.setattr(runs.os, "getpid", lambda: -1)
    with pytest.raises(OtherRunError, match="another run"):
        create_rank_folder(tmp_path, 1, 2)


def test_two_runs_never_share_a_dump_although_they_write_other_ranks(tmp_path, another_process):
    create_rank_folder(tmp_path, 0, 2)
    created = json.loads((tmp_path / HEADER).read_text())["created"]
    another_process()
    with pytest.raises(OtherRunError, match=rf"run, of {re.escape(created)}.*or name a new"):
        create_rank_folder(tmp_path, 1, 2)
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["rank0", HEADER]


def test_of_two_runs_that_start_at_once_one_gets_the_folder(tmp_path, another_process, monkeypatch):
    meant = runs.write

    def meanwhile(path, lines):
        """Another run writes its header first."""
        monkeypatch.setattr(runs, "write", meant)
        another_process("first")
        create_rank_folder(tmp_path, 0, 2)
        meant(path, lines)

    monkeypatch.setattr(runs, "write", meanwhile)
    with pytest.raises(OtherRunError, match="another run"):
        create_rank_folder(tmp_path, 1, 2)
    assert json.loads((tmp_path / HEADER).read_text())["run"].startswith("first")
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["rank0", HEADER]


def test_a_dump_without_the_id_of_its_run_is_another_run(tmp_path, another_process):
    create_rank_folder(tmp_path, 0, 2)
    header = json.loads((tmp_path / HEADER).read_text())
    del header["run"]  # as an earlier version wrote it
    (tmp_path / HEADER).write_text(json.dumps(header))
    assert read(tmp_path).meta["world"] == 2
    with pytest.raises(OtherRunError, match="another run"):
        create_rank_folder(tmp_path, 1, 2)


def test_two_models_of_one_run_share_a_dump(tmp_path):
    dump_training_step(tmp_path)
    dump_training_step(tmp_path)
    assert len(read(tmp_path).ranks[0].compiles) == 2
