"""Damaged and hostile dumps: every command shows them or refuses them, without a traceback, in
little time.
"""

import json
import random
import shutil
import time

import pytest
from click.testing import CliRunner

from tests.zpasses.inspect.real import dump_training_step
from zpasses.tools.cli.main import cli

VALUES = (
    None,
    0,
    -1,
    1e308,
    10**30,
    2**62,
    0.1,
    True,
    "",
    "x" * 5000,
    "\u202e\x1b[31m",
    "../../etc/passwd",
    [],
    {},
    [[]],
    {"node": 0},
)
LIMIT_S = 5


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
    return (
        ["list", damaged],
        ["show", damaged],
        ["diff", damaged],
        ["diff", damaged, "--ranks", "0", "1"],
        ["diff", damaged, whole],
        ["collectives", damaged, "--source", "--module", "--sort", "exposed"],
        ["memory", damaged, "--by", "module"],
        ["memory", damaged, "--json"],
        ["html", damaged, whole, "-o", "-"],
        ["html", damaged, "--ranks", "0", "1", "-o", "-"],
        ["timeline", damaged, "-o", "-"],
    )


def check(two_ranks, folder, seed, dumps):
    for number in range(dumps):
        draw = random.Random(f"{seed} {number}")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(two_ranks, folder)
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl"))
        for path in draw.sample(files, draw.choice([1, 1, 2, 4])):
            try:
                damage(path, draw)
            except ValueError:  # an earlier change left no JSON
                continue
        for command in commands(str(folder), str(two_ranks)):
            started = time.process_time()
            done = CliRunner().invoke(cli, command)
            taken = time.process_time() - started
            assert isinstance(done.exception, SystemExit | None), (number, command, done.exception)
            assert done.exit_code in (0, 1, 2)
            assert taken < LIMIT_S, (number, command)


def test_damaged_dumps_are_shown_or_refused_by_every_command(two_ranks, tmp_path):
    check(two_ranks, tmp_path / "dump", "quick", 12)


@pytest.mark.slow(quick="test_damaged_dumps_are_shown_or_refused_by_every_command")
@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_damaged_dumps_are_shown_or_refused(two_ranks, tmp_path, seed):
    check(two_ranks, tmp_path / "dump", f"slow {seed}", 100)
