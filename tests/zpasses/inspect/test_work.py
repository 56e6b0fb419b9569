"""Tests of the bounds on work: a dump that costs as much as possible is shown or refused in time.

Bounds are on CPU time and resident memory. They are more than those that are promised, because the
machine may be slow, and other tests run at the same time.
"""

import sys
import time

import pytest

from tests.zpasses.inspect.graphs import node, snapshot
from tests.zpasses.inspect.real import real_dump
from zpasses.dumps import DumpTooLargeError, Limits
from zpasses.dumps.format import Ref
from zpasses.inspect import Inspection, pair_nodes
from zpasses.inspect import open as open_dump
from zpasses.tools.stress.heavy import HEAVY, write_heavy
from zpasses.tools.stress.read_dump import MEMORY_LIMIT_MB, Readers

CPU_LIMIT_S = 25.0

QUICK = {
    # name: (scale, commands). These failed before the bounds.
    "one long event": (7.5, ["list"]),
    "lists in notes": (0.2, ["list"]),
    "empty deltas": (1.5, ["html"]),
    "long word": (0.3, ["list"]),
    "wide cell": (0.3, ["list"]),
    "hub": (0.2, ["diff"]),
    "long names": (1.5, ["show"]),
    "shared snapshot": (1.5, ["show"]),
}


@pytest.fixture(scope="module")
def readers():
    code = (
        "from zpasses.tools.stress import read_dump\n"
        f"read_dump.CPU_LIMIT_S = {CPU_LIMIT_S}\nread_dump.serve()"
    )
    with Readers((sys.executable, "-c", code)) as process:
        yield process


def read(readers, tmp_path, name, scale, *commands):
    write_heavy(tmp_path / "dump", name, scale)
    (tmp_path / "output").mkdir()
    return readers.read(tmp_path / "dump", tmp_path / "output", 900, *commands)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.slow(quick="test_refusal_names_the_limit_and_the_option")
def test_costly_dumps_are_shown_or_refused_in_time(readers, tmp_path, name):
    scale, commands = QUICK[name]
    found = read(readers, tmp_path, name, scale, commands)
    assert found.outcome in ("equal", "refused"), found
    assert found.seconds < 2 * CPU_LIMIT_S
    assert found.memory_mb < 2 * MEMORY_LIMIT_MB


@pytest.mark.slow(quick="test_refusal_names_the_limit_and_the_option")
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("name", HEAVY)
def test_every_costly_dump_is_shown_or_refused_in_time(readers, tmp_path, name, scale):
    found = read(readers, tmp_path, name, scale)
    slow = found.outcome == "hang" and " s of CPU time" in found.detail
    assert found.outcome in ("equal", "refused") or slow, found
    assert found.seconds < 2 * CPU_LIMIT_S
    assert found.memory_mb < 2 * MEMORY_LIMIT_MB


@pytest.mark.parametrize(
    ("name", "scale", "limit"),
    [
        ("one long event", 2, r"line 1: the line has more bytes than .*\(Limits\(line_bytes="),
        ("empty deltas", 1.5, r"units of work .*nodes of steps.* than .*\(Limits\(work="),
    ],
)
def test_refusal_names_the_limit_and_the_option(tmp_path, name, scale, limit):
    write_heavy(tmp_path / "dump", name, scale)
    with pytest.raises(DumpTooLargeError, match=rf"{limit}.* add --trusted .*Limits.trusted\(\)"):
        open_dump(tmp_path / "dump").html()


def test_trusted_limits_read_what_the_default_refuses(tmp_path):
    write_heavy(tmp_path / "dump", "long names", 0.1)
    small = Limits(work=100_000)
    with pytest.raises(DumpTooLargeError, match="limit of 100,000"):
        open_dump(tmp_path / "dump", limits=small).show()
    shown = open_dump(tmp_path / "dump", limits=Limits.trusted()).show("forward")
    assert len(shown.data[0]["nodes"]) == 800


def test_work_is_shared_by_all_files_of_a_dump(tmp_path):
    write_heavy(tmp_path / "dump", "small deltas", 0.02)
    limits = Limits(work=90_000)
    steps = open_dump(tmp_path / "dump", limits=limits).dump.ranks[0].compiles[0].graphs["forward"]
    assert steps.steps[0].snapshot is not None  # one of them alone is within the limit
    with pytest.raises(DumpTooLargeError, match="nodes of steps"):
        open_dump(tmp_path / "dump", limits=limits).html()


def test_a_real_dump_is_far_below_the_default_limit():
    folder, _ = real_dump()
    Inspection(open_dump(folder, limits=Limits(work=Limits().work // 10)).dump).html()


def test_pairing_of_two_dumps_takes_no_square_of_the_nodes():
    def hub(prefix, count=20_000):
        users = (
            node(at, f"{prefix}{at}", f"t{prefix}{at % 7}", (Ref(0), prefix))
            for at in range(1, count)
        )
        return snapshot(node(0, "x", "x", op="placeholder"), *users)

    before, after = hub("a"), hub("b")
    started = time.process_time()
    assert pair_nodes(before, after) == {0: 0}  # other ops
    assert len(pair_nodes(before, hub("a"))) == 20_000
    assert time.process_time() - started < 60
