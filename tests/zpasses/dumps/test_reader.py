"""Tests of untrusted dumps: every defect is a DumpError, and nothing outside is read."""

import gc
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import zpasses
from zpasses.dumps import (
    DamagedDumpError,
    DumpError,
    DumpPathError,
    DumpTooLargeError,
    DumpVersionError,
    Limits,
    NotADumpError,
    format,
    nodes,
    read,
)
from zpasses.testing import fake_world


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "dump"
    with fake_world(2) as mesh:
        model = zpasses.shard(nn.Linear(4, 3), mesh=mesh)
        step = torch.compile(
            model, backend="zpasses", options={"zero_stage": 3, "codegen": "eager", "dump": folder}
        )
        step(torch.ones(2, 4)).sum().backward()
    return folder


@pytest.fixture
def dump(original, tmp_path):
    shutil.copytree(original, tmp_path / "dump")
    return tmp_path / "dump"


def read_all(folder, limits=None):
    found = read(folder, limits)
    compiles = [each for rank in found.ranks.values() for each in rank.compiles]
    graphs = [graph for each in compiles for graph in each.graphs.values()]
    return found, [step.snapshot for graph in graphs for step in graph.steps]


def compile_folder(folder):
    (found,) = (folder / "rank0").iterdir()
    return found


def test_a_copied_dump_reads_the_same(original, dump):
    found, snapshots = read_all(dump)
    assert snapshots == read_all(original)[1]
    assert list(found.ranks) == [0]
    assert found.meta["world"] == 2


def test_no_garbage_is_collected_while_a_graph_is_read(dump):
    (compiled,) = read(dump).ranks[0].compiles
    step = compiled.graphs["joint"].steps[0]
    collections, thresholds = [], gc.get_threshold()

    def count(phase, info):
        collections.append(phase)

    gc.callbacks.append(count)
    gc.set_threshold(1)
    try:
        step.snapshot
        while_read = len(collections)
        kept = [[] for _ in range(1000)]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(count)
    assert len(collections) - while_read > len(kept) / 10, "the threshold has no effect"
    assert while_read < 20, "once for each few objects"
    assert gc.isenabled()


@pytest.mark.parametrize(
    "name",
    ["zpasses-dump.json", "compile.json", "events.jsonl", "000-captured.jsonl", "sources.json"],
)
def test_a_link_is_refused_and_not_followed(dump, tmp_path, name):
    path = dump / name if name == "zpasses-dump.json" else compile_folder(dump) / name
    secret = tmp_path / "secret"
    shutil.move(path, secret) if path.exists() else secret.write_text("{}")
    path.symlink_to(secret)
    with pytest.raises(DumpPathError, match="symbolic link"):
        read_all(dump)


@pytest.mark.parametrize("name", ["rank0", "compile"])
def test_a_linked_folder_is_refused(dump, tmp_path, name):
    folder = dump / "rank0" if name == "rank0" else compile_folder(dump)
    shutil.move(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DumpPathError, match="symbolic link"):
        read(dump)


def test_a_pipe_is_refused_and_not_waited_for(dump):
    path = compile_folder(dump) / "events.jsonl"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DumpPathError, match="pipe"):
        read(dump)


def test_a_truncated_file_is_named(dump):
    path = next(compile_folder(dump).glob("*-joint.jsonl"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedDumpError, match=rf"{path.name}.*truncated"):
        read_all(dump)
    path.unlink()
    with pytest.raises(DamagedDumpError, match=r"events.jsonl, line 2: snapshot 1 is missing"):
        read(dump)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Limits(file_bytes=100), r"bytes, more than the limit of 100 \(Limits\(file_bytes=...\)"),
        (Limits(line_bytes=200), r"line \d: the line has more bytes than the limit of 200 "),
        (Limits(nodes=3), "has more nodes than the limit of 3 "),
        (Limits(entries=4), "has more entries than the limit of 4 "),
        (Limits(name_chars=4), "'graph' has .* characters, more than the limit of 4 "),
    ],
)
def test_content_beyond_the_limits_is_refused(dump, limits, text):
    with pytest.raises(DumpTooLargeError, match=text):
        read_all(dump, limits)


@pytest.mark.parametrize("depth", [100, 200_000])
def test_deep_nesting_is_refused(dump, depth):
    info = compile_folder(dump) / "compile.json"
    info.write_text(info.read_text().strip()[:-1] + ',"more":' + "[" * depth + "]" * depth + "}\n")
    with pytest.raises(DumpError, match=r"deeper|recursion"):
        read(dump)


def test_lone_surrogates_and_non_finite_numbers_are_refused(dump):
    info = compile_folder(dump) / "compile.json"
    for bad in (r'"\ud800"', "NaN", "Infinity"):
        text = info.read_text()
        info.write_text(text.strip()[:-1] + f',"more":{bad}' + "}\n")
        with pytest.raises(DamagedDumpError, match="is not JSON"):
            read(dump)
        info.write_text(text)


def test_numbers_out_of_range_are_refused(dump):
    events = compile_folder(dump) / "events.jsonl"
    text = events.read_text()
    for bad in ("9" * 400, "1e400", "-1"):
        events.write_text(re.sub(r'"time_us":[\d.]+', f'"time_us":{bad}', text))
        with pytest.raises(
            DamagedDumpError, match=r"'run.time_us': (expected `float` >= 0|number out)"
        ):
            read(dump)


def test_two_snapshots_with_the_same_number_are_refused(dump):
    folder = compile_folder(dump)
    shutil.copy(folder / "000-captured.jsonl", folder / "000-other.jsonl")
    with pytest.raises(DamagedDumpError, match="have the same number"):
        read(dump)


def test_unknown_events_and_files_are_ignored(dump):
    folder = compile_folder(dump)
    with (folder / "events.jsonl").open("a") as events:
        events.write('{"event": "music", "loud": true}\n')
    (folder / "notes.txt").write_text("mine")
    (dump / "report.html").write_text("<p>")
    (dump / "rank0x").mkdir()
    compiled = read(dump).ranks[0].compiles[0]
    assert compiled.graphs.keys() >= {"joint", "forward"}


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (2, r"Run the program again with this zpasses, or read the dump with zpasses 9\.9"),
        (4, r"Update zpasses \(pip install -U"),
    ],
)
def test_a_dump_of_another_version_is_refused_with_advice(dump, version, advice):
    header = json.loads((dump / "zpasses-dump.json").read_text())
    header |= {"version": version, "zpasses": "9.9"}
    (dump / "zpasses-dump.json").write_text(json.dumps(header))
    expected = rf"version {version}, written by zpasses 9\.9; this zpasses reads version 3\. "
    with pytest.raises(DumpVersionError, match=expected + advice):
        read(dump)


def test_the_page_on_the_format_lists_the_fields_that_are_declared():
    page = Path(__file__, "../../../../docs/dump-format.md").resolve().read_text()
    for name, kind in {**vars(format), **vars(nodes)}.items():
        fields = getattr(kind, "__struct_encode_fields__", ())
        if fields and name not in ("Ref", "Repr", "Items"):
            (row,) = re.findall(rf"^\| `{name}` \|.*", page, re.M)
            missing = [field for field in fields if f"`{field}`" not in row]
            assert not missing, (name, missing)


def test_a_path_that_is_no_dump_suggests_a_nearby_dump(dump, tmp_path):
    for path, text in [
        (tmp_path / "nothing", "does not exist"),
        (dump / "zpasses-dump.json", "is a file"),
        (tmp_path, "its folder dump is a dump"),
        (dump / "rank0", "is a dump"),
    ]:
        with pytest.raises(NotADumpError, match=text):
            read(path)
    (dump / "zpasses-dump.json").write_text('{"format": "zip"}')
    with pytest.raises(NotADumpError, match=r"'zip'; expected 'zpasses-dump'"):
        read(dump)
