"""`zpasses hang`: files of torch's flight recorder, whole, damaged and hostile."""

import json
import os
import pickle
import pickletools
import random
import shutil
import time

import pytest
from click.testing import CliRunner

from tests.tools.damaged import run_all
from tests.zpasses.inspect.graphs import dump_of, gather, graph_of, node, replace, snapshot, wait
from tests.zpasses.inspect.real import dump_training_step
from zpasses.dumps.dump_errors import DumpError
from zpasses.dumps.limits import Limits
from zpasses.dumps.nodes import Ref
from zpasses.inspect import Inspection
from zpasses.inspect.flight_recorder import read_recorder
from zpasses.inspect.plain_pickle import load_plain_pickle
from zpasses.tools.cli.main import cli

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


def inspection(tmp_path, **more):
    return Inspection(replace(a_dump(**more), path=tmp_path))


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


def test_the_command_says_which_rank_is_missing_and_without_files_what_it_needs(tmp_path):
    dump_training_step(tmp_path / "dump", rank=0)
    kinds = ["broadcast", "all_reduce"]
    files = [
        write_recorder(tmp_path / f"fr_{rank}", recorded(kinds[: 2 - rank], 1)) for rank in (0, 1)
    ]

    def said(*arguments):
        done = CliRunner().invoke(cli, ["hang", str(tmp_path / "dump"), *map(str, arguments)])
        assert done.exit_code == 0, done.output
        return " ".join(done.stdout.split())

    assert "Missing: rank 1 has not started it." in said(*files)
    assert json.loads(said(*files, "--json"))["groups"][0]["missing"] == [1]
    assert "TORCH_FR_BUFFER_SIZE=2000 and TORCH_FR_DUMP_TEMP_FILE=PREFIX" in said()
    assert "With gloo, a rank that waits longer than agreement_timeout_s raises an error" in said()


def test_ranks_that_have_all_started_a_collective_wait_for_the_network(tmp_path):
    files = [write_recorder(tmp_path / f"fr_{rank}", recorded("ab", 1)) for rank in (0, 1)]
    text = str(inspection(tmp_path).hang(*files))
    assert "All ranks have started it" in text
    assert "Missing" not in text


def test_the_page_has_the_last_collectives_if_no_rank_waits(tmp_path):
    files = [write_recorder(tmp_path / f"fr_{rank}", recorded("abc", 3)) for rank in (0, 1)]
    view = inspection(tmp_path).hang(*files)
    assert "No rank waits in a collective." in str(view)
    assert "0/0 forward gather_c" in str(view)
    last = [
        (each["rank"], each["group"], each["collective"]["number"], each["nodes"][0]["node"])
        for each in view.data["last_collectives"]
    ]
    assert (view.data["groups"], last) == ([], [(rank, "0", 3, "gather_c") for rank in (0, 1)])


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
    view = inspection(tmp_path).hang(one)
    assert view.data["groups"][0]["unknown"] == [1, 5]
    assert "Unknown: no file says what ranks 1, 5 did" in str(view)


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


def check_damaged(tmp_path, count):
    good, commands = recorded([GATHER] * 20, 17), []
    dump_training_step(tmp_path / "whole", rank=0)
    for number in range(count):
        draw = random.Random(number)
        form = draw.choice(["json", "pickle"])
        dump = tmp_path / f"dump-{number}"
        shutil.copytree(tmp_path / "whole", dump)
        recorder = write_recorder(dump / "fr_1", good, form)
        damaged(recorder, draw)
        commands.append(["hang", str(dump), str(recorder)])
    run_all(commands)


def test_damaged_files_are_shown_or_refused(tmp_path):
    check_damaged(tmp_path, 100)


@pytest.mark.slow(quick="test_damaged_files_are_shown_or_refused")
def test_a_recorder_of_many_equal_collectives_takes_little_time(tmp_path):
    names = [f"p{at}" for at in range(2000)]
    dump = replace(dump_of(graph_of("forward", (None, gathering(*names)))), path=tmp_path)
    one = write_recorder(tmp_path / "fr_0.json", recorded([GATHER] * 5000, 4999))
    started = time.process_time()
    str(Inspection(dump).hang(one))
    assert time.process_time() - started < 5
