"""A pass that failed is never shown as a success."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from click.testing import CliRunner

import zpasses
from tests.zpasses.inspect.browsing import (
    needs_browser,
    one,
)
from tests.zpasses.inspect.graphs import dump_of, graph_of, replace, two_gathers
from tests.zpasses.inspect.real import Layers
from zpasses import compat
from zpasses.dumps.format import Failure
from zpasses.errors import PassError, raising_line
from zpasses.inspect import Inspection
from zpasses.inspect import open as open_dump
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.pipeline import Pipeline
from zpasses.testing import fake_world
from zpasses.tools.cli.main import cli

FAILURE = Failure("KeyError", "'w'", "overlap", raised="train.py:7 in rewrite: return names['w']")


def failed(left):
    """A graph of which `overlap` failed and left the graph `left`."""
    states = (None, two_gathers()), ("bucket{cap_mb=0}", two_gathers()), ("overlap", left)
    return Inspection(dump_of(graph_of("forward", *states, error=FAILURE), error=FAILURE))


@pytest.mark.parametrize("left", [two_gathers(), two_gathers(early=True)])
def test_the_difference_of_a_failed_pass_says_that_it_failed(left):
    view = failed(left).diff("forward", "overlap")
    assert "FAILED: KeyError: 'w'. Raised at train.py:7 in rewrite: return names['w']" in str(view)
    assert view.data["same"] is False
    assert "KeyError" in view.data["graphs"][0]["failure"]


def test_the_difference_of_all_passes_says_which_one_is_not_in_it():
    assert "overlap failed, and its changes are not shown" in str(failed(two_gathers()).diff())


def test_graph_memory_and_collectives_of_a_failed_pass_say_so():
    inspection = failed(two_gathers())
    shown = str(inspection.show("forward", "overlap"))
    assert shown.startswith("# 0/0 forward, after overlap (which failed): ")
    assert "# FAILED: KeyError" in shown
    assert "overlap (FAILED)" in str(inspection.memory("forward"))
    assert "FAILED: KeyError" in str(inspection.memory("forward", "overlap"))
    assert "FAILED: KeyError" in str(inspection.collectives("forward", "overlap"))
    assert "raised at train.py:7" in str(inspection.overview())
    assert "FAILED" not in str(inspection.show("forward"))


def test_a_failed_pass_without_a_graph_is_an_error_with_its_line():
    with pytest.raises(zpasses.inspect.NotInDumpError, match=r"Raised at train\.py:7"):
        failed(None).diff("forward", "overlap")


@dataclass(frozen=True)
class LooksUp(Pass):
    """Fails."""

    name: ClassVar[str] = "looks-up"
    level: ClassVar[Level] = Level.JOINT

    def rewrite(self, graph):
        return self.find({})

    def find(self, known):
        return torch.ones(2).reshape(known.get("shape", (3, 3)))


def test_error_and_dump_name_the_line_of_the_pass(tmp_path):
    pipeline = Pipeline((*Pipeline.parse("gather-params"), LooksUp()))
    options = {"codegen": "eager", "agreement": False, "pipeline": pipeline, "dump": str(tmp_path)}
    with fake_world(2) as mesh:
        model = zpasses.shard(Layers(), mesh=mesh)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="zpasses", options=options)
        with pytest.raises(Exception, match="looks-up") as caught:
            compiled(torch.ones(8, 64))
    error = compat.inner_exception(caught.value) or caught.value
    assert isinstance(error, PassError)
    line = "in find: return torch.ones(2).reshape(known.get"
    assert line in str(error)
    assert "test_failed_pass.py:" in str(error)
    assert line in str(open_dump(tmp_path).overview())
    ran = CliRunner().invoke(cli, ["diff", str(tmp_path), "joint", "--pass", "looks-up"])
    assert ran.exit_code == 1
    assert line in ran.output


def test_the_raising_line_is_that_of_the_cause():
    def inner():
        raise KeyError("w")

    def outer():
        try:
            inner()
        except KeyError as error:
            raise PassError("failed") from error

    with pytest.raises(PassError) as caught:
        outer()
    assert 'in inner: raise KeyError("w")' in raising_line(caught.value)
    assert raising_line(ValueError("never raised")) == ""


def test_a_failure_of_an_unknown_line_names_none():
    failure = replace(FAILURE, raised="")
    dump = dump_of(graph_of("joint", (None, two_gathers()), ("sdma", None), error=failure))
    assert "Raised" not in str(Inspection(dump).overview())


def test_list_has_the_counts_that_a_failed_pass_was_given():
    (row,) = [
        line for line in str(failed(None).overview()).splitlines() if "FAILED: KeyError" in line
    ]
    assert row.split()[:6] == ["2", "overlap", "10", "before", "2", "before"]


@pytest.mark.slow(quick="test_the_page_estimates_no_step_of_a_compile_that_has_no_graph_that_runs")
@needs_browser
@pytest.mark.parametrize("left", [two_gathers(early=True), None])
def test_the_overview_of_a_failed_compile_has_the_counts_that_are_known(page, left):
    graph = graph_of("joint", (None, two_gathers()), ("overlap", left), error=FAILURE)
    shown = page(Inspection(dump_of(graph, error=FAILURE)))
    tiles = [each.text.split("\n") for each in shown.find_elements("css selector", ".tile")]
    assert tiles[:3] == [
        ["Nodes", "10", "of joint, before overlap failed"],
        ["Collectives", "2", "of joint, before overlap failed"],
        ["Passes that succeeded", "0", "overlap failed"],
    ]
    cells = one(shown, "tbody tr:last-child").find_elements("css selector", "td")
    row = [each.text for each in cells]
    if left is None:
        assert row[:3] == ["KeyError", "10 before", "2 before"]
    else:
        assert row[:3] == ["KeyError↕1", "10", "2"]


@needs_browser
def test_the_page_estimates_no_step_of_a_compile_that_has_no_graph_that_runs(page):
    graph = graph_of("joint", (None, two_gathers()), ("overlap", two_gathers()), error=FAILURE)
    shown = one(page(Inspection(dump_of(graph, error=FAILURE))), "main").text
    assert "This compile ended before it had a graph that runs." in shown
    assert "Estimated time" not in shown
