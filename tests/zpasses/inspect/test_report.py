"""Tests of report.html in a headless browser: it opens without errors, filters and links work, and
nothing from a dump is executed.
"""

import json
import re
from pathlib import Path

import pytest

from tests.zpasses.inspect.browsing import (
    ESCAPED,
    HOSTILE,
    all_of,
    keys,
    needs_browser,
    one,
    wait_for,
)
from tests.zpasses.inspect.graphs import (
    GATHER,
    WAIT,
    chain,
    dump_of,
    graph_of,
    node,
    replace,
    small_dump,
    snapshot,
    two_gathers,
    two_groups,
)
from tests.zpasses.inspect.real import real_dump
from zpasses.dumps.format import Buffer, Collective, Failure, Prediction, Ref, Source, Tag
from zpasses.inspect import Inspection, report
from zpasses.inspect import open as open_dump


def rows(browser):
    return [each.text for each in all_of(browser, "main .rows .row") if each.is_displayed()]


# --- content --------------------------------------------------------------------------------------
@needs_browser
def test_every_view_of_a_real_dump_opens(page):
    browser = page(open_dump(real_dump()[0]))
    assert "zpasses report" in browser.title
    for tab in ("Diff", "Memory", "Timeline", "Collectives", "Graph", "Source", "Overview"):
        one(browser, ".tabs button", tab).click()
        assert one(browser, '.tabs [aria-selected="true"]').text == tab
        assert one(browser, "main").text.strip()
    overview = one(browser, "main").text
    for word in (
        "Exposed communication",
        "Peak memory",
        "bucket{memory_budget=1MiB}",
        "merge-reads",
        "backward",
    ):
        assert word in overview
    wide = "Array.from(document.querySelectorAll('main .scroll')).filter(each => each.scrollWidth > each.clientWidth).length"  # noqa: E501
    assert browser.execute_script(f"return {wide}") == 0  # at 1280 px nothing scrolls horizontally


@needs_browser
def test_memory_and_times_on_the_page_equal_the_models(page):
    inspection = open_dump(real_dump()[0])
    browser = page(inspection)
    curves = "compiles[0].graphs.flatMap(g => g.steps.map((s, i) => Array.from(compiles[0].at(g, i).curves.live).slice(0, -1)))"  # noqa: E501
    graphs = inspection.dump.ranks[0].compiles[0].graphs.values()
    assert browser.execute_script(f"return {curves}") == [
        list(step.snapshot.live_bytes) for graph in graphs for step in graph.steps
    ]
    for kind in ("forward", "backward"):
        spans = f"compiles[0].at(compiles[0].graphData('{kind}'), 1).spans.map(s => [s.node.name, s.start, s.end])"  # noqa: E501
        expected = [
            [span.node.name, span.start_us, span.end_us]
            for span in inspection.schedule_of(kind, 1).compute
        ]
        for shown, (name, start, end) in zip(
            browser.execute_script(f"return {spans}"), expected, strict=True
        ):
            assert shown == [name, pytest.approx(start, abs=0.05), pytest.approx(end, abs=0.05)]


@needs_browser
def test_diff_is_side_by_side_and_folds_unchanged_nodes(page):
    browser = page(Inspection(small_dump()), "0/forward/2/diff/")
    assert "peak 256 B → 320 B +25.0 %" in one(browser, ".runline").text
    moved = [each.text for each in all_of(browser, ".cell.moved")]
    assert [re.sub(r"\s+", " ", text).partition(" =")[0] for text in moved] == [
        "6 ↕ gather_v",
        "7 ↕ gather_v",
    ]
    browser = page(
        Inspection(
            dump_of(graph_of("joint", (None, chain(60)), ("retag", retagged(chain(60), 30))))
        ),
        "0/joint/1/diff/",
    )
    assert [text for text in rows(browser) if "unchanged" in text] == [
        "⋯ 27 unchanged nodes",
        "⋯ 27 unchanged nodes",
    ]
    one(browser, ".row.gap").click()
    wait_for(browser, "document.querySelectorAll('main .gap').length < 2")


def retagged(graph, at):

    nodes = list(graph.nodes)
    nodes[at] = replace(nodes[at], tag=Tag("full", ("w",)))
    return snapshot(*nodes, number=1)


@pytest.mark.slow(quick="test_diff_is_side_by_side_and_folds_unchanged_nodes")
@needs_browser
def test_recompute_marks_are_in_the_diff_and_in_the_node_panel(page):
    inspection = open_dump(real_dump()[0])
    step = inspection.step_of("joint", "reshard-after-forward")
    browser = page(inspection, f"0/joint/{step.index}/diff/")
    assert (
        f"{step.run.changes} recompute-changed" in one(browser, ".bar .chip.recompute-changed").text
    )
    one(browser, ".cell.after.recompute-changed").click()
    assert one(browser, ".detail .chip", "recomputed")
    assert "no mark -> recomputed" in one(browser, ".detail dl").text


@pytest.mark.slow(quick="test_the_page_estimates_no_step_of_a_compile_that_has_no_graph_that_runs")
@needs_browser
def test_unchanged_and_failed_passes_are_reported(page):
    assert (
        "changed nothing" in one(page(Inspection(small_dump()), "0/forward/1/diff/"), "main").text
    )
    failure = Failure("PassError", "pass 'sdma': node x has no wait", "sdma", "Traceback ...")
    browser = page(
        Inspection(
            dump_of(
                graph_of("joint", (None, chain(5)), ("sdma", None), error=failure), error=failure
            )
        )
    )
    assert "node x has no wait" in one(browser, ".failure").text
    assert one(browser, ".nav .failed").text == "failed"
    early = dump_of(graph_of("joint", (None, chain(5)), ("s", None), error=failure))
    assert (
        "does not contain this graph"
        in one(page(Inspection(early), "0/joint/1/diff/"), "main").text
    )


@pytest.mark.slow(quick="test_memory_and_times_on_the_page_equal_the_models")
@needs_browser
def test_captured_graph_has_no_estimates(page):
    browser = page(Inspection(dump_of(graph_of("captured", (None, chain(5))))))
    assert (
        "6 nodes · 0 collectives · as Dynamo captured it, no estimates"
        in one(browser, ".card header").text
    )
    for tab in ("memory", "timeline", "collectives"):
        browser.execute_script(f"go({{graph: 'captured', step: 0, tab: '{tab}'}})")
        assert "is the graph that Dynamo captured" in one(browser, "main").text


@pytest.mark.slow(quick="test_the_page_estimates_no_step_of_a_compile_that_has_no_graph_that_runs")
@needs_browser
def test_dump_without_graphs_shows_the_error(page):
    failure = Failure("OptionError", "no pass is called 'x'", "options")
    assert "no pass is called 'x'" in one(page(Inspection(dump_of(error=failure))), "main").text


# --- filters and links ----------------------------------------------------------------------------
@needs_browser
def test_listing_filters_and_selects_a_node(page):
    browser = page(Inspection(small_dump()), "0/forward/2/listing/")
    assert len(rows(browser)) == 10
    one(browser, ".filter").send_keys("is:collective v")
    wait_for(browser, "document.querySelectorAll('main .row').length === 1")
    assert "1 of 10 nodes" in one(browser, ".bar").text
    one(browser, "main .row").click()
    detail = one(browser, ".detail").text
    assert all(
        word in detail
        for word in (
            "gather_v",
            "all_gather_into_tensor",
            "input",
            "exposed",
            "2 µs",
            "users (1)",
        )
    )
    one(browser, ".detail .links button", "v_shard").click()
    assert one(browser, ".detail h2").text == "v_shard"
    browser.back()
    wait_for(browser, "document.querySelector('.detail h2').textContent === 'gather_v'")


@needs_browser
def test_collectives_sort_filter_and_jump(page):
    browser = page(Inspection(small_dump()), "0/forward/2/collectives/")
    names = lambda: [each.text for each in all_of(browser, "main .row .col-node")]  # noqa: E731
    assert names() == ["gather_w", "gather_v"]
    one(browser, ".grid-head button", "exposed").click()
    assert names() == ["gather_w", "gather_v"]
    assert (
        one(browser, ".col-exposed[role=columnheader]").get_attribute("aria-sort") == "descending"
    )
    one(browser, ".grid-head button", "exposed").click()
    assert names() == ["gather_v", "gather_w"]
    one(browser, ".filter").send_keys("gather_v")
    wait_for(browser, "document.querySelectorAll('main .row').length === 1")
    assert "1 of 2 collectives" in one(browser, ".bar").text
    one(browser, "main .row").click()
    assert one(browser, ".detail h2").text == "gather_v"
    one(browser, ".detail .actions button", "Show in listing").click()
    active = wait_for(browser, "document.querySelector('main .row.active')?.textContent")
    assert "gather_v = all_gather_into_tensor" in active


@pytest.mark.slow(quick="test_collectives_sort_filter_and_jump")
@needs_browser
def test_exposed_filter_and_kind_filter_of_collectives(page):
    browser = page(open_dump(real_dump()[0]), "0/backward/0/collectives/")
    every = len(all_of(browser, "main .row"))
    browser.execute_script(
        "const s = document.querySelector('main select'); s.selectedIndex = 1; s.dispatchEvent(new "
        "Event('change'))"
    )
    some = wait_for(browser, "document.querySelectorAll('main .row').length")
    assert 0 < some < every
    one(browser, "main input[type=checkbox]").click()
    assert f"of {every} collectives" in one(browser, ".bar").text


@needs_browser
def test_timeline_and_memory_react_to_pointer_and_keys(page):
    from selenium.webdriver import ActionChains

    browser = page(Inspection(small_dump()), "0/forward/2/timeline/")
    chart = one(browser, "canvas")
    wait_for(browser, "document.querySelector('canvas').width > 300")
    # Of 28 us, the second gather takes 10 to 20 in the lower track. Point at its middle.
    across = browser.execute_script(
        "return TRACK.left + (document.querySelector('canvas').clientWidth - TRACK.left - 8) * 15 "
        "/ 28"
    )
    middle = (chart.size["width"] / 2, chart.size["height"] / 2)
    ActionChains(browser).move_to_element_with_offset(
        chart, int(across - middle[0]), int(110 - middle[1])
    ).perform()
    assert "gather_v" in one(browser, ".tooltip").text
    ActionChains(browser).click().perform()
    assert one(browser, ".detail h2").text == "gather_v"
    assert "2 µs" in one(browser, "main table").text
    browser.execute_script("document.querySelector('canvas').focus()")
    keys(browser, "ARROW_UP")
    assert one(browser, ".detail h2").text == "gather_w"
    keys(browser, "ARROW_DOWN")  # the new canvas has the focus
    assert one(browser, ".detail h2").text == "gather_v"

    browser = page(two_groups(), "0/forward/0/timeline/")
    chart = one(browser, "canvas")
    wait_for(browser, "document.querySelector('canvas').width > 300")
    # Of 26 us, both gathers take the first 10, each in its group's track.
    across = browser.execute_script(
        "return TRACK.left + (document.querySelector('canvas').clientWidth - TRACK.left - 8) * 5 / "
        "26"
    )
    for track, name in enumerate(("gather_w", "gather_v")):
        down = browser.execute_script("return laneTop(arguments[0]) + 9", track)
        offset = (int(across - chart.size["width"] / 2), int(down - chart.size["height"] / 2))
        ActionChains(browser).move_to_element_with_offset(chart, *offset).perform()
        assert name in one(browser, ".tooltip").text
    # Lanes are named after mesh dimensions, or after groups if they have none.
    collectives = [
        {"node": {"collective": {"group": name, "ranks": ranks}}}
        for name, ranks in (("dp", 64), ("tp", 8), ("0", 2))
    ]
    lanes = "return laneNames(arguments[0], arguments[1])"
    assert browser.execute_script(lanes, ["dp", "tp", "0"], collectives) == [
        "dp (64)",
        "tp (8)",
        "group 0 (2)",
    ]
    assert browser.execute_script(lanes, ["dp"], collectives) == ["dp (64)"]
    assert browser.execute_script(lanes, ["0"], collectives) == ["communication"]

    browser = page(Inspection(small_dump()), "0/forward/2/memory/")
    assert one(browser, ".alive h2").text.startswith("320 B")
    browser.execute_script("document.querySelector('canvas').focus()")
    keys(browser, "HOME")
    assert one(browser, "canvas").get_attribute("aria-valuetext") == "0 B while x runs"
    keys(browser, "END", "ARROW_LEFT")
    assert "mm_1" in one(browser, ".alive-head").text
    keys(browser, "ENTER")
    assert one(browser, ".detail h2").text == "mm_1"


@pytest.mark.slow(quick="test_every_view_of_a_real_dump_opens")
@needs_browser
def test_source_view_shows_lines_and_their_nodes(page):
    text = "class Model:\n    def forward(self, x):\n        x = self.up(x)\n        return x\n"
    browser = page(Inspection(small_dump(sources={"model.py": text})), "0/forward/2/source/5")
    assert "x = self.up(x)" in one(browser, ".row.chosen").text
    assert "mm = mm(x, w)" in one(browser, ".nodes-of .row").text
    assert "model.py:3 · layers.0.up" in one(browser, ".detail figcaption").text


@needs_browser
def test_everything_is_reachable_by_keyboard(page):
    browser = page(Inspection(small_dump()))
    keys(browser, "TAB")
    assert browser.switch_to.active_element.text == "Skip to content"
    reached = []
    for _ in range(12):
        keys(browser, "TAB")
        reached.append(
            browser.switch_to.active_element.get_attribute("role")
            or browser.switch_to.active_element.tag_name
        )
    assert {"button", "tab"} <= set(reached)
    one(browser, '.tabs [aria-selected="true"]').send_keys("")
    browser.execute_script("document.getElementById('tab-overview').focus()")
    keys(browser, "ARROW_RIGHT")
    assert browser.switch_to.active_element.text == "Diff"
    outline = browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    browser.execute_script(
        "go({tab: 'listing', node: null}); document.querySelector('.rows').focus()"
    )
    keys(browser, "ARROW_DOWN", "ARROW_DOWN", "ENTER")
    assert one(browser, ".detail h2").text == "w_shard"
    keys(browser, "ESCAPE")
    assert not one(browser, "body").find_element("css selector", ".detail").is_displayed()
    keys(browser, "[")
    assert "bucket{cap_mb=0}" in one(browser, ".nav [aria-current]").text


# --- hostile and large ----------------------------------------------------------------------------
def hostile_dump():
    source = Source(HOSTILE, 1, HOSTILE, HOSTILE)
    tag = Tag(HOSTILE, (HOSTILE,), origin=HOSTILE, note=HOSTILE)
    started = node(
        1,
        HOSTILE,
        GATHER,
        (Ref(0), HOSTILE),
        tag=tag,
        source=source,
        params=(HOSTILE,),
        stream="communication",
        cost_us=5.0,
        collective=Collective(HOSTILE, HOSTILE, 2, 32, 64, (2,), HOSTILE, HOSTILE),
        buffers=(Buffer(64, 1, 2, HOSTILE, (HOSTILE,)),),
    )
    nodes = (
        node(0, HOSTILE, HOSTILE, op="placeholder"),
        started,
        node(2, f"{HOSTILE}2", WAIT, (Ref(1),), source=source),
    )
    failure = Failure(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    states = (
        (None, snapshot(*nodes[:1])),
        (HOSTILE, snapshot(*nodes, live=[0, 64, 64], number=1)),
        (HOSTILE, None),
    )
    graph = graph_of("joint", *states, error=failure)
    return dump_of(
        graph,
        error=failure,
        sources={HOSTILE: HOSTILE},
        options={HOSTILE: HOSTILE, "limit": float("inf")},
    )


def test_data_cannot_end_its_html_element():
    text = Inspection(hostile_dump()).html()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[
        1
    ]
    assert not set("<>&") & set(data)
    assert json.loads(data)["compiles"][0]["options"] == {
        ESCAPED: ESCAPED,
        "limit": "inf",
    }  # JSON in browsers has no infinity
    assert text.count("<script") == 2
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)", text.replace(data, "")
    )  # the namespace of SVG is no address


@needs_browser
def test_hostile_names_are_shown_as_text_and_never_run(page):
    browser = page(Inspection(hostile_dump()))
    for tab in ("overview", "diff", "memory", "timeline", "collectives", "listing", "source"):
        browser.execute_script(f"go({{graph: 'joint', step: 1, tab: '{tab}', node: 1}})")
        assert '<img src=x onerror="window.hacked=1">' in one(browser, ".detail h2").text
        assert browser.execute_script(
            "return window.hacked === undefined && document.querySelectorAll('img').length === 0"
        )
        assert len(all_of(browser, "script")) == 2
    assert HOSTILE[:20] in one(browser, ".nav").text


@needs_browser
def test_only_visible_nodes_of_a_large_graph_are_on_the_page(page):
    size = 20_000
    before = chain(size)
    nodes = list(before.nodes)
    for at in range(100, size, 400):
        nodes.insert(
            at,
            node(
                100_000 + at,
                f"extra{at}",
                args=(Ref(0),),
                buffers=(Buffer(1 << 20, 100_000 + at, size, "bucket"),),
            ),
        )
    after = snapshot(*nodes, live=[0] * len(nodes), number=1)
    browser = page(Inspection(dump_of(graph_of("joint", (None, before), ("insert", after)))))
    for tab in ("diff", "memory", "timeline", "listing", "source", "overview"):
        browser.execute_script(f"go({{graph: 'joint', step: 1, tab: '{tab}'}})")
        assert len(all_of(browser, "body *")) < 3000, tab
    assert "50" in one(browser, "main .chip.inserted").text
    browser.execute_script("go({graph: 'joint', step: 1, tab: 'listing', node: 19990})")
    assert "n19990 = " in wait_for(
        browser, "document.querySelector('main .row.active')?.textContent"
    )


@pytest.mark.slow(quick="test_memory_and_times_on_the_page_equal_the_models")
@needs_browser
def test_overview_compares_a_graph_with_what_is_possible(page):
    graph = graph_of("forward", (None, chain(3)))
    predicted = Prediction(200.0, 50.0, 150.0, 100.0, 1 << 20, 2 << 20, 2, 0)
    browser = page(Inspection(dump_of(replace(graph, prediction=predicted))))
    rows = [
        each.text.split("\n") for each in all_of(browser, ".predicted-row") if each.is_displayed()
    ]
    assert rows == [
        ["achieved", "200 µs"],
        ["possible within 2 MiB", "150 µs"],
        ["bound", "100 µs"],
    ]
    widths = [
        each.size["width"] for each in all_of(browser, ".predicted-bar") if each.is_displayed()
    ]
    assert widths[1] == pytest.approx(0.75 * widths[0], abs=2)
    assert widths[2] == pytest.approx(0.5 * widths[0], abs=2)


@pytest.mark.slow(quick="test_the_page_counts_the_changes_between_dumps_as_the_command_does")
@needs_browser
def test_the_sign_of_changes_counts_a_node_once(page):
    nodes = {each.name: each for each in two_gathers(early=True).nodes}
    nodes["gather_v"] = replace(nodes["gather_v"], tag=Tag("gather", ("v", "u"), 32))
    states = (None, two_gathers()), ("overlap", snapshot(*nodes.values()))
    shown = page(Inspection(dump_of(graph_of("forward", *states))), "0/forward/1/diff/")
    assert one(shown, ".nav .count").text == "~1"


def luminance(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(color, ground, share):
    pairs = [(int(color[at : at + 2], 16), int(ground[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)


def test_exposed_times_are_readable_on_every_ground():
    style = (Path(report.__file__).parent / "style.css").read_text()
    found = dict(re.findall(r"--([a-z-]+): light-dark\((#\w{6}, #\w{6})\)", style))
    for theme in (0, 1):
        color = {name: pair.split(", ")[theme] for name, pair in found.items()}
        for ground in ("page", "panel", "raised"):
            assert contrast(color["exposed-text"], color[ground]) >= 4.5
            bar = mixed(color["exposed"], color[ground], 0.2)  # the bar behind the figure
            assert contrast(color["exposed-text"], bar) >= 4.5
        assert contrast(color["on-fill"], color["exposed"]) >= 4.5


CHANGES = ("inserted", "removed", "moved", "rewired", "retagged", "retyped")


def test_changes_are_readable_on_their_ground():
    style = (Path(report.__file__).parent / "style.css").read_text()
    found = dict(re.findall(r"--([a-z-]+): light-dark\((#\w{6}, #\w{6})\)", style))
    for theme in (0, 1):
        color = {name: pair.split(", ")[theme] for name, pair in found.items()}
        for change in CHANGES:
            for ground in ("page", "panel", "raised"):
                chip = mixed(color[change], color[ground], 0.14)
                assert contrast(color[change], chip) >= 4.5, (theme, change, ground)
            cell = mixed(color[change], color["panel"], 0.13)
            for text in ("text", "muted", "compute-text", "gather-text"):
                assert contrast(color[text], cell) >= 4.5, (theme, change, text)
        chosen = mixed(color["accent"], color["panel"], 0.16)
        for text in ("text", "muted", "compute-text", "gather-text"):
            assert contrast(color[text], chosen) >= 4.5, (theme, text)


@pytest.mark.slow(quick="test_every_view_of_a_real_dump_opens")
@needs_browser
def test_the_page_groups_the_digits_of_all_counts(page):
    graph = chain(1234)
    nodes = [*graph.nodes[:-1], node(5000, "extra"), graph.nodes[-1]]
    steps = graph_of("forward", (None, snapshot(graph.nodes[0])), ("p", snapshot(*nodes)))
    shown = page(Inspection(dump_of(steps)))
    for tab in ("overview", "diff", "memory", "listing", "compare"):
        shown.execute_script("go({graph: 'forward', step: 1, node: 1200, tab: arguments[0]})", tab)
        found = one(shown, "body").text
        assert re.findall(r"(?<![\w.,_])\d{4,}(?![\w.])", found) == [], tab
        assert "1,235 inserted" in found or tab not in ("diff", "compare")
