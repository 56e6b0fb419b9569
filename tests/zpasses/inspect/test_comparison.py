"""Two graphs side by side: in text, and on the page."""

import json
from pathlib import Path

import pytest

from tests.zpasses.inspect.browsing import HOSTILE, keys, needs_browser, one, texts, wait_for
from tests.zpasses.inspect.graphs import (
    MM,
    chain,
    dump_of,
    gradients,
    graph_of,
    node,
    output,
    placeholder,
    replace,
    retagged,
    snapshot,
    two_gathers,
)
from tests.zpasses.inspect.real import dump_training_step, real_dump
from zpasses.dumps.format import Failure
from zpasses.dumps.nodes import Buffer, Ref, Tag
from zpasses.inspect import Inspection, compare, pair_nodes
from zpasses.inspect import open as open_dump
from zpasses.inspect.comparison import Comparison
from zpasses.inspect.inspection import _sides

MINUS_58 = "\N{MINUS SIGN}58.8 %"


def stage(keeps):
    """A graph that holds `w` for its whole length, or an activation instead."""
    x, mm, relu, end = range(4) if keeps else range(100, 104)
    buffers = (
        (Buffer(400, mm, end, "parameter", ("w",)),)
        if keeps
        else (Buffer(100, mm, end, "activation"), Buffer(60, mm, end, "gradient", ("w",)))
    )
    kept = (Buffer(8, relu, end, "activation"),)
    product = node(mm, "mm", MM, (Ref(x),), buffers=buffers)
    last = node(relu, "relu", args=(Ref(mm),), buffers=kept)
    nodes = (placeholder(x, "x"), product, last, output(end, relu))
    held = sum(each.nbytes for each in buffers)
    return snapshot(*nodes, live=(0, held, held + 8, held + 8))


def named(name, *graphs):
    dump = dump_of(*graphs)
    return Inspection(replace(dump, path=dump.path.parent / name))


def two_dumps():
    return tuple(
        named(name, graph_of("forward", (None, stage(keeps))))
        for name, keeps in (("stage2", True), ("stage3", False))
    )


def test_new_and_gone_buffers_explain_the_difference_of_the_peaks():
    before, after = stage(True), stage(False)
    found = Comparison(compare(before, after, pair_nodes(before, after)))
    assert (found.before.peak_bytes, found.after.peak_bytes) == (408, 168)
    assert [(each.kind, each.nbytes) for each in found.gone] == [("parameter", 400)]
    new = [(each.kind, each.nbytes) for each in found.new]
    assert new == [("activation", 100), ("gradient", 60)]
    change = sum(each.nbytes for each in found.new) - sum(each.nbytes for each in found.gone)
    assert change == found.after.peak_bytes - found.before.peak_bytes
    assert found.by_kind == {"parameter": (400, 0), "activation": (8, 108), "gradient": (0, 60)}


def allocates(name, *buffers):
    """A graph of one product, which allocates buffers of these kinds, bytes and parameters."""
    held = tuple(Buffer(nbytes, 1, 2, kind, params) for kind, nbytes, params in buffers)
    nodes = (placeholder(0, "x"), node(1, name, MM, (Ref(0),), buffers=held), output(2, 1))
    alive = sum(each.nbytes for each in held)
    return snapshot(*nodes, live=(0, alive, alive))


def bucket_of(*, params, nbytes):
    """A graph whose node `mm` allocates the gradient of a bucket."""
    return allocates("mm", ("gradient", nbytes, params))


def test_a_buffer_that_only_lost_its_parameter_is_neither_new_nor_gone():
    before, after = bucket_of(params=("w",), nbytes=400), bucket_of(params=(), nbytes=400)
    found = Comparison(compare(before, after, pair_nodes(before, after)))
    assert found.new == found.gone == ()


def test_a_buffer_that_grew_is_new_by_the_difference():
    before, after = bucket_of(params=(), nbytes=400), bucket_of(params=(), nbytes=410)
    found = Comparison(compare(before, after, pair_nodes(before, after)))
    assert [(each.node, each.nbytes) for each in found.new] == [("mm", 10)]
    assert found.gone == ()


def two_of_a_bucket(*members):
    """A graph whose node `gather` allocates a buffer per parameter, of 100 bytes times its number.

    Args:
        members: numbers of parameters.
    """
    return allocates("gather", *(("bucket", 100 * each, (f"w{each}",)) for each in members))


def test_buffers_of_a_bucket_are_compared_by_their_parameters():
    before, after = two_of_a_bucket(1, 2, 3), two_of_a_bucket(2, 3)
    found = Comparison(compare(before, after, pair_nodes(before, after)))
    assert [(each.nbytes, each.params) for each in found.gone] == [(100, ("w1",))]
    assert found.new == ()
    other = Comparison(compare(after, before, pair_nodes(after, before)))
    assert (other.new, other.gone) == (found.gone, ())


def saves_or_computes(*, saves):
    """A graph that takes a view as an input, or computes it, of a parameter that may be cached."""
    cached = Tag("param", ("w",), cached=saves)
    computed = node(1, "view", "aten.view.default", (Ref(0),))
    param = node(0, "w", "w", op="placeholder", params=("w",), tag=cached)
    return snapshot(param, placeholder(1, "view") if saves else computed, output(2, 1))


@pytest.mark.parametrize("graph", ["joint", "forward", "backward"])
def test_the_memory_delta_of_every_pass_adds_up(graph):
    inspection = open_dump(real_dump()[0])
    steps = inspection.dump.ranks[0].compiles[0].graphs[graph].steps
    for at in range(1, len(steps)):
        found = Comparison(inspection.diff_of_steps(graph, at - 1, at))
        change = sum(each.nbytes for each in found.new) - sum(each.nbytes for each in found.gone)
        assert change == found.after.peak_bytes - found.before.peak_bytes
        kinds = sum(now - was for was, now in found.by_kind.values())
        assert kinds == found.after.peak_bytes - found.before.peak_bytes


def test_diff_summarises_time_exposed_peak_and_collectives():
    first, second = two_dumps()
    view = first.diff_to(second)
    text = str(view)
    assert text.startswith("graph ")  # figures first
    figures, counts, peaks = (text.index(part) for part in (" -58.8%", ": no change", "at peak"))
    assert figures < counts < peaks
    ends = [line.split()[-6:] for line in text.splitlines()]
    assert ["peak", "408", "B", "168", "B", "-58.8%"] in ends
    assert "parameter 400 B -> 0 B" in text
    assert "gone       mm              parameter" in text
    figures = view.data["graphs"][0]["figures"]
    assert (figures["before"]["peak_bytes"], figures["after"]["peak_bytes"]) == (408, 168)
    assert figures["gone_at_peak"][0]["params"] == ("w",)
    json.dumps(view.data)


def test_columns_have_the_names_of_the_dumps_or_of_the_ranks():
    first, second = two_dumps()
    heads = str(first.diff_to(second)).splitlines()[0].split()
    assert heads == ["graph", "figure", "stage2", "stage3", "change"]
    ranks = [Inspection(first.dump, rank) for rank in (0, 1)]
    assert _sides(*ranks) == ("rank 0", "rank 1")
    assert _sides(ranks[1], Inspection(second.dump, 1)) == ("stage2", "stage3")
    assert _sides(ranks[0], ranks[0]) == ("first", "second")


# --- the page -------------------------------------------------------------------------------------
@needs_browser
def test_the_page_counts_changes_as_the_command_does(page):
    both = [
        named(name, graph_of("forward", (None, saves_or_computes(saves=saves))))
        for name, saves in (("stage2", True), ("stage3", False))
    ]
    counted = (
        "const {left, right} = sidesOfComparison(), found = {};"
        "for (const row of compared(left.graph, right.graph).rows)"
        "  for (const kind of row.counted) found[kind] = (found[kind] ?? 0) + 1;"
        "return found;"
    )
    shown = page(both[0], "0/forward/0/compare/", both[1])
    (told,) = both[0].diff_to(both[1]).data["graphs"]
    assert shown.execute_script(counted) == told["counts"]
    assert told["counts"] == {"inserted": 1, "removed": 1, "rewired": 1, "retagged": 1}
    real = open_dump(real_dump()[0])
    shown = page(real)
    for name in ("joint", "forward", "backward"):
        last = len(real.dump.ranks[0].compiles[0].graphs[name].steps) - 1
        for first in (0, last - 1):
            page(real, f"0/{name}/{last}/compare//with=0%2F{name}%2F{first}")
            found, expected = shown.execute_script(counted), real.diff_of_steps(name, first, last)
            for kind in ("moved", "inserted", "removed", "retyped", "rewired"):
                assert found.get(kind, 0) == expected.counts.get(kind, 0)


@needs_browser
def test_the_page_pairs_nodes_as_the_command_does(page, tmp_path):
    for lines in (True, False):
        graphs = gradients("b", lines=lines), gradients("b", "c", lines=lines)
        first, second = (
            named(f"rank{at}", graph_of("backward", (None, each))) for at, each in enumerate(graphs)
        )
        found = page(first, "", second).execute_script(
            "return [...pairNodes(...compiles.map((c) => c.at(c.graphs[0], 0)))];"
        )
        assert dict(found) == pair_nodes(*graphs)
    dump_training_step(tmp_path / "other", pipeline="zero2")
    first, second = open_dump(real_dump()[0]), open_dump(tmp_path / "other")
    shown = page(first, "", second)
    for name in ("joint", "forward", "backward"):
        found = shown.execute_script(
            "const side = (c) => { const g = compiles[c].graphData(arguments[0]);"
            " return compiles[c].at(g, compiles[c].last(g)); };"
            "return [...pairNodes(side(0), side(1))];",
            name,
        )
        expected = pair_nodes(*(each.step_of(name).snapshot for each in (first, second)))
        same = sum(expected.get(a) == b for a, b in found)
        assert same >= 0.9 * len(expected)
        assert abs(len(found) - len(expected)) <= 0.05 * len(expected)


@needs_browser
def test_two_dumps_are_compared_and_scroll_together(page):
    dumps = []
    for inspected, folder in zip(two_dumps(), ("old", "new"), strict=True):
        about = {"meta": {**inspected.dump.meta, "torch": f"2.13.0+{folder}"}}
        about["path"] = Path(folder) / inspected.dump.path
        dumps.append(Inspection(replace(inspected.dump, **about)))
    first, second = dumps
    shown = page(first, "0/forward/0/memory/", second)
    for at, folder in enumerate(("old", "new")):
        shown.execute_script(f"go({{compile: {at}, graph: '', node: null}})")
        assert f"torch 2.13.0+{folder}" in one(shown, "#about").text
        assert folder in one(shown, "#path").get_attribute("title")
    shown.execute_script("go({compile: 0})")
    one(shown, "#tab-compare").click()
    text = one(shown, "main").text
    for part in ("stage2, compile 0/0", "stage3, compile 0/0", "408 B", "168 B", MINUS_58):
        assert part in text
    assert "gone at the peak: 400 B" in text
    assert "new at the peak: 160 B" in text
    one(shown, ".gap", "4 equal nodes").click()
    row = one(shown, ".pair", "relu")
    assert row.text.count("relu = relu(mm)") == 2
    row.click()
    assert one(shown, ".detail h2").text == "relu"
    one(shown, "button", "Swap").click()
    assert "gone at the peak: 160 B" in one(shown, "main").text


@pytest.mark.slow(quick="test_timeline_and_memory_react_to_pointer_and_keys")
@needs_browser
def test_passes_of_one_graph_are_compared_and_the_earlier_graph_is_on_the_left(page):
    bucketed = (None, two_gathers()), ("bucket", two_gathers())
    states = *bucketed, ("overlap", two_gathers(True)), ("drop", chain(3))
    inspected = Inspection(dump_of(graph_of("forward", *states)))
    for address, left, right in (
        ("3/compare/", "before the first pass", "drop"),
        ("0/compare/", "before the first pass", "drop"),
        ("1/compare//with=0%2Fforward%2F2", "bucket", "overlap"),
        ("2/compare//with=0%2Fforward%2F1", "bucket", "overlap"),
        ("2/compare//with=0%2Fforward%2F1&swap=1", "overlap", "bucket"),
    ):
        shown = page(inspected, f"0/forward/{address}")
        titles = lambda: texts(shown, ".compared thead th.right")[:2]  # noqa: E731, B023
        assert titles() == [f"forward, {each}" for each in (left, right)]
        one(shown, "button", "Swap").click()
        assert titles() == [f"forward, {each}" for each in (right, left)]
        assert shown.execute_script("return state.step") == int(address[0])
    shown = page(inspected, "0/forward/0/compare//with=0%2Fforward%2F2")
    assert one(shown, ".chip.moved").get_attribute("title") == "1 node moved"
    select = one(shown, '[aria-label="Compare with"]')
    assert select.get_attribute("value") == "0/forward/2"
    page(inspected, "0/forward/3/compare/")
    one(shown, ".cell.before.removed", "gather_v").click()
    assert one(shown, ".detail h2").text == "gather_v"  # a node of the left graph only
    buckets = graph_of("forward", (None, two_of_a_bucket(1, 2, 3)), ("p", two_of_a_bucket(2, 3)))
    shown = page(Inspection(dump_of(buckets)), "0/forward/1/compare/")
    told = one(shown, ".peak-delta").text.split("\n")
    assert told == ["gone at the peak: 100 B", "100 B bucket w1", "new at the peak: 0 B"]


def passes(*names):
    """A graph whose passes all move the second gather or move it back."""
    states = [(None, two_gathers())]
    for at, name in enumerate(names):
        states.append((name, two_gathers(early=at % 2 == 0)))
    return graph_of("forward", *states)


FULL = ("bucket{cap_mb=1}", "overlap", "bucket{cap_mb=2}")
COUNTERPARTS = [
    (FULL, 0, FULL, "before the first pass", None),
    (FULL, 2, FULL, "overlap", None),
    (FULL, 1, ("bucket{cap_mb=9}", *FULL[1:]), "bucket{cap_mb=9}", None),
    (FULL, 3, ("bucket{cap_mb=2}", "overlap"), "bucket{cap_mb=2}", "2 times in the shown graph"),
    (FULL, 2, ("bucket{cap_mb=1}",), "bucket{cap_mb=1}", 'has no pass "overlap"'),
    (("overlap",), 1, ("overlap", "bucket"), "overlap", "1 more pass follows"),
]


@pytest.mark.slow(quick="test_the_page_counts_changes_as_the_command_does")
@needs_browser
def test_a_step_is_compared_with_the_same_pass_of_the_other_dump(page):
    for own, step, others, expected, why in COUNTERPARTS:
        first, second = named("a", passes(*own)), named("b", passes(*others))
        shown = page(first, f"0/forward/{step}/compare/", second)
        assert texts(shown, ".diff-head span")[1] == f"b, compile 0/0 forward, {expected}"
        notices = texts(shown, "main .notice")
        assert bool(notices) == bool(why), (own, step, others, notices)
        assert not why or why in notices[0]
    both = [named(name, passes(*FULL)) for name in "ab"]
    shown = page(both[0], "0/forward/1/compare//with=1%2Fforward%2Fsame", both[1])
    keys(shown, "]")  # the other side follows
    assert texts(shown, ".diff-head span")[1] == "b, compile 0/0 forward, overlap"
    select = one(shown, '[aria-label="Compare with"]')
    assert select.get_attribute("value") == "1/forward/same"
    failure = Failure("KeyError", "w", "overlap")
    graph = graph_of("forward", (None, two_gathers()), ("overlap", None), error=failure)
    failed = Inspection(replace(dump_of(graph, error=failure), path=Path("failed")))
    shown = page(failed, "0/forward/0/compare/", named("a", passes()))
    text = one(shown, "main").text
    assert "Part of a step: forward" in text
    assert "compile 0/0 failed in overlap, so other graphs of the step may be missing" in text


@pytest.mark.slow(quick="test_diff_is_side_by_side_and_folds_unchanged_nodes")
@needs_browser
def test_a_row_shows_what_differs_in_lists_that_are_cut(page):
    names = tuple(f"layers.{at}.weight" for at in range(12))
    before, after = retagged(names, (*names[:-1], "last"))
    inspected = Inspection(dump_of(graph_of("forward", (None, before), ("p", after))))
    for view in ("diff", "compare"):
        shown = page(inspected, f"0/forward/1/{view}/")
        row = one(shown, ".cell.after.retagged", "gather_w")
        told = one(row, ".chip.retagged")
        assert told.text == "params: 12 -> 12: with last, without layers.11.weight"
        middle = row.location["x"] + row.size["width"] / 2
        assert told.location["x"] < middle  # the end of a row is cut
        assert "with last" not in one(shown, ".cell.before", "gather_w").text


OF_LATER = '<script id="data">{"format": 99, "compiles": []}</script>'
NO_REPORTS = ("", HOSTILE, '<script id="data">[1', OF_LATER)


@needs_browser
def test_a_report_can_be_dropped_and_nothing_of_it_is_executed(page):
    def drop(text, name="other.html"):
        shown.execute_script(
            "addReport(new File([arguments[0]], arguments[1], {type: 'text/html'}));", text, name
        )

    first, second = two_dumps()
    shown = page(first.html() + "\n", "0/forward/0/memory/")
    for text in NO_REPORTS:
        drop(text, HOSTILE)
        assert "cannot be added: " in one(shown, ".notice").text
        assert shown.execute_script("return [compiles.length, window.hacked]") == [1, None]
    drop(second.html().replace('"relu"', json.dumps(HOSTILE).replace("<", "\\u003c")))
    wait_for(shown, "document.querySelector('.compared') && compiles.length === 2")
    text = one(shown, "main").text
    assert "stage3, compile 0/0" in text
    assert MINUS_58 in text
    for tab in ("overview", "memory", "listing", "compare"):
        shown.execute_script(f"go({{compile: 1, graph: 'forward', tab: '{tab}'}})")
    assert shown.execute_script("return window.hacked") is None
