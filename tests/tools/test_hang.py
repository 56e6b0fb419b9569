"""`zpasses hang`: real ranks that stop, files of torch's flight recorder, and damaged files."""

import json
import os
import pickle
import pickletools
import random
import shutil
import signal
import time
import zlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

import zpasses
from tests.cases import some_quick
from tests.tools.limited import run_limited
from tests.zpasses.inspect.graphs import dump_of, gather, graph_of, node, snapshot, wait
from tests.zpasses.inspect.real import dump_training_step
from zpasses.dumps.errors import DumpError
from zpasses.dumps.format import Ref
from zpasses.dumps.limits import Limits
from zpasses.dumps.progress import LINE_BYTES, Progress
from zpasses.inspect import Inspection
from zpasses.inspect.flight_recorder import read_recorder
from zpasses.inspect.plain_pickle import load_plain_pickle
from zpasses.testing import run_in_fresh_ranks, world_mesh
from zpasses.tools.cli.main import cli


def text_and_data(folder, *files):
    done = CliRunner().invoke(cli, ["hang", str(folder), *map(str, files)])
    assert done.exit_code == 0, done.output
    data = CliRunner().invoke(cli, ["hang", str(folder), *map(str, files), "--json"])
    return done.stdout, json.loads(data.stdout)


# --- real ranks -----------------------------------------------------------------------------------
def _stops(folder, when):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    zpasses.shard(model, mesh=world_mesh())
    options = {"codegen": "eager", "agreement_timeout_s": 3, "dump": folder, "zero_stage": 3}
    step = torch.compile(model, backend="zpasses", options=options)
    for number in range(15):
        stops = number == 14 and dist.get_rank() == 1
        if stops and when == "before forward":
            os.kill(os.getpid(), signal.SIGSTOP)
        loss = step(torch.ones(2, 8)).sum()
        if stops and when == "before backward":
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            loss.backward()
        except RuntimeError:
            return "raised"
    return "ended"


@pytest.mark.processes
def test_a_rank_that_stops_is_missing_in_the_collective_of_the_other(tmp_path):
    survivor, _ = run_in_fresh_ranks(
        _stops, str(tmp_path / "dump"), "before backward", timeout_s=90, answers=1
    )
    assert survivor.result == "raised", survivor
    text, data = text_and_data(tmp_path / "dump")
    (group,) = data["groups"]
    assert (group["waiting"], group["missing"], group["unknown"]) == ([0], [1], [])
    waiting, missing = group["ranks"]
    (place,) = waiting["nodes"]
    assert (place["graph"], waiting["collective"]["kind"]) == ("backward", "reduce_scatter")
    assert "2.weight" in place["params"]
    assert "2" in place["modules"]
    assert place["pass"]
    assert [each["graph"] for each in missing["nodes"]] == ["forward"]
    assert missing["collective"]["number"] == group["number"] - 1
    assert missing["activity"] == "after graph 0/0 forward"
    assert "Missing: rank 1 has not started it." in text
    assert "Rank 1 was last seen after graph 0/0 forward" in text


def _trains(folder):
    model = nn.Linear(8, 8)
    zpasses.shard(model, mesh=world_mesh())
    options = {"codegen": "eager", "agreement_timeout_s": 3, "dump": folder, "zero_stage": 3}
    step = torch.compile(model, backend="zpasses", options=options)
    for number in range(2):
        if number and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            step(torch.ones(2, 8)).sum().backward()
        except zpasses.AgreementError:
            return "raised"
    return "ended"


@pytest.mark.processes
@pytest.mark.slow(quick="test_a_rank_that_stops_is_missing_in_the_collective_of_the_other")
def test_ranks_that_wait_in_a_vote_are_told_from_those_in_a_collective(tmp_path):
    survivor, _ = run_in_fresh_ranks(_trains, str(tmp_path / "dump"), timeout_s=90, answers=1)
    assert survivor.result == "raised", survivor
    text, data = text_and_data(tmp_path / "dump")
    assert data["groups"] == []
    assert "Rank 0 waited for other ranks in a vote that failed, and rank 1 did not come." in text


# --- the file of progress -------------------------------------------------------------------------
ROWS = {"a": 1, "b": 2, "c": 3}
"""Rows of the shards of parameters, of four columns. Others have four rows."""


def gathering(*names):
    """A graph that gathers these parameters one after another."""
    nodes = []
    for at, name in enumerate(names):
        shard, start, end = 3 * at, 3 * at + 1, 3 * at + 2
        rows = ROWS.get(name, 4)
        nodes += [
            node(shard, f"{name}_shard", "x", op="placeholder", shape=(rows, 4)),
            gather(start, f"gather_{name}", shard, end, param=name),
            wait(end, name, start),
        ]
    last = node(3 * len(names), "output", "output", ((Ref(0),),), op="output")
    return snapshot(*nodes, last)


def a_dump(**more):
    forward = graph_of("forward", (None, gathering("a", "b", "c")))
    backward = graph_of("backward", (None, gathering("c", "b")))
    return dump_of(forward, backward, **more)


def digest_of(names):
    return f"{zlib.crc32(' '.join(f'gather_{name}' for name in names).encode()):08x}"


def write_progress(folder, rank, *, collectives, waits=None, activity=""):
    """The file of a rank that has run so many collectives of the forward graph."""
    (folder / "progress").mkdir(exist_ok=True)
    written = Progress(folder / "progress" / f"rank{rank}.jsonl", rank, 2)
    written.enter(f"0/0:forward:{digest_of('abc')}", ["gather_a", "gather_b", "gather_c"])
    if activity:
        written.activity(activity)
    for number in range(collectives):
        about = written.started("0", "all_gather", 32)
        written.awaited(about, done=number + 1 != waits)
    return written


def inspection(tmp_path, **more):
    return Inspection(replace(a_dump(**more), path=tmp_path))


@pytest.mark.parametrize(
    ("activities", "said"),
    [
        (
            ("waiting for other ranks at the schedule", "after graph 0/0 forward"),
            "Rank 0 waits for other ranks in a vote, and rank 1 did not come.",
        ),
        (
            (
                "in an error after waiting for other ranks to reach the schedule",
                "in an error after waiting for other ranks to compile",
            ),
            "Ranks 0, 1 waited for other ranks in a vote that failed.",
        ),
        (
            (
                "waiting for other ranks at the schedule",
                "in an error after waiting for other ranks to compile",
            ),
            "Rank 0 waits for other ranks in a vote.\nRank 1 waited for other ranks in a vote that "
            "failed.",
        ),
    ],
    ids=["one waits", "both failed", "one failed"],
)
def test_ranks_whose_vote_failed_do_not_wait(tmp_path, activities, said):
    for rank, activity in enumerate(activities):
        write_progress(tmp_path, rank, collectives=0, activity=activity)
    assert said in str(inspection(tmp_path).hang())


def test_an_activity_before_the_last_collective_is_unknown(tmp_path):
    write_progress(tmp_path, 0, collectives=3, waits=3)
    write_progress(tmp_path, 1, collectives=2, activity="after graph 0/0 forward")
    found = inspection(tmp_path).hang()
    assert "What rank 1 did after its last collective, which started at " in str(found)
    assert "is unknown: with agreement=False" in str(found)
    assert "last seen" not in str(found)
    (about,) = found.data["activities"]
    assert about["outdated_since_s"] >= about["at_s"]


def test_a_run_of_a_graph_is_current_while_its_collectives_start(tmp_path):
    write_progress(tmp_path, 0, collectives=3, waits=3)
    write_progress(tmp_path, 1, collectives=2, activity="running graph 0/0 forward")
    assert "Rank 1 was last seen running graph 0/0 forward" in str(inspection(tmp_path).hang())


def test_ranks_in_a_vote_have_the_node_of_their_last_collective(tmp_path):
    said = "waiting for other ranks at the schedule (group '0', to come to graph 0/0 backward)"
    written = write_progress(tmp_path, 0, collectives=3)
    written.activity(said)
    write_progress(tmp_path, 1, collectives=2).activity("after graph 0/0 forward")
    text = str(inspection(tmp_path).hang())
    assert "Rank 0 waits for other ranks in a vote, and rank 1 did not come." in text
    assert f"Rank 0 was last seen {said}" in text
    assert "0/0 forward gather_c" in text
    assert "0/0 forward gather_b" in text


def test_the_data_has_the_last_collectives_and_the_votes_too(tmp_path):
    write_progress(tmp_path, 0, collectives=3).activity("waiting for other ranks at the schedule")
    write_progress(tmp_path, 1, collectives=2).activity("after graph 0/0 forward")
    data = inspection(tmp_path).hang().data
    assert data["groups"] == []
    last = [
        (each["rank"], each["group"], each["collective"]["number"], each["nodes"][0]["node"])
        for each in data["last_collectives"]
    ]
    assert last == [(0, "0", 3, "gather_c"), (1, "0", 2, "gather_b")]
    assert data["votes"] == {"waiting": [0], "failed": [], "absent": [1]}


def test_the_data_has_the_last_collectives_of_ranks_that_wait(tmp_path):
    for rank in (0, 1):
        write_progress(tmp_path, rank, collectives=2, waits=2)
    data = inspection(tmp_path).hang().data
    assert data["groups"]
    assert [each["nodes"][0]["node"] for each in data["last_collectives"]] == ["gather_b"] * 2
    assert data["votes"] == {"waiting": [], "failed": [], "absent": []}


def test_every_line_of_a_file_of_progress_stays_in_its_place(tmp_path):
    written = write_progress(tmp_path, 0, collectives=3, activity="x" * 1000)
    data = written.path.read_bytes()
    assert len(data) % LINE_BYTES == 0
    assert {len(line) for line in data.split(b"\n")[:-1]} == {LINE_BYTES - 1}
    for number in range(100):
        written.started(f"group {number}", "all_gather", 1)  # more groups than it has lines
    assert len(written.path.read_bytes()) == len(data)


def test_the_group_stands_at_the_lowest_collective_that_a_rank_waits_for(tmp_path):
    write_progress(tmp_path, 0, collectives=3, waits=3)
    write_progress(tmp_path, 1, collectives=2)
    (group,) = inspection(tmp_path).hang().data["groups"]
    assert group["number"] == 3
    assert (group["waiting"], group["missing"]) == ([0], [1])
    nodes = [[each["node"] for each in rank["nodes"]] for rank in group["ranks"]]
    assert nodes == [["gather_c"], ["gather_b"]]


def test_ranks_that_have_all_started_a_collective_wait_for_the_network(tmp_path):
    for rank in (0, 1):
        write_progress(tmp_path, rank, collectives=2, waits=2)
    text = str(inspection(tmp_path).hang())
    assert "All ranks have started it" in text
    assert "Missing" not in text


def test_ranks_without_a_file_are_unknown(tmp_path):
    write_progress(tmp_path, 0, collectives=2, waits=2)
    view = inspection(tmp_path, groups={"0": (0, 1)}).hang()
    assert view.data["groups"][0]["unknown"] == [1]
    assert "Unknown: no file says what rank 1 did" in str(view)


def test_without_any_file_the_page_says_where_they_come_from(tmp_path):
    assert "TORCH_FR_BUFFER_SIZE" in str(inspection(tmp_path).hang())


def test_a_line_that_is_being_written_is_skipped(tmp_path):
    written = write_progress(tmp_path, 0, collectives=1, waits=1)
    data = bytearray(written.path.read_bytes())
    data[LINE_BYTES * 2 : LINE_BYTES * 2 + 3] = b"..."
    written.path.write_bytes(data)
    assert inspection(tmp_path).hang().data["groups"][0]["waiting"] == [0]


# --- the flight recorder --------------------------------------------------------------------------
def recorded(kinds, done, *, ranks="[0, 1]", prefix="nccl:", first=1):
    """What the recorder of a rank writes, of which `done` collectives are completed.

    A kind of one letter is the gather of a parameter.
    """
    entries = [
        {
            "record_id": at,
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": first + at,
            "p2p_seq_id": 0,
            "op_id": first + at,
            "profiling_name": prefix + (GATHER if len(kind) == 1 else kind),
            "time_created_ns": 1_795_393_463_368_724_091 + at,
            "input_sizes": [[ROWS.get(kind, 4), 4]],
            "input_dtypes": ["Float"],
            "output_sizes": [[8, 4]],
            "state": "completed" if at < done else "started",
            "retired": at < done,
            "is_p2p": False,
            "frames": [{"name": "step", "filename": "train.py", "line": 7}],
        }
        for at, kind in enumerate(kinds)
    ]
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {"0": {"last_enqueued_collective": len(kinds)}},
        "entries": entries,
    }


GATHER = "_all_gather_base"


def write_recorder(path, content, form="json"):
    if form == "json":
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
    return path


STEP = "abccb"
"""Forward gathers a, b, c, and backward c, b."""


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_entries_of_the_recorder_are_found_in_the_graphs_by_what_came_before(tmp_path, form):
    kinds = ["broadcast", "all_reduce", *STEP, "all_reduce", *STEP, "all_reduce", *"abccb"]
    for count, expected in ((4, ("forward", "b")), (6, ("backward", "c")), (19, ("backward", "b"))):
        one = write_recorder(tmp_path / "fr_0", recorded(kinds[:count], count - 1), form)
        other = write_recorder(tmp_path / "fr_1", recorded(kinds[: count - 1], count - 1), form)
        (group,) = inspection(tmp_path).hang(one, other).data["groups"]
        assert (group["number"], group["waiting"], group["missing"]) == (count, [0], [1])
        (place,) = group["ranks"][0]["nodes"]
        assert (place["graph"], place["params"]) == (expected[0], [expected[1]])


def test_the_start_of_the_ring_may_be_within_a_graph(tmp_path):
    kinds = [*(STEP * 30)][3:-1]
    one = write_recorder(tmp_path / "fr_0.json", recorded(kinds, len(kinds) - 1, first=1000))
    (group,) = inspection(tmp_path).hang(one).data["groups"]
    (place,) = group["ranks"][0]["nodes"]
    assert (place["graph"], place["node"]) == ("backward", "gather_c")


def test_nodes_that_cannot_be_told_apart_are_all_named(tmp_path):
    dump = replace(dump_of(graph_of("forward", (None, gathering("x", "y")))), path=tmp_path)
    one = write_recorder(tmp_path / "fr_0.json", recorded([GATHER] * 5, 4))
    view = Inspection(dump).hang(one)
    (group,) = view.data["groups"]
    assert [each["node"] for each in group["ranks"][0]["nodes"]] == ["gather_x", "gather_y"]
    assert "gather_x, or one of 1 others" in str(view)


def test_collectives_of_other_sizes_are_no_nodes(tmp_path):
    one = write_recorder(tmp_path / "fr_0.json", recorded([GATHER], 0))
    (group,) = inspection(tmp_path).hang(one).data["groups"]
    assert group["ranks"][0]["nodes"] == []


def test_ranks_that_run_different_collectives_are_named(tmp_path):
    one = write_recorder(tmp_path / "fr_0.json", recorded([GATHER] * 2, 1))
    other = write_recorder(tmp_path / "fr_1.json", recorded([GATHER, "_reduce_scatter_base"], 1))
    view = inspection(tmp_path).hang(one, other)
    assert "rank 0 runs all_gather of 16 elements; rank 1 runs reduce_scatter" in str(view)


def test_members_of_the_group_without_a_file_are_unknown(tmp_path):
    one = write_recorder(tmp_path / "fr_0.json", recorded([GATHER], 0, ranks="[0, 1, 5]"))
    (group,) = inspection(tmp_path).hang(one).data["groups"]
    assert group["unknown"] == [1, 5]


def test_a_node_has_the_pass_that_inserted_it(tmp_path):
    before, after = gathering("a"), gathering("a", "b")
    graph = graph_of("forward", (None, before), ("bucket{cap_mb=1}", after))
    dump = replace(dump_of(graph), path=tmp_path)
    one = write_recorder(tmp_path / "fr_0.json", recorded(["a", "b"], 1))
    (group,) = Inspection(dump).hang(one).data["groups"]
    (place,) = group["ranks"][0]["nodes"]
    assert (place["node"], place["pass"]) == ("gather_b", "bucket")


# --- hostile files --------------------------------------------------------------------------------
class Bad:
    def __reduce__(self):
        return os.mkdir, ("/tmp/zpasses-executed",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Bad()),
        pickle.dumps(Bad(), protocol=0),
        pickle.dumps(Bad, protocol=2),
        pickle.dumps({1, 2}),
        pickle.dumps(bytearray(b"x"), protocol=5),
        b"\x80\x02r\xff\xff\xff\xffN.",  # a number of 32 bits for the memo, of nothing
        b"\x80\x02Nr\xff\xff\xff\xff.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes of 2**63
        b"\x80\x02](h\x00e.",
        # Each list has the one before twice.
        b"\x80\x02]q\x00" + b"".join(b"]q%c(h%ch%ce" % (at + 1, at, at) for at in range(60)) + b".",
        b"\x80\x02" + b"(" * 100_000,
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x02.",
        b"\x80",
        b"\x80\x02\x85.",
        b"\x80\x02K\x01K\x02s.",
    ],
)
def test_pickles_of_anything_but_plain_values_are_refused(tmp_path, data):
    path = tmp_path / "fr_0"
    path.write_bytes(data)
    started = time.process_time()
    with pytest.raises(DumpError):
        read_recorder(path, Limits())
    assert time.process_time() - started < 5
    assert not os.path.exists("/tmp/zpasses-executed")


def test_the_recorder_of_this_torch_is_read(tmp_path):
    """It repeats the same frames in each entry."""
    frames = [{"name": "step", "filename": "train.py", "line": 7}]
    content = recorded([GATHER] * 3, 2)
    for entry in content["entries"]:
        entry["frames"] = frames
    one = write_recorder(tmp_path / "fr_0", content, "pickle")
    assert read_recorder(one, Limits()).groups["0"].waits.number == 3


PLAIN = {"a": [1, -(2**40), 0.5, None, True, False, "text", ("b", ()), {}, {"c": [[]]}], 3: "3"}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_as_they_were(tmp_path, protocol):
    data = pickle.dumps(PLAIN, protocol=protocol)
    assert load_plain_pickle(data, tmp_path) == PLAIN
    slim = pickletools.optimize(data)
    assert load_plain_pickle(slim, tmp_path) == PLAIN


@pytest.mark.parametrize("name", ["recorder", "recorder.json", "fr_0"])
def test_what_is_no_file_of_the_recorder_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text("{}")
    with pytest.raises(DumpError, match="expected"):
        read_recorder(path, Limits())


def damaged(path, draw):
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 3, 10])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])


def check_damaged(tmp_path, seed, count):
    good, commands = recorded([GATHER] * 20, 17), []
    dump_training_step(tmp_path / "whole", rank=0)
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        form = draw.choice(["json", "pickle"])
        dump = tmp_path / f"dump-{number}"
        shutil.copytree(tmp_path / "whole", dump)
        write_progress(dump, 0, collectives=3, waits=3, activity="busy")
        recorder = write_recorder(dump / "fr_1", good, form)
        damaged(draw.choice([recorder, dump / "progress" / "rank0.jsonl"]), draw)
        commands.append(["hang", str(dump), str(recorder)])
    return run_limited(commands)


def test_damaged_files_are_shown_or_refused(tmp_path):
    check_damaged(tmp_path, "quick", 100)


@pytest.mark.slow(quick="test_damaged_files_are_shown_or_refused")
def test_thousands_of_damaged_files_are_shown_or_refused(tmp_path):
    check_damaged(tmp_path, "slow", 3000)


def doubling(times):
    """A pickle of a few bytes per level: a list that holds the list before it twice."""
    data = b"\x80\x02]q\x00"
    for level in range(times):
        data += b"]" + b"q" + bytes([level + 1]) + b"h" + bytes([level]) + b"a"
        data += b"h" + bytes([level]) + b"a"
    return data + b"."


@pytest.mark.parametrize(
    "shape",
    some_quick(
        ["huge", "doubling", "long text", "entries", "brackets"], ["huge", "doubling", "entries"]
    ),
)
@pytest.mark.slow(quick="test_damaged_files_are_shown_or_refused")
def test_recorder_files_that_grow_are_shown_or_refused(tmp_path, shape):
    dump_training_step(tmp_path / "dump", rank=0)
    recorder = tmp_path / "fr_0"
    if shape == "huge":
        with recorder.open("wb") as file:
            file.write(b"{")
            file.truncate(4 << 30)
    elif shape == "entries":
        write_recorder(recorder, recorded([GATHER] * 60_000, 59_000))
    else:
        recorder.write_bytes(
            {
                "doubling": doubling(200),
                "long text": b"\x80\x02X\xff\xff\xff\x7fabc.",
                "brackets": b"[" * (8 << 20),
            }[shape]
        )
    run_limited([["hang", str(tmp_path / "dump"), str(recorder)]])


@pytest.mark.slow(quick="test_damaged_files_are_shown_or_refused")
def test_a_recorder_of_many_equal_collectives_takes_little_time(tmp_path):
    names = [f"p{at}" for at in range(2000)]
    dump = replace(dump_of(graph_of("forward", (None, gathering(*names)))), path=tmp_path)
    one = write_recorder(tmp_path / "fr_0.json", recorded([GATHER] * 5000, 4999))
    started = time.process_time()
    str(Inspection(dump).hang(one))
    assert time.process_time() - started < 5
