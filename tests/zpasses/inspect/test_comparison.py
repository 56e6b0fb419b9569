"""Two graphs side by side: in text, and on the page."""

import json
from pathlib import Path

import pytest

from tests.cases import some_quick
from tests.zpasses.inspect.browsing import (
    HOSTILE,
    all_of,
    keys,
    needs_browser,
    one,
    wait_for,
)
from tests.zpasses.inspect.graphs import (
    chain,
    dump_of,
    gradients,
    graph_of,
    node,
    replace,
    retagged,
    snapshot,
    two_gathers,
)
from tests.zpasses.inspect.real import dump_training_step, real_dump
from zpasses.dumps.format import Buffer, Failure, Ref, Tag
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
    nodes = (
        node(x, "x", "x", op="placeholder"),
        node(mm, "mm", "aten.mm.default", (Ref(x),), buffers=buffers),
        node(relu, "relu", args=(Ref(mm),), buffers=(Buffer(8, relu, end, "activation"),)),
        node(end, "output", "output", ((Ref(relu),),), op="output"),
    )
    held = sum(each.nbytes for each in buffers)
    return snapshot(*nodes, live=(0, held, held + 8, held + 8))


def named(name, *graphs):
    dump = dump_of(*graphs)
    return Inspection(replace(dump, path=dump.path.parent / name))


def two_dumps():
    return (
        named("stage2", graph_of("forward", (None, stage(True)))),
        named("stage3", graph_of("forward", (None, stage(False)))),
    )


def test_new_and_gone_buffers_explain_the_difference_of_the_peaks():
    before, after = stage(True), stage(False)
    found = Comparison(compare(before, after, pair_nodes(before, after)))
    assert (found.before.peak_bytes, found.after.peak_bytes) == (408, 168)
    assert [(each.kind, each.nbytes) for each in found.gone] == [("parameter", 400)]
    assert [(each.kind, each.nbytes) for each in found.new] == [
        ("activation", 100),
        ("gradient", 60),
    ]
    change = sum(each.nbytes for each in found.new) - sum(each.nbytes for each in found.gone)
    assert change == found.after.peak_bytes - found.before.peak_bytes
    assert found.by_kind == {"parameter": (400, 0), "activation": (8, 108), "gradient": (0, 60)}


def bucket_of(*, params, nbytes):
    """A graph whose node `mm` allocates the gradient of a bucket."""
    buffer = Buffer(nbytes, 1, 2, "gradient", params)
    nodes = (
        node(0, "x", "x", op="placeholder"),
        node(1, "mm", "aten.mm.default", (Ref(0),), buffers=(buffer,)),
        node(2, "output", "output", ((Ref(1),),), op="output"),
    )
    return snapshot(*nodes, live=(0, nbytes, nbytes))


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
    buffers = tuple(Buffer(100 * each, 1, 2, "bucket", (f"w{each}",)) for each in members)
    nodes = (
        node(0, "x", "x", op="placeholder"),
        node(1, "gather", "aten.mm.default", (Ref(0),), buffers=buffers),
        node(2, "output", "output", ((Ref(1),),), op="output"),
    )
    held = sum(each.nbytes for each in buffers)
    return snapshot(*nodes, live=(0, held, held))


def test_buffers_of_a_bucket_are_compared_by_their_parameters():
    before, after = two_of_a_bucket(1, 2, 3), two_of_a_bucket(2, 3)
    found = Comparison(compare(before, after, pair_nodes(before, after)))
    assert [(each.nbytes, each.params) for each in found.gone] == [(100, ("w1",))]
    assert found.new == ()
    other = Comparison(compare(after, before, pair_nodes(after, before)))
    assert (other.new, other.gone) == (found.gone, ())


@pytest.mark.slow(quick="test_pairs_of_the_page_are_those_of_the_command_line")
@needs_browser
def test_the_page_compares_buffers_of_a_bucket_by_their_parameters(page):
    steps = graph_of("forward", (None, two_of_a_bucket(1, 2, 3)), ("p", two_of_a_bucket(2, 3)))
    shown = page(Inspection(dump_of(steps)), "0/forward/1/compare/")
    texts = shown.find_element("css selector", ".peak-delta").text.split("\n")
    assert texts == ["gone at the peak: 100 B", "100 B bucket w1", "new at the peak: 0 B"]


def saves_or_computes(*, saves):
    """A graph that takes a view as an input, or computes it, of a parameter that may be cached."""
    cached = Tag("param", ("w",), cached=saves)
    view = (
        node(1, "view", "view", op="placeholder")
        if saves
        else node(1, "view", "aten.view.default", (Ref(0),))
    )
    nodes = (
        node(0, "w", "w", op="placeholder", params=("w",), tag=cached),
        view,
        node(2, "output", "output", ((Ref(1),),), op="output"),
    )
    return snapshot(*nodes)


@needs_browser
def test_the_page_counts_the_changes_between_dumps_as_the_command_does(page):
    both = [
        named(name, graph_of("forward", (None, saves_or_computes(saves=saves))))
        for name, saves in (("stage2", True), ("stage3", False))
    ]
    shown = page(_Both(*both), "0/forward/0/compare/")
    counted = shown.execute_script(
        "const {left, right} = sidesOfComparison(), found = {};"
        "for (const row of compared(left.graph, right.graph).rows)"
        "  for (const kind of row.counted) found[kind] = (found[kind] ?? 0) + 1;"
        "return found;"
    )
    (told,) = both[0].diff_to(both[1]).data["graphs"]
    assert counted == told["counts"] == {"inserted": 1, "removed": 1, "rewired": 1, "retagged": 1}


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
    assert ["peak", "408", "B", "168", "B", "-58.8%"] in [
        line.split()[-6:] for line in text.splitlines()
    ]
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


def test_equal_graphs_have_no_summary():
    first, _ = two_dumps()
    assert str(first.diff_to(first)) == "0/0 forward, before the first pass: no change"


# --- the page -------------------------------------------------------------------------------------
@pytest.fixture
def both(page):
    def show(address="0/forward/0/compare/"):
        first, second = two_dumps()
        return page(_Both(first, second), address)

    return show


class _Both:
    def __init__(self, *inspections):
        self._inspections = inspections

    def html(self):
        first, *others = self._inspections
        return first.html(*others)


@pytest.mark.slow(quick="test_both_graphs_scroll_and_are_selected_together")
@needs_browser
def test_a_second_dump_is_one_click_away(both):
    shown = both("0/forward/0/memory/")
    one(shown, "#tab-compare").click()
    text = one(shown, "main").text
    for part in ("stage2, compile 0/0", "stage3, compile 0/0", "408 B", "168 B", MINUS_58):
        assert part in text
    assert "gone at the peak: 400 B" in text
    assert "new at the peak: 160 B" in text
    one(shown, "button", "Swap").click()
    assert "gone at the peak: 160 B" in one(shown, "main").text


@pytest.mark.slow(quick="test_both_graphs_scroll_and_are_selected_together")
@needs_browser
def test_the_header_speaks_of_the_dump_that_is_shown(page):
    dumps = []
    for inspected, folder in zip(two_dumps(), ("old", "new"), strict=True):
        dump = inspected.dump
        meta = {**dump.meta, "torch": f"2.13.0+{folder}"}
        dumps.append(Inspection(replace(dump, path=Path(folder) / "dump", meta=meta)))
    shown = page(_Both(*dumps))
    choices = [each.text for each in all_of(shown, "#compile option")]
    assert [each.partition(",")[0] for each in choices] == ["old/dump", "new/dump"]
    for at, folder in enumerate(("old", "new")):
        shown.execute_script(f"go({{compile: {at}, graph: '', node: null}})")
        assert f"torch 2.13.0+{folder}" in one(shown, "#about").text
        assert one(shown, "#path").text == f"{folder}/dump"


@needs_browser
def test_both_graphs_scroll_and_are_selected_together(both):
    shown = both()
    one(shown, ".gap", "4 equal nodes").click()
    row = one(shown, ".pair", "relu")
    assert row.text.count("relu = relu(mm)") == 2
    row.click()
    assert one(shown, ".detail h2").text == "relu"


@pytest.mark.slow(quick="test_the_page_counts_the_changes_between_dumps_as_the_command_does")
@needs_browser
def test_passes_of_one_graph_can_be_compared(page):
    graph = graph_of(
        "forward", (None, two_gathers()), ("bucket", two_gathers()), ("overlap", two_gathers(True))
    )
    shown = page(Inspection(dump_of(graph)), "0/forward/0/compare//with=0%2Fforward%2F2")
    assert one(shown, ".chip.moved").get_attribute("title") == "1 node moved"
    select = one(shown, '[aria-label="Compare with"]')
    assert select.get_attribute("value") == "0/forward/2"


def titles(shown):
    return [each.text for each in all_of(shown, ".compared thead th.right")[:2]]


SIDES = [
    ("0/forward/2/compare/", "before the first pass", "after overlap"),
    ("0/forward/0/compare/", "before the first pass", "after overlap"),
    ("0/forward/1/compare//with=0%2Fforward%2F2", "after bucket", "after overlap"),
    ("0/forward/2/compare//with=0%2Fforward%2F1", "after bucket", "after overlap"),
    ("0/forward/2/compare//with=0%2Fforward%2F1&swap=1", "after overlap", "after bucket"),
]


@pytest.mark.slow(quick="test_diff_is_side_by_side_and_folds_unchanged_nodes")
@needs_browser
@pytest.mark.parametrize(
    ("address", "left", "right"),
    some_quick(SIDES, SIDES[-2:]),
)
def test_the_earlier_graph_is_on_the_left(page, address, left, right):
    graph = graph_of(
        "forward", (None, two_gathers()), ("bucket", two_gathers()), ("overlap", two_gathers(True))
    )
    shown = page(Inspection(dump_of(graph)), address)
    names = [each.removeprefix("after ") for each in (left, right)]
    assert [name.removeprefix("forward, ") for name in titles(shown)] == names
    one(shown, "button", "Swap").click()
    assert [name.removeprefix("forward, ") for name in titles(shown)] == names[::-1]
    assert shown.execute_script("return state.step") == int(address.split("/")[2])


def passes(*names):
    """A graph whose passes all move the second gather or move it back."""
    states = [(None, two_gathers())]
    for at, name in enumerate(names):
        states.append((name, two_gathers(early=at % 2 == 0)))
    return graph_of("forward", *states)


FULL = ("bucket{cap_mb=1}", "overlap", "bucket{cap_mb=2}")
COUNTERPARTS = [
    (FULL, 0, FULL, "before the first pass", None),
    (FULL, 1, FULL, "bucket{cap_mb=1}", None),
    (FULL, 2, FULL, "overlap", None),
    (FULL, 1, ("bucket{cap_mb=9}", *FULL[1:]), "bucket{cap_mb=9}", None),
    (FULL, 3, ("bucket{cap_mb=2}", "overlap"), "bucket{cap_mb=2}", "2 times in the shown graph"),
    (FULL, 2, ("bucket{cap_mb=1}",), "bucket{cap_mb=1}", 'has no pass "overlap"'),
    (("overlap",), 1, ("overlap", "bucket"), "overlap", "1 more pass follows"),
]


@pytest.mark.slow(quick="test_the_page_estimates_no_step_of_a_compile_that_has_no_graph_that_runs")
@needs_browser
def test_graphs_of_a_compile_that_failed_are_no_whole_step(page):
    failure = Failure("KeyError", "w", "overlap")
    graph = graph_of("forward", (None, two_gathers()), ("overlap", None), error=failure)
    whole = dump_of(graph_of("forward", (None, two_gathers())))
    failed = Inspection(replace(dump_of(graph, error=failure), path=Path("failed")))
    shown = page(_Both(failed, Inspection(whole)), "0/forward/0/compare/")
    text = one(shown, "main").text
    assert "Part of a step: forward" in text
    assert (
        "failed, compile 0/0 failed in overlap, so other graphs of the step may be missing" in text
    )
    assert "Whole step" not in text


def compared_with(shown):
    return all_of(shown, ".diff-head span")[1].text


@pytest.mark.slow(quick="test_the_page_counts_the_changes_between_dumps_as_the_command_does")
@needs_browser
def test_a_step_is_compared_with_the_same_pass_of_the_other_dump(page):
    for own, step, others, expected, why in COUNTERPARTS:
        first, second = named("a", passes(*own)), named("b", passes(*others))
        shown = page(_Both(first, second), f"0/forward/{step}/compare/")
        assert compared_with(shown) == f"b, compile 0/0 forward, {expected}"
        notices = [each.text for each in all_of(shown, "main .notice")]
        assert bool(notices) == bool(why), (own, step, others, notices)
        assert not why or why in notices[0]


@pytest.mark.slow(quick="test_both_graphs_scroll_and_are_selected_together")
@needs_browser
def test_the_other_side_follows_the_shown_pass(page):
    both_ = _Both(named("a", passes(*FULL)), named("b", passes(*FULL)))
    shown = page(both_, "0/forward/1/compare//with=1%2Fforward%2Fsame")
    assert compared_with(shown) == "b, compile 0/0 forward, bucket{cap_mb=1}"
    keys(shown, "]")
    assert compared_with(shown) == "b, compile 0/0 forward, overlap"
    select = one(shown, '[aria-label="Compare with"]')
    assert select.get_attribute("value") == "1/forward/same"


@pytest.mark.slow(quick="test_both_graphs_scroll_and_are_selected_together")
@needs_browser
def test_a_node_of_the_left_graph_alone_is_shown(page):
    graph = graph_of("forward", (None, two_gathers()), ("drop", chain(3)))
    shown = page(Inspection(dump_of(graph)), "0/forward/1/compare/")
    one(shown, ".cell.before.removed", "gather_v").click()
    assert one(shown, ".detail h2").text == "gather_v"


@needs_browser
@pytest.mark.parametrize("graph", some_quick(["joint", "forward", "backward"], ["forward"]))
def test_pairs_of_the_page_are_those_of_the_command_line(page, tmp_path, graph):
    dump_training_step(tmp_path / "other", pipeline="zero2")
    first, second = open_dump(real_dump()[0]), open_dump(tmp_path / "other")
    shown = page(_Both(first, second))
    found = shown.execute_script(
        "const side = (c) => { const g = compiles[c].graphs.find((e) => e.name === arguments[0]);"
        " return compiles[c].at(g, compiles[c].last(g)); };"
        "return [...pairNodes(side(0), side(1))];",
        graph,
    )
    one_, other = first.step_of(graph).snapshot, second.step_of(graph).snapshot
    expected = pair_nodes(one_, other)
    same = sum(expected.get(a) == b for a, b in found)
    assert same >= 0.9 * len(expected)
    assert abs(len(found) - len(expected)) <= 0.05 * len(expected)


@pytest.mark.slow(quick="test_diff_is_side_by_side_and_folds_unchanged_nodes")
@needs_browser
@pytest.mark.parametrize("view", ["diff", "compare"])
def test_a_row_shows_what_differs_in_lists_that_are_cut(page, view):
    names = tuple(f"layers.{at}.weight" for at in range(12))
    before, after = retagged(names, (*names[:-1], "last"))
    steps = graph_of("forward", (None, before), ("p", after))
    shown = page(Inspection(dump_of(steps)), f"0/forward/1/{view}/")
    row = one(shown, ".cell.after.retagged", "gather_w")
    told = one(row, ".chip.retagged")
    assert told.text == "params: 12 -> 12: with last, without layers.11.weight"
    assert told.location["x"] < row.location["x"] + row.size["width"] / 2  # the end of a row is cut
    assert "with last" not in one(shown, ".cell.before", "gather_w").text


@pytest.mark.slow(quick="test_pairs_of_the_page_are_those_of_the_command_line")
@needs_browser
@pytest.mark.parametrize("lines", [True, False])
def test_the_page_pairs_nodes_by_their_parameters_before_their_shapes(page, lines):
    graphs = gradients("b", lines=lines), gradients("b", "c", lines=lines)
    first, second = (
        named(f"rank{at}", graph_of("backward", (None, each))) for at, each in enumerate(graphs)
    )
    shown = page(_Both(first, second))
    found = shown.execute_script(
        "return [...pairNodes(...compiles.map((c) => c.at(c.graphs[0], 0)))];"
    )
    assert dict(found) == pair_nodes(*graphs)


@pytest.mark.slow(quick="test_the_page_counts_the_changes_between_dumps_as_the_command_does")
@needs_browser
@pytest.mark.parametrize("graph", ["joint", "forward", "backward"])
def test_changes_between_steps_on_the_page_are_those_of_the_command_line(page, graph):
    inspection = open_dump(real_dump()[0])
    shown = page(inspection)
    steps = inspection.dump.ranks[0].compiles[0].graphs[graph].steps
    for first, last in ((0, len(steps) - 1), (len(steps) - 2, len(steps) - 1)):
        counts = shown.execute_script(
            "const g = compiles[0].graphs.find((e) => e.name === arguments[0]);"
            "const [a, b] = [arguments[1], arguments[2]].map((at) => compiles[0].at(g, at));"
            "const rows = alignPairs(a, b, pairNodes(a, b)), found = {};"
            "for (const row of rows) for (const kind of row.counted)"
            "  found[kind] = (found[kind] || 0) + 1;"
            "return found;",
            graph,
            first,
            last,
        )
        expected = inspection.diff_of_steps(graph, first, last).counts
        assert counts.get("moved", 0) == expected.get("moved", 0)
        assert counts.get("inserted", 0) == expected.get("inserted", 0)
        assert counts.get("removed", 0) == expected.get("removed", 0)
        assert counts.get("retyped", 0) == expected.get("retyped", 0)
        assert counts.get("rewired", 0) == expected.get("rewired", 0)


def drop(shown, text, name="other.html"):
    shown.execute_script(
        "addReport(new File([arguments[0]], arguments[1], {type: 'text/html'}));", text, name
    )


@needs_browser
def test_a_report_can_be_dropped_onto_the_page(page):
    first, second = two_dumps()
    shown = page(first, "0/forward/0/memory/")
    drop(shown, second.html())
    wait_for(shown, "document.querySelector('.compared') && compiles.length === 2")
    text = one(shown, "main").text
    assert "stage3, compile 0/0" in text
    assert MINUS_58 in text


NO_REPORTS = [
    "",
    HOSTILE,
    '<script id="data">[1',
    '<script id="data">{"format": 99, "compiles": []}</script>',
    '<script id="data">{"format": 3, "path": "x", "compiles": [{}]}</script>',
    '<script id="data">{"format": 3, "path": "x", "compiles": []}</script>',
]


@pytest.mark.slow(quick="test_nothing_of_a_dropped_report_is_executed")
@needs_browser
@pytest.mark.parametrize(
    "text",
    some_quick(NO_REPORTS, NO_REPORTS[1::2]),
)
def test_a_dropped_file_that_is_no_report_is_refused_with_a_reason(page, text):
    shown = page(two_dumps()[0])
    drop(shown, text, HOSTILE)
    assert "cannot be added: " in one(shown, ".notice").text
    assert shown.execute_script("return [compiles.length, window.hacked]") == [1, None]


@needs_browser
def test_nothing_of_a_dropped_report_is_executed(page):
    first, second = two_dumps()
    shown = page(first)
    hostile = second.html().replace('"relu"', json.dumps(HOSTILE).replace("<", "\\u003c"))
    drop(shown, hostile)
    wait_for(shown, "compiles.length === 2")
    for tab in ("overview", "memory", "listing", "compare"):
        shown.execute_script(f"go({{compile: 1, graph: 'forward', tab: '{tab}'}})")
    assert shown.execute_script("return window.hacked") is None


def test_html_of_two_ranks_has_both():
    folder = real_dump()[0]
    dump = open_dump(folder).dump
    text = Inspection(dump, 0).html(Inspection(dump, 1))
    start = text.index('id="data">') + len('id="data">')
    data = json.loads(text[start : text.index("</script>", start)])
    assert [each["rank"] for each in data["compiles"]] == [0, 1]
    assert len({each["dump"] for each in data["compiles"]}) == 1
