"""Damaged and hostile dumps: every command shows them or refuses them, without a traceback."""

import contextlib
import gzip
import json
import random
import shutil

import pytest
from click.testing import CliRunner

from tests.tools.damaged import run_all
from tests.zpasses.inspect.real import dump_training_step
from tests.zpasses.inspect.traces import graph_run, memory, span, write
from zpasses.inspect import open as open_dump
from zpasses.inspect.find import select_graphs
from zpasses.tools.cli.main import cli

VALUES = (
    *(None, 0, -1, 1e308, 10**30, 2**62, 0.1, True, "", "x" * 5000, "\u202e\x1b[31m"),
    *("../../etc/passwd", [], {}, [[]], {"node": 0}),
)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    for rank in (0, 1):
        dump_training_step(folder, rank=rank)
    return folder


def mutated(value, draw, depth=0):
    """The value with one part of it changed."""
    if draw.random() < 0.15 or depth > 6 or not isinstance(value, (dict, list)) or not value:
        return draw.choice(VALUES)
    if isinstance(value, dict):
        key, found = draw.choice(list(value)), dict(value)
        if draw.random() < 0.2:
            del found[key]
        else:
            found[key] = mutated(value[key], draw, depth + 1)
        return found
    at, items = draw.randrange(len(value)), list(value)
    change = draw.random()
    if change < 0.2:
        del items[at]
    elif change < 0.3:
        items.append(items[at])
    elif change < 0.4:
        draw.shuffle(items)
    else:
        items[at] = mutated(items[at], draw, depth + 1)
    return items


def damage(path, draw):
    data, change = path.read_bytes(), draw.random()
    if change < 0.15:
        data = data[: draw.randrange(len(data) + 1)]
    elif change < 0.25 and data:
        changed = bytearray(data)
        for _ in range(5):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        data = bytes(changed)
    else:
        lines = data.split(b"\n")
        at = draw.randrange(len(lines))
        if lines[at]:
            lines[at] = json.dumps(mutated(json.loads(lines[at]), draw)).encode()
        data = b"\n".join(lines)
    path.write_bytes(data)


def commands(damaged, whole):
    ranks, to = ("--ranks", "0", "1"), ("-o", "-")
    diffs = [["diff", damaged, *more] for more in ((), ranks, (whole,))]
    memory = [["memory", damaged, *more] for more in (("--by", "module"), ("--json",))]
    pages = [["html", damaged, *more, *to] for more in ((whole,), ranks)]
    collectives = ["collectives", damaged, "--source", "--module", "--sort", "exposed"]
    plain = [["list", damaged], ["show", damaged], ["timeline", damaged, *to]]
    return *plain, *diffs, collectives, *memory, *pages


def check(two_ranks, tmp_path, dumps):
    given = []
    for number in range(dumps):
        draw = random.Random(number)
        folder = tmp_path / f"dump-{number}"
        shutil.copytree(two_ranks, folder)
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl"))
        for path in draw.sample(files, draw.choice([1, 1, 2, 4])):
            with contextlib.suppress(ValueError):  # an earlier change left no JSON
                damage(path, draw)
        given += commands(str(folder), str(two_ranks))
    run_all(given)


def collectives_of(dump):
    """Kind of graph -> (node, kind) of its collectives."""
    found = {}
    for each in select_graphs(open_dump(dump).dump):
        if each.graph.name in ("forward", "backward"):
            nodes = [node for node in each.graph.last.snapshot.nodes if node.collective]
            found[each.graph.name] = [(node.name, node.collective.kind) for node in nodes]
    return found


def a_trace(path, dump):
    """A trace of runs of the graphs of a dump, with all kinds of events."""
    events, start = [], 0.0
    for kind, collectives in collectives_of(dump).items():
        events.append(graph_run(kind, [name for name, _ in collectives], start, 5000))
        for _, what in collectives:
            start += 200
            events += [
                span(f"zpasses::gloo_{what}", start + 10, 40),
                span("gloo:recv", start + 30, 100, "user_annotation"),
                span(f"zpasses.launch:{int(start)}", start + 45, 1, "user_annotation"),
                span("_c10d_functional::wait_tensor", start + 60, 90),
                span(f"zpasses.wait:{int(start)}", start + 65, 80, "user_annotation"),
            ]
        events += [
            span("aten::mm", start + 250, 300),
            span("cudaLaunchKernel", start + 260, 1, "cuda_runtime", args={"correlation": 1}),
            span("gemm", start + 300, 9, "kernel", args={"correlation": 1}),
            memory(start + 400, 1 << 20),
        ]
        start += 10_000
    return write(path, events, distributedInfo={"rank": 0, "world_size": 2})


def check_traces(two_ranks, tmp_path, count):
    whole = a_trace(tmp_path / "whole.json", two_ranks)
    done = CliRunner().invoke(cli, ["collectives", str(two_ranks), "--trace", str(whole)])
    assert "100.0% of the measured time" in done.stdout
    commands = []
    for number in range(count):
        draw = random.Random(number)
        damaged = tmp_path / f"trace-{number}.json"
        shutil.copy(whole, damaged)
        for _ in range(draw.choice([1, 1, 3])):
            with contextlib.suppress(ValueError):
                damage(damaged, draw)
        if draw.random() < 0.2:
            data = gzip.compress(damaged.read_bytes())
            damaged.write_bytes(data[: draw.randrange(len(data) + 1)])
        commands += trace_commands(two_ranks, damaged)
    run_all(commands)


def trace_commands(dump, trace):
    return [
        ["collectives", str(dump), "--module", "--trace", str(trace)],
        ["collectives", str(dump), "--json", "--trace", str(trace)],
        ["html", str(dump), "-o", "-", "--trace", str(trace)],
    ]


def test_damaged_traces_are_shown_or_refused(two_ranks, tmp_path):
    check_traces(two_ranks, tmp_path, 30)


def test_a_trace_that_grows_is_refused(two_ranks, tmp_path):
    trace = tmp_path / "trace.json.gz"
    with gzip.open(trace, "wb", compresslevel=1) as file:
        for _ in range(100):
            file.write(b" " * (1 << 20))
    commands = trace_commands(two_ranks, trace)
    assert run_all(commands) == len(commands)


def test_damaged_dumps_are_shown_or_refused_by_every_command(two_ranks, tmp_path):
    check(two_ranks, tmp_path, 12)
