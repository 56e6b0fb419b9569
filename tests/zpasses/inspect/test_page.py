"""Tests of report.html in a headless browser: what each view shows, and that the address keeps it.

Most tests share pages: a page that is open already only gets a new address.
"""

import re

import pytest

from tests.zpasses.inspect.browsing import all_of, keys, needs_browser, one, texts, wait_for
from tests.zpasses.inspect.graphs import (
    MM,
    chain,
    dump_of,
    gather,
    graph_of,
    node,
    output,
    placeholder,
    replace,
    small_dump,
    snapshot,
    two_gathers,
    two_groups,
    wait,
)
from tests.zpasses.inspect.measured_runs import gloo_run
from tests.zpasses.inspect.real import real_dump
from tests.zpasses.inspect.traces import memory, write
from zpasses.dumps.format import Failure, Param, Prediction
from zpasses.dumps.nodes import Buffer, Ref, Source, Tag
from zpasses.inspect import Inspection
from zpasses.inspect import open as open_dump
from zpasses.inspect.modules import template

pytestmark = needs_browser

LAYERS = 24
TIMES = f"× {LAYERS}"  # noqa: RUF001
MODEL = "class Model:\n    def forward(self, x):\n        x = self.up(x)\n        return x\n"
SMALL = Inspection(small_dump(sources={"model.py": MODEL}))


def layered(*, odd=None, extra=None):
    """A model of equal layers, each of a gather of 10 us and a product of 4 us, with a parameter
    that stays.

    Args:
        odd: layer whose product takes 40 us.
        extra: layer with one more node.
    """
    nodes = [node(0, "x", "x", op="placeholder")]
    nodes += [node(1 + at, f"shard_{at}", f"shard_{at}", op="placeholder") for at in range(LAYERS)]
    last = 0
    for layer in range(LAYERS):
        at, param = 100 + 10 * layer, f"model.layers.{layer}.up_1.weight"
        source = Source("model.py", 7, "x = self.up(x)", f"model.layers.{layer}.up")
        cost_us = 40.0 if layer == odd else 4.0
        held = (Buffer(64, at + 2, 999, "parameter", (param,)),)
        about = {"cost_us": cost_us, "source": source, "buffers": held}
        nodes += [
            gather(at, f"gather_{layer}", 1 + layer, at + 1, param=param),
            wait(at + 1, f"full_{layer}", at, param=param),
            node(at + 2, f"mm_{layer}", MM, (Ref(last), Ref(at + 1)), **about),
        ]
        last = at + 2
        if layer == extra:
            nodes.append(node(at + 3, "relu", args=(Ref(last),), source=source))
            last = at + 3
    nodes.append(node(999, "output", "output", ((Ref(last),),), op="output"))
    return snapshot(*nodes)


def inspection(*states, **about):
    steps = [(f"p{at}" if at else None, state) for at, state in enumerate(states)]
    return Inspection(dump_of(graph_of("forward", *steps), **about))


PARAMS = {
    name: Param(name, (4, 4), "float32", 64, 32, 4)
    for name in (f"model.layers.{layer}.up_1.weight" for layer in range(LAYERS))
}
LAYERED = inspection(layered(odd=3), layered(odd=3, extra=5), parameters=PARAMS)


def rows(shown):
    return [each.text for each in all_of(shown, "main .rows .row") if each.is_displayed()]


def cells(shown, selector):
    return [
        [cell.text for cell in row.find_elements("css selector", "td, [role=gridcell]")]
        for row in all_of(shown, selector)
    ]


# --- content --------------------------------------------------------------------------------------
def test_every_view_of_a_real_dump_opens(page):
    shown = page(open_dump(real_dump()[0]))
    assert "zpasses report" in shown.title
    for tab in ("Diff", "Memory", "Timeline", "Collectives", "Graph", "Source", "Overview"):
        one(shown, ".tabs button", tab).click()
        assert one(shown, '.tabs [aria-selected="true"]').text == tab
        assert one(shown, "main").text.strip()
        bare = "main th[scope=col]:not([title]), main [role=columnheader]:not([title])"
        assert not all_of(shown, bare)  # every heading explains itself
    overview = one(shown, "main").text
    for word in ("Exposed communication", "Peak memory", "schedule{plan=one-ahead", "backward"):
        assert word in overview
    wide = "Array.from(document.querySelectorAll('main .scroll')).filter(each => each.scrollWidth > each.clientWidth).length"  # noqa: E501
    assert shown.execute_script(f"return {wide}") == 0  # at 1280 px nothing scrolls horizontally


def test_memory_and_times_on_the_page_equal_the_models(page):
    real = open_dump(real_dump()[0])
    shown = page(real)
    curves = "compiles[0].graphs.flatMap(g => g.steps.map((s, i) => Array.from(compiles[0].at(g, i).curves.live).slice(0, -1)))"  # noqa: E501
    graphs = real.dump.ranks[0].compiles[0].graphs.values()
    assert shown.execute_script(f"return {curves}") == [
        list(step.snapshot.live_bytes) for graph in graphs for step in graph.steps
    ]
    for kind in ("forward", "backward"):
        graph = f"compiles[0].at(compiles[0].graphData('{kind}'), 1)"
        plan = real.schedule_of(kind, 1)
        found = shown.execute_script(
            f"return {graph}.spans.map(s => [s.node.name, s.start, s.end])"
        )
        for each, span in zip(found, plan.compute, strict=True):
            times = pytest.approx(span.start_us, abs=0.01), pytest.approx(span.end_us, abs=0.01)
            assert each == [span.node.name, *times]
        exposed = f"return {graph}.collectives.reduce((sum, each) => sum + each.exposed, 0)"
        assert shown.execute_script(exposed) == pytest.approx(plan.exposed_us, abs=0.01)


def test_diff_is_side_by_side_and_folds_unchanged_nodes(page):
    shown = page(SMALL, "0/forward/2/diff/")
    assert "peak 256 B → 320 B +25.0 %" in one(shown, ".runline").text
    moved = [re.sub(r"\s+", " ", text).partition(" =")[0] for text in texts(shown, ".cell.moved")]
    assert moved == ["6 ↕ gather_v", "7 ↕ gather_v"]
    assert "changed nothing" in one(page(SMALL, "0/forward/1/diff/"), "main").text
    old = chain(60)
    new = {at: {"id": 900 + at, "name": f"new{at}"} for at in (20, 21, 50)}
    nodes = [replace(each, **new.get(each.id, {})) for each in old.nodes]
    nodes[31] = replace(nodes[31], tag=Tag("full", ("w",)))
    shown = page(inspection(old, snapshot(*nodes)), "0/forward/1/diff/")
    gaps = len([text for text in rows(shown) if "unchanged" in text])
    assert gaps > 1
    one(shown, ".row.gap").click()
    wait_for(shown, f"document.querySelectorAll('main .gap').length < {gaps}")
    places = []
    for _ in range(4):
        one(shown, "button", "↓ change").click()
        places.append(one(shown, ".row.active").text)
    assert "new20" in places[0]
    assert "new50" in places[2]
    assert places[3] == places[2]  # there is no fourth block
    one(shown, "label", "show the whole graph").click()
    assert not all_of(shown, ".gap")
    assert "whole=1" in shown.execute_script("return location.hash")


def test_listing_filters_and_selects_a_node(page):
    shown = page(SMALL, "0/forward/2/listing/")
    assert len(rows(shown)) == 10
    one(shown, ".filter").send_keys("is:collective v")
    wait_for(shown, "document.querySelectorAll('main .row').length === 1")
    assert "1 of 10 nodes" in one(shown, ".bar").text
    one(shown, "main .row").click()
    detail = one(shown, ".detail").text
    for word in ("gather_v", "all_gather_into_tensor", "input", "exposed", "2 µs", "users (1)"):
        assert word in detail
    one(shown, ".detail .links button", "v_shard").click()
    assert one(shown, ".detail h2").text == "v_shard"
    shown.back()
    wait_for(shown, "document.querySelector('.detail h2').textContent === 'gather_v'")
    one(shown, ".detail dd button.link", "mm_1").click()  # needed until
    assert one(shown, ".detail h2").text == "mm_1"
    shown = page(SMALL, "0/forward/2/listing//filter=nothing")
    assert 'No node matches all words of the filter "nothing"' in one(shown, "main").text
    shown = page(SMALL, "0/forward/2/source/5")
    assert "x = self.up(x)" in one(shown, ".row.chosen").text
    assert "mm = mm(x, w)" in one(shown, ".nodes-of .row").text
    assert "model.py:3 · layers.0.up" in one(shown, ".detail figcaption").text


def test_collectives_sort_filter_and_jump(page):
    shown = page(SMALL, "0/forward/2/collectives/")
    names = lambda: texts(shown, "main .row .col-node")  # noqa: E731
    assert names() == ["gather_w", "gather_v"]
    one(shown, ".grid-head button", "exposed").click()
    assert names() == ["gather_w", "gather_v"]
    assert one(shown, ".col-exposed[role=columnheader]").get_attribute("aria-sort") == "descending"
    one(shown, ".grid-head button", "exposed").click()
    assert names() == ["gather_v", "gather_w"]
    assert "sort=exposed" in shown.execute_script("return location.hash")
    one(shown, ".filter").send_keys("gather_v")
    wait_for(shown, "document.querySelectorAll('main .row').length === 1")
    assert "1 of 2 collectives" in one(shown, ".bar").text
    one(shown, "main .row").click()
    one(shown, ".detail .actions button", "Show in listing").click()
    active = wait_for(shown, "document.querySelector('main .row.active')?.textContent")
    assert "gather_v = all_gather_into_tensor" in active
    shown = page(SMALL, "0/forward/2/collectives//kind=all_gather&exposed=1")
    said = 'This graph has no collective of the kind "all_gather". Its kinds are '
    assert one(shown, "main p.pad").text == f"{said}all_gather_into_tensor."


def queueing():
    """Two gathers that start at once, of which the first is needed last."""
    first = gather(1, "gather_w", 0, 3, cost_us=10.0)
    second = gather(2, "gather_v", 0, 4, cost_us=5.0, param="v")
    waits = wait(4, "v", 2, param="v"), wait(3, "w", 1)
    return snapshot(placeholder(0, "a"), first, second, *waits, output(5, 3, 4))


def test_exposed_time_beyond_the_transfer_is_queueing(page):
    queued = inspection(queueing())
    first, second = queued.collectives_of("forward").rows
    assert (first.exposed_us, first.queued_us) == (0.0, 0.0)
    assert (second.time_us, second.exposed_us, second.queued_us) == (5.0, 15.0, 10.0)
    text = str(queued.collectives())
    assert "exposed 15 us (10 us of it queueing behind earlier collectives)" in text
    assert "queueing" not in str(inspection(two_gathers()).collectives())
    shown = page(queued, "0/forward/0/collectives/2")
    assert "15 µs, of which 10 µs is queueing behind earlier" in one(shown, ".detail").text


def test_timeline_and_memory_react_to_pointer_and_keys(page):
    from selenium.webdriver import ActionChains

    def point(shown, time, total, down):
        chart = one(shown, "canvas")
        wait_for(shown, "document.querySelector('canvas').width > 300")
        at = "return TRACK.left + (arguments[0].clientWidth - TRACK.left - 8) * arguments[1]"
        across = shown.execute_script(at, chart, time / total)
        offset = int(across - chart.size["width"] / 2), int(down - chart.size["height"] / 2)
        ActionChains(shown).move_to_element_with_offset(chart, *offset).perform()
        return one(shown, ".tooltip").text

    shown = page(SMALL, "0/forward/2/timeline/")
    # Of 28 us, the second gather takes 10 to 20 in the lower track.
    assert "gather_v" in point(shown, 15, 28, 110)
    ActionChains(shown).click().perform()
    assert one(shown, ".detail h2").text == "gather_v"
    assert "2 µs" in one(shown, "main table").text
    shown.execute_script("document.querySelector('canvas').focus()")
    keys(shown, "ARROW_UP")
    assert one(shown, ".detail h2").text == "gather_w"
    keys(shown, "ARROW_DOWN")  # the new canvas has the focus
    assert one(shown, ".detail h2").text == "gather_v"

    shown = page(two_groups(), "0/forward/0/timeline/")
    # Of 26 us, both gathers take the first 10, each in its group's track.
    for track, name in enumerate(("gather_w", "gather_v")):
        down = shown.execute_script("return laneTop(arguments[0]) + 9", track)
        assert name in point(shown, 5, 26, down)
    # Lanes are named after mesh dimensions, or after groups if they have none.
    groups = {"dp": 64, "tp": 8, "0": 2}
    collectives = [
        {"node": {"collective": {"group": name, "ranks": ranks}}} for name, ranks in groups.items()
    ]
    lanes = "return [arguments[0], ['dp'], ['0']].map((each) => laneNames(each, arguments[1]))"
    names = shown.execute_script(lanes, list(groups), collectives)
    assert names == [["dp (64)", "tp (8)", "group 0 (2)"], ["dp (64)"], ["communication"]]

    shown = page(SMALL, "0/forward/2/memory/")
    assert one(shown, ".alive h2").text.startswith("320 B")
    shown.execute_script("document.querySelector('canvas').focus()")
    keys(shown, "HOME")
    assert one(shown, "canvas").get_attribute("aria-valuetext") == "0 B while x runs"
    keys(shown, "END", "ARROW_LEFT", "ENTER")
    assert one(shown, ".detail h2").text == "mm_1"
    one(shown, ".runline button", "Why?").click()
    first, second = texts(shown, ".compared thead th.right")[:2]
    assert "bucket" in first
    assert "overlap" in second  # what the pass added is new
    assert "v" in one(shown, ".peak-delta", "new at the peak").text


@pytest.mark.slow(quick="test_timeline_and_memory_react_to_pointer_and_keys")
def test_the_earlier_curve_keeps_its_order_and_its_peak(page):
    def state(order):
        nodes = {at: node(at, f"n{at}", "aten.relu.default", (Ref(0),)) for at in range(1, 7)}
        nodes[0] = node(0, "x", "x", op="placeholder")
        nodes[7] = node(7, "end", "output", (), op="output")
        nodes[3] = node(3, "n3", buffers=(Buffer(1000, 3, 3, "activation"),))
        nodes[5] = node(5, "n5", buffers=(Buffer(400, 5, 5, "activation"),))
        return snapshot(*(nodes[key] for key in order))

    # n5 moves to the start, and n3 is gone.
    shown = page(inspection(state((0, 1, 2, 3, 4, 5, 6, 7)), state((0, 5, 1, 2, 4, 6, 7))))
    curve = shown.execute_script(
        "const data = compiles[0].graphs[0];"
        "return [...curveOfStepBefore(compiles[0].at(data, 0), compiles[0].at(data, 1))];"
    )
    assert curve == [0, 0, 0, 0, 1000, 400, 0]


def test_the_overview_shows_what_runs_first_and_how_far_it_is_from_its_bound(page):
    prediction = Prediction(200.0, 50.0, 150.0, 100.0, 1 << 20, 2 << 20, 2, 0)
    forward, backward = (
        replace(graph_of(name, (None, two_gathers())), prediction=prediction)
        for name in ("forward", "backward")
    )
    captured = graph_of("captured", (None, chain(5)))
    joint = graph_of("joint", (None, two_gathers()), ("overlap", two_gathers(early=True)))
    shown = page(Inspection(dump_of(captured, joint, forward, backward)))
    assert texts(shown, ".nav h2") == ["forward", "backward", "joint", "captured"]
    step, first, _, third, last, _ = all_of(shown, ".card")
    assert "50.0 % can be saved" in step.text
    assert "400 µs" in step.text
    bars = step.find_elements("css selector", ".predicted-bar")
    assert [each.get_attribute("style") for each in bars] == [
        f"width: {share}%;" for share in (100, 75, 50)
    ]
    assert "possible within 2 MiB" in first.text
    assert "split into forward and backward before it runs" in third.text
    assert not third.find_elements("css selector", ".delta")
    assert "6 nodes · 0 collectives · as Dynamo captured it, no estimates" in last.text
    for tab in ("memory", "timeline", "collectives"):
        shown.execute_script(f"go({{graph: 'captured', step: 0, tab: '{tab}'}})")
        assert "is the graph that Dynamo captured" in one(shown, "main").text


def test_a_failed_pass_is_no_success_on_any_view(page):
    failure = Failure("KeyError", "'w'", "overlap", raised="train.py:7 in rewrite: names['w']")
    for left in (two_gathers(early=True), None):
        states = ("bucket{cap_mb=0}", two_gathers()), ("overlap", left)
        graph = graph_of("forward", (None, two_gathers()), *states, error=failure)
        shown = page(Inspection(dump_of(graph, error=failure)), "0/forward/2/diff/")
        assert one(shown, ".nav .failed").text == "failed"
        for tab in ("diff", "memory", "listing", "timeline", "collectives"):
            one(shown, f"#tab-{tab}").click()
            text = one(shown, "main").text
            assert "raised at train.py:7" in text
            assert "changed nothing" not in text
            assert ("may be wrong" in text) == (left is not None)
    error = Failure("OptionError", "no pass is called 'x'", "options")
    assert "no pass is called 'x'" in one(page(Inspection(dump_of(error=error))), "main").text


def test_measured_times_stand_beside_the_predicted_ones(page, tmp_path):
    trace = write(tmp_path / "trace.json", [*gloo_run(), memory(500, 1 << 20)])
    measured = Inspection(small_dump()).html(trace=trace)
    shown = page(measured, "0/forward/2/collectives/")
    assert texts(shown, ".grid-head [role=columnheader]")[-2:] == ["measured", "its exposed"]
    assert texts(shown, ".grid-row .col-measured") == ["140 µs", "230 µs"]
    one(shown, ".grid-row").click()
    assert "140 µs, 130 µs exposed" in one(shown, "dl.boxed").text
    shown = page(measured, "0/forward/2/overview/")
    assert "Measured in 1 run: 1 ms" in one(shown, ".measured").text
    assert "Memory rises by 1 MiB" in one(shown, ".measured").text
    joined = one(shown, ".joined").text
    assert "100.0% of the measured time of collectives is that of nodes" in joined
    shown = page(measured, "0/forward/2/timeline/")
    assert "1 ms measured in 1 run" in one(shown, ".measured-split").text
    assert "140 µs" in one(shown, ".measured-modules").text
    assert not all_of(page(measured, "0/forward/0/collectives/"), ".grid-row .col-measured")


# --- equal layers ---------------------------------------------------------------------------------
def test_the_timeline_and_memory_show_equal_layers_once(page):
    shown = page(LAYERED, "0/forward/0/timeline/")
    (row,) = cells(shown, ".by-module tbody tr")
    compute = f"{4 * (LAYERS - 1) + 40} µs"
    assert row[:4] == ["model.layers.*", str(LAYERS), compute, "4 µs to 40 µs"]
    assert row[4:] == [f"{10 * LAYERS} µs", "10 µs", "model.layers.3"]
    point = (
        "arguments[0].dispatchEvent(new PointerEvent('pointermove', {clientX: TRACK.left + "
        "arguments[0].getBoundingClientRect().left + 28, clientY: TRACK.top - 8 + "
        "arguments[0].getBoundingClientRect().top}))"
    )
    shown.execute_script(point, one(shown, "canvas"))
    assert "4 µs of compute, 10 µs exposed" in one(shown, ".tooltip").text
    shown = page(LAYERED, "0/forward/0/memory/")
    band = one(shown, ".lifetime")
    assert "alive from mm_0 to output" in band.get_attribute("title")
    band.click()
    assert one(shown, ".detail h2").text == "mm_0"
    shown.execute_script("go({node: 999})")
    one(shown, '[aria-label="Sums by module"]').click()
    sums = f"model.layers.*.up_1 {LAYERS} {64 * LAYERS / 1024} KiB 100.0 % 64 B"
    assert texts(shown, ".alive tbody tr") == [sums]


def test_a_fold_of_collectives_keeps_selection_order_and_heading(page):
    shown = page(LAYERED, "0/forward/0/collectives//sort=params&down=1")
    shown.execute_script(
        "window.heading = document.querySelector('.grid-head button'); window.sortCalls = 0;"
        "const old = String.prototype.localeCompare;"
        "String.prototype.localeCompare = function (...given) {"
        "window.sortCalls += 1; return old.apply(this, given); };"
    )
    one(shown, '[aria-label="Fold by module"]').click()
    wait_for(shown, "document.querySelectorAll('.grid-row').length === 1")
    (row,) = cells(shown, ".grid-row")
    assert {"model.layers.*.up_1", TIMES, f"{32 * LAYERS} B"} < set(row)
    assert row.count(f"{10 * LAYERS} µs") == 2  # the transfers, and their exposed time
    assert "bytes: 32 B each" in one(shown, ".grid-row").get_attribute("title")
    one(shown, ".grid-row").click()
    wait_for(shown, f"document.querySelectorAll('.grid-row').length > {LAYERS // 2}")
    assert shown.execute_script("return window.heading.isConnected")
    assert shown.execute_script("return window.sortCalls") == 0
    all_of(shown, ".grid-row")[2].click()
    assert one(shown, ".detail h2").text == f"gather_{LAYERS - 2}"
    one(shown, ".grid-head button", "parameters").click()
    assert not shown.execute_script("return window.heading.isConnected")
    assert shown.execute_script("return window.sortCalls") > 0


def test_equal_layers_are_one_row_and_the_odd_one_is_named(page):
    shown = page(LAYERED, "0/forward/0/listing/")
    assert not all_of(shown, ".fold")  # small graphs are not folded unless asked
    one(shown, '[aria-label="Fold by module"]').click()
    assert "fold=yes" in shown.execute_script("return location.hash")
    inputs, _, layers, output = texts(shown, ".fold")
    assert "(inputs)" in inputs
    assert "(output)" in output
    for part in ("model.layers.*", TIMES, "4 µs to 40 µs of compute each"):
        assert part in layers
    assert "not as the others: model.layers.3" in layers
    all_of(shown, ".fold")[2].click()
    wait_for(shown, f"document.querySelectorAll('.fold.deep').length > {LAYERS // 2}")
    all_of(shown, ".fold.deep")[4].click()
    assert one(shown, ".line", "mm_4 = mm(mm_3, full_4)")
    assert TIMES in one(page(LAYERED, "0/forward/0/source//fold=yes"), ".fold.row").text
    assert "mm_7" in one(page(LAYERED, "0/forward/0/listing/172/fold=yes"), ".row.active").text
    for view in ("diff//fold=yes", "compare//fold=yes&with=0%2Fforward%2F0"):
        shown = page(LAYERED, f"0/forward/1/{view}")
        assert "+ 0 to 1" in one(shown, ".fold", "model.layers.*").text
        one(shown, ".fold", "model.layers.*").click()
        one(shown, ".fold.deep", "model.layers.5").click()
        assert one(shown, ".cell.after.inserted", "relu")


def test_names_are_shortened_to_what_tells_them_apart(page):
    shown = page(LAYERED, "0/forward/0/collectives/")
    modules = ("layers.3.mlp.up", "layers.3", "3", "blocks.3.mlp.0", "a.3.experts.12.up", "n2", "")
    templates = shown.execute_script("return arguments[0].map(template)", modules)
    assert templates == [template(each) for each in modules]
    names = "model.layers.33.mlp.up_proj.weight", "lm_head.weight", "3"
    widest, headless, bare = shown.execute_script("return arguments[0].map(shortNames)", names)
    longest = [names[0], "layers.33.mlp.up_proj.weight", "33.mlp.up_proj.weight"]
    assert widest == [*longest, "33…up_proj.weight", "33"]
    assert (headless, bare) == (["lm_head.weight", "weight"], ["3"])
    measured = "{measureText: (text) => ({width: text.length})}"
    fitting = f"return fittingText({measured}, arguments[0], arguments[1])"
    for room, expected in ((28, widest[1]), (20, widest[3]), (5, "33"), (1, "")):
        assert shown.execute_script(fitting, widest, room) == expected
    assert shown.execute_script(fitting, ["scaled_dot_product_12"], 8) == "…duct_12"
    cut = (
        "const cell = document.querySelector('.grid-row .col-params');"
        "cell.replaceChildren(paramCut(arguments[0]));"
        "return cell.innerText.replaceAll('\\n', '');"
    )
    short = {"model.layers.34.mlp.up.weight": "…34.mlp.up", "lm_head.weight": "lm_head.weight"}
    for name, expected in {**short, "blocks.1.mlp.0.weight": "…1.mlp.0"}.items():
        assert shown.execute_script(cut, name) == expected
    name = "all_gather_into_tensor_coalesced_default_8"
    parts = shown.execute_script(
        "return wrapping(arguments[0]).map((each) => each.textContent ?? each)", name
    )
    assert "".join(parts) == name
    assert all(each[-1] in "._" for each in parts[:-1] if each)


# --- addresses, keys and widths -------------------------------------------------------------------
ADDRESSES = {
    "0/backwards/1/diff/": 'has no graph "backwards"; this is forward',
    "0/forward/9/diff/": "has no step 9; it has 0 to 2",
    "0/forward/1/pictures/": 'no view "pictures"',
    "7/forward/1/diff/": "no compile 7",
    "0/forward/2/listing/99": "no node with the id 99",
    "zzz": '"#zzz" names nothing that this page shows: "zzz" is no number',
    "0/forward/2/listing/gather_v": '"gather_v" is no number',
    "0/forward/2/compare//with=7%2Fforward%2F1": 'no graph "7/forward/1" to compare with',
}


def test_an_address_that_names_something_else_says_so(page):
    for address, said in ADDRESSES.items():
        assert said in one(page(SMALL, address), ".notice").text
    shown = page(SMALL, "0/forward/2/diff/")
    for title in texts(shown, '[role="tab"]'):
        shown.execute_script("location.hash = arguments[0]", f"0/forward/2/{title.lower()}/")
        assert one(shown, '[aria-selected="true"]', title).text == title
        assert not all_of(shown, ".notice")
    shown.back()  # leads away from an address that the page rewrites
    wait_for(shown, "state.tab !== 'compare'")


def test_zoom_whole_graph_line_and_theme_survive_a_reload(page):
    nodes = [
        replace(each, source=Source("model.py", 3 + each.id % 2, "code", "up"))
        if each.op == "call_function"
        else each
        for each in chain(60).nodes
    ]
    after = [replace(each, id=900) if each.id == 40 else each for each in nodes]
    shown = page(inspection(snapshot(*nodes), snapshot(*after)))
    for tab, key in (("memory", "nodes"), ("timeline", "time")):
        shown.execute_script(f"go({{graph: 'forward', step: 1, tab: '{tab}', node: null}})")
        one(shown, "[aria-label='Zoom in']").click()
        wait_for(shown, f"location.hash.includes('{key}=')")
        kept = shown.execute_script("return location.hash")
        shown.refresh()
        one(shown, "[aria-label='Zoom in']").click()
        wait_for(shown, "location.hash !== arguments[0]", kept)
        first, last = shown.execute_script(f"return state.view.{key}").split("-")
        assert 0 < float(last) - float(first) <= 0.7 * 0.7 * 60 + 1  # twice zoomed in, not once
    one(shown, "#theme").click()
    shown.execute_script("go({tab: 'source'})")
    one(shown, ".line.source", "code").click()
    assert shown.execute_script("return state.view.line") == "model.py:3"
    shown.execute_script("keep({line: 'model.py:4'}); redraw()")
    shown.refresh()
    assert shown.execute_script("return document.documentElement.dataset.theme") == "dark"
    shown.execute_script("localStorage.clear()")
    assert "line 4: " in one(shown, ".nodes-of h3").text
    shown.execute_script("go({node: 2})")  # a node of line 3
    assert "line 3: " in one(shown, ".nodes-of h3").text


def test_everything_is_reachable_by_keyboard(page):
    shown = page(SMALL)
    keys(shown, "TAB")
    assert shown.switch_to.active_element.text == "Skip to content"
    reached = []
    for _ in range(12):
        keys(shown, "TAB")
        focused = shown.switch_to.active_element
        reached.append(focused.get_attribute("role") or focused.tag_name)
    assert {"button", "tab"} <= set(reached)
    shown.execute_script("document.getElementById('tab-overview').focus()")
    keys(shown, "ARROW_RIGHT")
    assert shown.switch_to.active_element.text == "Diff"
    outline = shown.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    shown.execute_script(
        "go({tab: 'listing', node: null}); document.querySelector('.rows').focus()"
    )
    keys(shown, "ARROW_DOWN", "ARROW_DOWN", "ENTER")
    assert one(shown, ".detail h2").text == "w_shard"
    keys(shown, "ESCAPE")
    assert not one(shown, "body").find_element("css selector", ".detail").is_displayed()
    keys(shown, "[")
    assert "bucket{cap_mb=0}" in one(shown, ".nav [aria-current]").text


def test_every_view_fits_the_width(page):
    for width in (390, 1280):
        check_that_every_view_fits(page, width)


def check_that_every_view_fits(page, width):
    shown = page(SMALL, width=width)
    for tab in ("overview", "diff", "memory", "timeline", "collectives", "listing", "source"):
        shown.execute_script(f"go({{tab: '{tab}', node: 6, step: 2}})")
        assert shown.execute_script("return document.documentElement.scrollWidth") == width
        last = "return document.getElementById('tab-compare').getBoundingClientRect().right"
        assert shown.execute_script(last) <= width  # all tabs are visible without scrolling
    one(shown, ".detail button").click()
    button = one(shown, "#theme")
    assert button.location["x"] + button.size["width"] <= width
    if width < 700:
        assert not shown.execute_script("return document.querySelector('.nav').offsetHeight")
        one(shown, "#menu").click()
    assert shown.execute_script("return document.querySelector('.nav').offsetHeight")


@pytest.mark.parametrize("view", ["diff", "compare"])
@pytest.mark.slow(quick="test_every_view_fits_the_width")
def test_a_narrow_page_has_both_sides_in_one_list(page, view):
    nodes = list(two_gathers().nodes)
    nodes[5] = replace(nodes[5], args=(Ref(4), Ref(4)))
    after = snapshot(*nodes[:-1], node(20, "extra"), nodes[-1])
    shown = page(inspection(two_gathers(), after), f"0/forward/1/{view}/", width=390)
    first, second = ("before", "after") if view == "diff" else ("first", "second")
    pairs = [text.split("\n") for text in texts(shown, ".pair")]
    assert [(row[0], row[-1].split("  #")[0]) for row in pairs if not row[0].isdigit()] == [
        (first, "mm = mm(x, w)"),
        (second, "mm = mm(w, w)"),
        (second, "extra = relu()"),
    ]
    assert len(pairs) == 12  # 9 equal nodes
    assert not all_of(shown, ".cell.none")
    page(inspection(two_gathers(), after), f"0/forward/1/{view}/", width=1280)
    wait_for(shown, "document.querySelectorAll('.cell.none').length > 0")
