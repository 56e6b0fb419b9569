"""The pytest plugin: its options, fixtures and marker, in sessions that these tests start."""

import importlib
import multiprocessing.forkserver
import multiprocessing.popen_forkserver  # noqa: F401 - sessions below share the server of this one
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch import nn

from zpasses.errors import PassError
from zpasses.graph.nodes import collectives
from zpasses.passes import GatherParams, ReduceGrads
from zpasses.testing import joint_graph, listing, run_on_ranks  # noqa: F401 - as above
from zpasses.testing.graphs import ParamSpec

pytest_plugins = ["pytester"]

IMPORTS = """
import os, time
import pytest, torch
import torch.distributed as dist
"""


@pytest.fixture
def run(pytester):
    """Runs the plugin's session on a test file, and returns its result."""
    pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider")

    def run(source, *options, imports=IMPORTS):
        pytester.makepyfile(test_it=imports + source)
        return pytester.runpytest(*options)

    return run


def shown(result):
    return result.stdout.str()


# --- the plugin itself ----------------------------------------------------------------------------
def test_the_plugin_loads_no_torch(pytester):
    pytester.makepyfile("import sys\ndef test(): assert 'torch' not in sys.modules")
    result = pytester.runpytest_subprocess("-p", "no:hypothesispytest")
    result.assert_outcomes(passed=1)
    assert "zpasses-" in shown(result)


def test_a_conftest_may_ask_for_the_plugin_again(pytester, run):
    pytester.makeconftest("pytest_plugins = ['zpasses.testing.plugin']")
    result = run("def test(listing_snapshot): pass", "-p", "zpasses.testing.plugin", imports="")
    result.assert_outcomes(passed=1)


def test_the_plugin_can_be_left_out(run):
    result = run("def test(fake_world): pass", "-p", "no:zpasses.testing.plugin", imports="")
    result.assert_outcomes(errors=1)


def test_pytest_lists_what_the_plugin_has(pytester):
    fixtures = shown(pytester.runpytest("--fixtures"))
    for name in ("fake_world", "capture_step", "run_pipeline", "simulate_ranks"):
        assert re.search(rf"^{name} -- .*\n    \w", fixtures, re.MULTILINE), name
    assert re.search(r"^listing_snapshot -- ", fixtures, re.MULTILINE)
    assert "@pytest.mark.ranks(count, timeout_s=60)" in shown(pytester.runpytest("--markers"))
    assert "--update-listings" in shown(pytester.runpytest("--help"))


def test_strategies_say_what_to_install_without_hypothesis():
    without = {"hypothesis": None}
    present = sys.modules.pop("zpasses.testing.strategies", None)
    try:
        with (
            mock.patch.dict(sys.modules, without),
            pytest.raises(ModuleNotFoundError, match="pip install 'zpasses\\[testing\\]'"),
        ):
            importlib.import_module("zpasses.testing.strategies")
    finally:
        if present is not None:
            sys.modules["zpasses.testing.strategies"] = present


# --- fixtures for graphs --------------------------------------------------------------------------
def test_fake_world_lasts_until_the_next(fake_world):
    for rank in range(2):
        mesh = fake_world(2, rank)
        assert (mesh.size(), torch.distributed.get_rank()) == (2, rank)
        assert "unshard" in listing(joint_graph([ParamSpec((4, 2))]))


def test_fake_world_ends_with_a_failed_test(run):
    result = run(
        """
def test_one(fake_world):
    fake_world(2)
    assert 0
def test_two():
    assert not dist.is_initialized()
"""
    )
    result.assert_outcomes(passed=1, failed=1)


def test_run_pipeline_rewrites_a_copy(fake_world, run_pipeline):
    fake_world(2)
    graph = joint_graph([ParamSpec((4, 2))])
    ops = lambda gm: {each.op for _, each in collectives(gm.graph)}  # noqa: E731
    for pipeline in ("gather-params,reduce-grads", GatherParams()):
        run = run_pipeline(graph, pipeline, verify="simulate")
        assert "all_gather_into_tensor" in ops(run.graph)
        assert run.records[0].changes == 1
        assert ops(graph) == {"unshard", "reduce_grad"}


def test_run_pipeline_verifies(fake_world, run_pipeline):
    class Lies(ReduceGrads):
        def rewrite(self, graph):
            super().rewrite(graph)
            return 0

    fake_world(2)
    with pytest.raises(PassError, match="reduce-grads"):
        run_pipeline(joint_graph([ParamSpec((4, 2))]), Lies())


def test_capture_step_captures(capture_step):
    step = capture_step(nn.Linear(4, 3), (torch.ones(2, 4),), world_size=3, pipeline="zero3")
    assert step.world_size == 3
    assert step.after.backward is not None


def test_simulate_ranks_compares_a_whole_step(simulate_ranks):
    ranks = simulate_ranks(nn.Linear(4, 3), (torch.ones(2, 4),), world_size=3, pipeline="zero3")
    assert [each.rank for each in ranks] == [0, 1, 2]


class Doubles(ReduceGrads):
    """Doubles every gradient, which no static check sees."""

    def rewrite(self, graph):
        changes = super().rewrite(graph)
        output = graph.output_node()
        with graph.inserting_before(output):
            outputs = list(output.args[0])
            for at, node in enumerate(outputs):
                if node is not None and "wait_tensor" in node.name:
                    outputs[at] = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2))
                    outputs[at].meta = dict(node.meta)
        output.args = (tuple(outputs),)
        return changes + 1


def test_simulate_ranks_finds_wrong_arithmetic(simulate_ranks):
    from zpasses import Pipeline

    pipeline = Pipeline((GatherParams(), Doubles()))
    with pytest.raises(AssertionError, match="rank 0, output"):
        simulate_ranks(nn.Linear(4, 4), (torch.ones(2, 4),), world_size=2, pipeline=pipeline)


# --- listings -------------------------------------------------------------------------------------
LISTINGS = """
import pytest
def test_one(listing_snapshot):
    listing_snapshot("a\\nb")
@pytest.mark.parametrize("x", ["p/q", "r"])
def test_two(listing_snapshot, x):
    listing_snapshot(x, "before")
    listing_snapshot(x + "!", "after")
class TestThree:
    def test_one(self, listing_snapshot):
        listing_snapshot("c\\n")
"""
FILES = [
    "TestThree.test_one.txt",
    "test_one.txt",
    *(f"test_two[{x}].{label}.txt" for x in ("p_q", "r") for label in ("after", "before")),
]


def files(pytester):
    return sorted(path.name for path in pytester.path.glob("listings/test_it/*"))


def test_listings_are_missing_then_written_then_equal(pytester, run):
    result = run(LISTINGS, imports="")
    result.assert_outcomes(failed=4)
    assert "the listing listings/test_it/test_one.txt does not exist" in shown(result)
    command = r"    pytest 'test_it.py::test_two\[r\]' --update-listings"
    assert re.search(command, shown(result)), shown(result)
    assert files(pytester) == []
    result = run(LISTINGS, "--update-listings", imports="")
    result.assert_outcomes(passed=4)
    assert "listings/test_it/test_one.txt" in shown(result).split("listings written")[1]
    assert files(pytester) == sorted(FILES)
    result = run(LISTINGS, imports="")
    result.assert_outcomes(passed=4)
    assert "listings written" not in shown(result)


def test_a_difference_is_shown_and_updated(pytester, run):
    run(LISTINGS, "--update-listings", imports="")
    changed = LISTINGS.replace("a\\nb", "a\\nB")
    result = run(changed, imports="")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["*differs from listings/test_it/test_one.txt*", "*--update-listings", "-b", "+B"]
    )
    run(changed, "--update-listings", imports="").assert_outcomes(passed=4)
    assert (pytester.path / "listings/test_it/test_one.txt").read_text() == "a\nB\n"


def test_a_label_that_a_test_no_longer_uses_is_an_error(pytester, run):
    run(LISTINGS, "--update-listings", imports="")
    less = LISTINGS.replace('    listing_snapshot(x, "before")\n', "")
    result = run(less, imports="")
    result.assert_outcomes(passed=2, failed=2)
    assert "no test uses these listings:\n    listings/test_it/test_two[r].before.txt" in shown(
        result
    )
    run(less, "--update-listings", imports="").assert_outcomes(passed=4)
    assert len(files(pytester)) == 4


def test_listings_of_removed_tests_are_an_error(pytester, run):
    run(LISTINGS, "--update-listings", imports="")
    fewer = LISTINGS.replace("test_two", "test_new").replace('"r"', '"s"')
    result = run(fewer, "-k", "test_one", imports="")
    result.assert_outcomes(passed=2, deselected=3)
    result = run(fewer, imports="")
    result.assert_outcomes(passed=2, failed=3)
    assert "listings/test_it/test_two[p_q].after.txt" in shown(result)
    assert "    pytest test_it.py --update-listings" in shown(result)
    run(fewer, "test_it.py::test_one", imports="").assert_outcomes(passed=1)
    run(fewer, "--update-listings", imports="").assert_outcomes(passed=5)
    run(fewer, imports="").assert_outcomes(passed=4)


@pytest.mark.slow(quick="test_bodies_run_on_the_ranks_with_their_values")
def test_listings_work_in_parallel(pytester, run):
    old = pytester.mkdir("listings") / "test_it" / "test_old.txt"
    old.parent.mkdir()
    old.write_text("old\n")
    result = run(LISTINGS, "-n", "2", "--update-listings", imports="")
    result.assert_outcomes(passed=5)
    assert "listings/test_it/test_one.txt" in shown(result).split("listings written")[1]
    assert files(pytester) == sorted(FILES)


def test_a_label_is_used_once_and_is_a_name(run):
    result = run(
        """
def test_twice(listing_snapshot):
    listing_snapshot("a")
    listing_snapshot("a")
def test_path(listing_snapshot):
    listing_snapshot("a", "../b")
""",
        "--update-listings",
        imports="",
    )
    result.assert_outcomes(failed=2)
    assert "give each listing a label of its own" in shown(result)
    assert "got the label '../b'" in shown(result)


def test_a_graph_is_listed(run):
    result = run(
        """
from zpasses.testing import trace_joint
def test_graph(fake_world, listing_snapshot):
    fake_world(2)
    fn = lambda w, x: torch.ops.zpasses.unshard(w, 4, None, None, "0") * x
    graph = trace_joint(fn, [torch.zeros(2, requires_grad=True), torch.zeros(4)], {0: "w"})
    listing_snapshot(graph)
    listing_snapshot(graph.graph, "graph")
"""
    )
    result.assert_outcomes(failed=1)
    assert "unshard = zpasses.unshard(primals_1, 4, None, None, '0')" in shown(result)


# --- tests on ranks -------------------------------------------------------------------------------
@pytest.mark.processes
def test_bodies_run_on_the_ranks_with_their_values(run):
    result = run(
        """
@pytest.fixture
def seven():
    return torch.full((1,), 7.0)

@pytest.mark.ranks(2)
@pytest.mark.parametrize("more", [1, 2])
def test_sum(seven, more, tmp_path):
    total = seven + more * dist.get_rank()
    dist.all_reduce(total)
    assert total.item() == 14 + more
    (tmp_path / str(dist.get_rank())).write_text("")
    dist.barrier()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]

@pytest.mark.parametrize("count", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 3)])
def test_count(count):
    assert dist.get_world_size() == count

class TestClass:
    class TestInner:
        @pytest.mark.ranks(2)
        def test_method(self, monkeypatch):
            monkeypatch.setenv("SOME_SETTING", "on")
            assert os.environ["SOME_SETTING"] == "on"

@pytest.mark.ranks(2)
def test_environment_is_as_before():
    assert "SOME_SETTING" not in os.environ

@pytest.mark.ranks(2)
def test_skips():
    pytest.skip("not here")

@pytest.mark.ranks(2)
def test_expects_to_fail():
    pytest.xfail("some day")

@pytest.mark.ranks(2)
@pytest.mark.skip
def test_is_skipped(): ...

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=AssertionError, strict=True)
def test_fails_as_expected():
    assert dist.get_rank() == 0
""",
        "-rsx",
    )
    result.assert_outcomes(passed=6, skipped=2, xfailed=2)
    assert "not here" in shown(result)
    assert "some day" in shown(result)


@pytest.mark.processes
def test_a_failure_shows_every_rank(run):
    result = run(
        """
@pytest.mark.ranks(2)
def test_fails():
    print("printed by", dist.get_rank())
    assert [dist.get_rank(), "x"] == [0, "x"]

@pytest.mark.ranks(2)
def test_goes_on(): ...

@pytest.mark.ranks(2)
def test_disagrees():
    if dist.get_rank() == 1:
        pytest.skip("only here")
"""
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 2 failed",
            "--- rank 0: done",
            "printed by 0",
            "--- rank 1: failed",
            "E *assert [[]1, 'x'] == [[]0, 'x']",
            "E *At index 0 diff: 1 != 0",
            "test_it.py:8: AssertionError",
            "printed by 1",
        ]
    )
    assert "all ranks must skip the test, or none: rank 0 passed, rank 1 skipped (only here)" in (
        shown(result)
    )
    assert "pool.py" not in shown(result)


@pytest.mark.processes
@pytest.mark.slow(quick="test_a_failure_shows_every_rank")
def test_ranks_that_hang_or_die_are_killed_and_shown(run, monkeypatch):
    monkeypatch.setenv("ZPASSES_TEST_PATIENCE", "2")
    result = run(
        """
@pytest.mark.ranks(2, timeout_s=1.5)
def test_hangs():
    if dist.get_rank() == 1:
        time.sleep(300)

@pytest.mark.ranks(2)
def test_dies():
    if dist.get_rank() == 0:
        print("last words", flush=True)
        os._exit(7)

@pytest.mark.ranks(2)
def test_goes_on(): ...
"""
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 2 did not finish within 3 s",
            "--- rank 1: did not finish",
            '  File "*test_it.py", line 8 in test_hangs',
            "rank 0 of 2 died with exit code 7",
            "last words",
        ]
    )
    assert "_hookexec" not in shown(result)


@pytest.mark.processes
def test_modules_that_only_pytest_can_import_run_on_ranks(pytester, run):
    pytester.mkpydir("pkg")  # two files of one name need the mode importlib
    for folder in ("one", "two"):
        path = pytester.mkdir(folder) / "test_same.py"
        path.write_text(
            f"import pytest\n@pytest.mark.ranks(2)\ndef test(): assert {folder!r} in __file__"
        )
    result = pytester.runpytest("--import-mode=importlib", "one", "two")
    result.assert_outcomes(passed=2)


REFUSED = {
    "": "got @pytest.mark.ranks(); expected a number of ranks",
    "0": "got @pytest.mark.ranks(0)",
    "'2'": "got @pytest.mark.ranks('2')",
    "2, timeout=3": "got @pytest.mark.ranks(2, timeout=3)",
    "2, timeout_s=0": "got @pytest.mark.ranks(2, timeout_s=0)",
    "2, 3, 4": "got @pytest.mark.ranks(2, 3, 4)",
}


def test_wrong_arguments_of_the_marker_are_refused(run):
    result = run(
        "".join(
            f"@pytest.mark.ranks({given})\ndef test_{at}(): ...\n"
            for at, given in enumerate(REFUSED)
        )
    )
    result.assert_outcomes(errors=len(REFUSED))
    for message in REFUSED.values():
        assert message in shown(result)


def test_what_does_not_work_on_ranks_is_refused(run):
    result = run(
        """
import unittest
from hypothesis import given, strategies as st
pytestmark = pytest.mark.ranks(2)

def test_capsys(capsys): ...
def test_listing(listing_snapshot): ...
async def test_coroutine(): ...
@given(st.integers())
def test_drawn(x): ...
class TestSetup:
    def setup_method(self): ...
    def test_it(self): ...
class TestCase(unittest.TestCase):
    def test_method(self): ...
@pytest.mark.xfail(raises=ValueError)
def test_xfail(): ...
@pytest.mark.parametrize("x", [lambda: 1])
def test_parameter(x): ...
@pytest.fixture
def opened(tmp_path):
    with open(tmp_path / "file", "w") as file:
        yield file
def test_fixture(opened): ...
"""
    )
    result.assert_outcomes(errors=7, failed=2)
    for message in (
        "the fixture 'capsys' works only in pytest's process",
        "the fixture 'listing_snapshot' works only in pytest's process",
        "does not run coroutines; call asyncio.run",
        "call zpasses.testing.run_on_ranks in the test for each example",
        "the ranks do not run setup_method of TestSetup",
        "does not run methods of unittest.TestCase",
        "write xfail(raises=RanksError)",
        "the parameter 'x' is a function that cannot be pickled",
        "the fixture 'opened' is a TextIOWrapper that cannot be pickled",
    ):
        assert message in shown(result), message


@pytest.mark.processes
def test_a_value_that_ranks_cannot_read_is_named(run):
    result = run(
        """
class Unreadable:
    def __reduce__(self):
        return int, ("no number",)

@pytest.fixture
def value():
    return Unreadable()

@pytest.mark.ranks(2)
def test(value): ...
"""
    )
    result.assert_outcomes(failed=1)
    assert "the value of 'value' does not arrive on a rank: ValueError" in shown(result)


@pytest.mark.slow(quick="test_bodies_run_on_the_ranks_with_their_values")
@pytest.mark.processes
def test_a_project_of_its_own_runs_in_parallel(pytester):
    pytester.makepyfile(
        test_it=IMPORTS + "@pytest.mark.ranks(2)\n@pytest.mark.parametrize('x', range(4))\n"
        "def test(x):\n    dist.barrier()\n"
    )
    command = [sys.executable, "-m", "pytest", "-n", "2"]
    done = subprocess.run(
        command, cwd=pytester.path, capture_output=True, text=True, timeout=900, check=False
    )
    assert "4 passed" in done.stdout, done.stdout
