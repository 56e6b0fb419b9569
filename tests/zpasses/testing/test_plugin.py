"""The pytest plugin: its options and fixtures, in sessions that these tests start."""

import importlib
import re
import sys
from unittest import mock

import pytest
import torch
from torch import nn

from zpasses import Pipeline
from zpasses.errors import PassError
from zpasses.graph.queries import collectives
from zpasses.passes import GatherParams, ReduceGrads
from zpasses.testing import joint_graph, listing
from zpasses.testing.graphs import ParamSpec

pytest_plugins = ["pytester"]

IMPORTS = """
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


def test_a_conftest_may_ask_for_the_plugin_again_or_leave_it_out(pytester, run):
    result = run("def test(fake_world): pass", "-p", "no:zpasses.testing.plugin", imports="")
    result.assert_outcomes(errors=1)
    pytester.makeconftest("pytest_plugins = ['zpasses.testing.plugin']")
    result = run("def test(listing_snapshot): pass", "-p", "zpasses.testing.plugin", imports="")
    result.assert_outcomes(passed=1)


def test_pytest_lists_what_the_plugin_has(pytester):
    fixtures = shown(pytester.runpytest("--fixtures"))
    for name in ("fake_world", "capture_step", "run_pipeline", "simulate_ranks"):
        assert re.search(rf"^{name} -- .*\n    \w", fixtures, re.MULTILINE), name
    assert re.search(r"^listing_snapshot -- ", fixtures, re.MULTILINE)
    assert "--update-listings" in shown(pytester.runpytest("--help"))


def test_strategies_say_what_to_install_without_hypothesis():
    without = {"hypothesis": None}
    with mock.patch.dict(sys.modules, without):  # which restores all modules
        sys.modules.pop("zpasses.testing.strategies", None)
        with pytest.raises(ModuleNotFoundError, match="pip install 'zpasses\\[testing\\]'"):
            importlib.import_module("zpasses.testing.strategies")


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
    changed = LISTINGS.replace("a\\nb", "a\\nB").replace('    listing_snapshot(x, "before")\n', "")
    result = run(changed, imports="")
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(
        ["*differs from listings/test_it/test_one.txt*", "*--update-listings", "-b", "+B"]
    )
    unused = "no test uses these listings:\n    listings/test_it/test_two[r].before.txt"
    assert unused in shown(result)
    run(changed, "--update-listings", imports="").assert_outcomes(passed=4)
    assert (pytester.path / "listings/test_it/test_one.txt").read_text() == "a\nB\n"
    assert len(files(pytester)) == 4


def test_listings_of_removed_tests_are_an_error(pytester, run):
    run(LISTINGS, "--update-listings", imports="")
    fewer = LISTINGS.replace("test_two", "test_new").replace('"r"', '"s"')
    run(fewer, "-k", "test_one", imports="").assert_outcomes(passed=2, deselected=3)
    result = run(fewer, imports="")
    result.assert_outcomes(passed=2, failed=3)
    assert "listings/test_it/test_two[p_q].after.txt" in shown(result)
    assert "    pytest test_it.py --update-listings" in shown(result)
    run(fewer, "test_it.py::test_one", imports="").assert_outcomes(passed=1)
    run(fewer, "--update-listings", imports="").assert_outcomes(passed=5)
    run(fewer, imports="").assert_outcomes(passed=4)


@pytest.mark.slow(quick="test_listings_are_missing_then_written_then_equal")
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
