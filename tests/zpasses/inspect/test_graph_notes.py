"""What the pages say about graphs that never run, variants, and graphs that do not fit."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.zpasses.inspect.browsing import (
    needs_browser,
    one,
)
from tests.zpasses.inspect.graphs import chain, dump_of, graph_of, replace, two_gathers
from zpasses.dumps.format import Dump, Param
from zpasses.inspect import Inspection
from zpasses.inspect.graph_notes import NEVER_RUNS, variant_text
from zpasses.tools.cli.main import cli

TOO_LARGE = "backward does not fit into the memory of small, 100 B"


def steps(name="backward"):
    return graph_of(name, (None, two_gathers()), ("overlap", two_gathers(early=True)))


def variant(graph, given=(), kept=()):
    found = graph_of(f"{graph.name}.variant0", (None, graph.last.snapshot))
    return replace(found, of=graph.name, given=given, kept=kept)


def on_target(dump, **target):
    """The dump, planned for another target."""
    (compiled,) = dump.ranks[0].compiles
    compiled = replace(compiled, info=replace(compiled.info, target=target))
    return Dump(dump.path, 1, dump.meta, {0: replace(dump.ranks[0], compiles=(compiled,))})


def test_the_joint_graph_never_runs():
    inspection = Inspection(dump_of(steps("joint"), steps()))
    assert NEVER_RUNS in str(inspection.memory("joint"))
    assert NEVER_RUNS not in str(inspection.memory("backward"))
    for name, executed in (("joint", False), ("backward", True)):
        (graph,) = inspection.memory(name).data
        assert graph["executed"] is executed


@pytest.mark.parametrize(
    ("of", "given", "kept", "said"),
    [
        ("backward", (), (), "carries no pending gradients between calls"),
        ("backward", ("a", "b"), ("a",), "takes those of 2 parameters and leaves those of 1 param"),
        ("forward", (), ("a",), "carries gathered parameters from call to call"),
    ],
)
def test_a_variant_is_explained_in_list_memory_and_page(of, given, kept, said):
    graph = steps(of)
    form = replace(variant(graph, given, kept), stepped=kept)
    assert ("in which the optimizer steps 1 parameter. It runs" in variant_text(form)) == bool(kept)
    inspection = Inspection(dump_of(graph, form))
    assert said in variant_text(form)
    assert said in str(inspection.overview())
    assert said in str(inspection.memory(form.name))
    assert said in inspection.html()
    assert variant_text(graph) == ""


def test_the_difference_of_all_passes_leaves_out_graphs_without_passes():
    graph = steps()
    inspection = Inspection(dump_of(graph, variant(graph)))
    assert [each["title"] for each in inspection.diff().data["graphs"]] == [
        "0/0 backward, its only pass"
    ]
    assert "no change" in str(inspection.diff("backward.variant0"))


def test_a_variant_that_differs_as_its_graph_is_one_line_in_diff():
    first, second = steps(), graph_of("backward", (None, chain(3)))
    one, other = (Inspection(dump_of(each, variant(each))) for each in (first, second))
    shown = str(one.diff_to(other))
    assert "backward.variant0, before the first pass: as backward" in shown.replace("  ", " ")
    assert shown.count("inserted ") == str(
        Inspection(dump_of(first)).diff_to(Inspection(dump_of(second)))
    ).count("inserted ")
    third = variant(graph_of("backward", (None, chain(4))))
    assert "as backward" not in str(one.diff_to(Inspection(dump_of(second, third))))


def test_a_peak_above_the_memory_of_the_target_is_a_warning():
    dump = dump_of(steps(), steps("joint"))
    small = Inspection(on_target(dump, name="small", memory_bytes=100))
    assert TOO_LARGE in str(small.memory("backward"))
    assert "does not fit" not in str(small.memory("joint"))
    for target in ({"memory_bytes": 1 << 40}, {"memory_bytes": "much"}, {}):
        assert "does not fit" not in str(Inspection(on_target(dump, **target)).memory())


def test_shards_count_against_the_memory_of_the_target():
    shard = Param("w", (1 << 20,), "float32", 4 << 20, 2 << 20, 1 << 20, "0")
    dump = dump_of(steps(), parameters={"w": shard})
    target = {"name": "small", "memory_bytes": 1 << 20}
    assert "the shards of the parameters take 2 MiB" in str(
        Inspection(on_target(dump, **target)).memory()
    )


@pytest.mark.slow(quick="the tests of notes without a browser")
@needs_browser
def test_the_page_warns_of_a_peak_above_the_memory_of_the_target(page):
    dump = dump_of(steps(), steps("joint"))
    shown = page(Inspection(on_target(dump, name="small", memory_bytes=100)))
    assert TOO_LARGE in one(shown, "main").text
    shown.execute_script("go({graph: 'backward', tab: 'memory'})")
    assert TOO_LARGE in one(shown, "main").text
    shown.execute_script("go({graph: 'joint', tab: 'memory'})")
    assert NEVER_RUNS in one(shown, "main").text


def test_a_capture_into_a_folder_with_files_is_refused_with_its_own_option(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = CliRunner().invoke(cli, ["capture", "none.py:f", "-o", str(tmp_path)])
    assert done.exit_code == 2
    assert "contains 'notes.txt'" in done.output
    assert "Name a new folder with -o" in done.output
    (tmp_path / "zpasses-dump.json").write_text("{}")
    done = CliRunner().invoke(cli, ["capture", "none.py:f", "-o", str(tmp_path)])
    assert "the dump of another run" in done.output
    assert Path("none.py").exists() is False
