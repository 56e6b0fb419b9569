"""Tests of the page: Timeline, Compare and Collectives show equal layers once, and every heading of
a table explains itself.
"""

import pytest

from tests.zpasses.inspect.browsing import (
    all_of,
    needs_browser,
    one,
    wait_for,
)
from tests.zpasses.inspect.graphs import (
    MM,
    dump_of,
    gather,
    graph_of,
    node,
    replace,
    small_dump,
    snapshot,
    wait,
)
from zpasses.dumps.format import Ref, Source
from zpasses.inspect import Inspection

LAYERS = 24
TIMES = f"× {LAYERS}"  # noqa: RUF001


def gathered_layers(*, odd=None, extra=None):
    """A model of equal layers, each of a gather of 10 us and a product of 4 us.

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
        nodes += [
            gather(at, f"gather_{layer}", 1 + layer, at + 1, param=param),
            wait(at + 1, f"full_{layer}", at, param=param),
            node(
                at + 2, f"mm_{layer}", MM, (Ref(last), Ref(at + 1)), cost_us=cost_us, source=source
            ),
        ]
        last = at + 2
        if layer == extra:
            nodes.append(node(at + 3, "relu", args=(Ref(last),), source=source))
            last = at + 3
    nodes.append(node(999, "output", "output", ((Ref(last),),), op="output"))
    return snapshot(*nodes)


def inspection(*graphs):
    states = [(f"p{at}" if at else None, graph) for at, graph in enumerate(graphs)]
    return Inspection(dump_of(graph_of("forward", *states)))


def cells(shown, selector):
    return [
        [cell.text for cell in row.find_elements("css selector", "td, [role=gridcell]")]
        for row in all_of(shown, selector)
    ]


@needs_browser
def test_the_timeline_shows_equal_layers_once(page):
    shown = page(inspection(gathered_layers(odd=3)), "0/forward/0/timeline/")
    (row,) = cells(shown, ".by-module tbody tr")
    compute = f"{4 * (LAYERS - 1) + 40} µs"
    assert row[:4] == ["model.layers.*", str(LAYERS), compute, "4 µs to 40 µs"]
    assert row[4:] == [f"{10 * LAYERS} µs", "10 µs", "model.layers.3"]


@pytest.mark.slow(quick="test_the_timeline_shows_equal_layers_once")
@needs_browser
def test_layers_that_are_too_narrow_for_names_share_one(page):
    shown = page(inspection(gathered_layers()), "0/forward/0/timeline/")
    shown.execute_script("document.querySelector('main').style.maxWidth = '300px'")
    shown.execute_script(
        "window.texts = []; const old = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {"
        "window.texts.push(text); return old.call(this, text, ...rest); };"
    )
    one(shown, ".view-timeline button", "All").click()
    wait_for(shown, "window.texts.some((text) => text.endsWith(arguments[0]))", f"* {TIMES}")
    for _ in range(6):
        one(shown, '[aria-label="Zoom in"]').click()
    shown.execute_script("window.texts = []")
    one(shown, '[aria-label="Zoom in"]').click()
    wait_for(shown, "window.texts.some((text) => /^(model[.]layers[.])?[0-9]+$/.test(text))")
    assert not any(TIMES in text for text in shown.execute_script("return window.texts"))


@pytest.mark.slow(quick="test_a_fold_of_collectives_keeps_selection_order_and_heading")
@needs_browser
def test_collectives_of_equal_layers_are_one_row(page):
    shown = page(inspection(gathered_layers()), "0/forward/0/collectives/")
    assert len(cells(shown, ".grid-row")) > 1
    one(shown, '[aria-label="Fold by module"]').click()
    wait_for(shown, "document.querySelectorAll('.grid-row').length === 1")
    (row,) = cells(shown, ".grid-row")
    assert {"model.layers.*.up_1", TIMES} < set(row)
    assert f"{32 * LAYERS} B" in row
    assert row.count(f"{10 * LAYERS} µs") == 2  # the transfers, and their exposed time
    fold = one(shown, ".grid-row")
    assert "bytes: 32 B each" in fold.get_attribute("title")
    fold.click()
    wait_for(shown, f"document.querySelectorAll('.grid-row').length > {LAYERS // 2}")
    all_of(shown, ".grid-row")[2].click()
    assert one(shown, ".detail h2").text == "gather_1"


@needs_browser
def test_a_fold_of_collectives_keeps_selection_order_and_heading(page):
    shown = page(inspection(gathered_layers()), "0/forward/0/collectives//sort=params&down=1")
    shown.execute_script(
        "window.heading = document.querySelector('.grid-head button'); window.compared = 0;"
        "const old = String.prototype.localeCompare;"
        "String.prototype.localeCompare = function (...given) {"
        "window.compared += 1; return old.apply(this, given); };"
    )
    one(shown, '[aria-label="Fold by module"]').click()
    wait_for(shown, "document.querySelectorAll('.grid-row').length === 1")
    one(shown, ".grid-row").click()
    wait_for(shown, f"document.querySelectorAll('.grid-row').length > {LAYERS // 2}")
    assert shown.execute_script("return [window.heading.isConnected, window.compared]") == [True, 0]
    one(shown, ".grid-head button", "parameters").click()
    assert not shown.execute_script("return window.heading.isConnected")
    assert shown.execute_script("return window.compared") > 0


@pytest.mark.slow(quick="test_a_fold_of_collectives_keeps_selection_order_and_heading")
@needs_browser
def test_collectives_without_parameters_say_their_module(page):
    source = Source("model.py", 7, "x = self.up(x)", "model.layers.3.mlp.up_proj")
    nodes = [
        replace(each, params=(), source=source) if each.collective else each
        for each in gathered_layers().nodes
    ]
    shown = page(inspection(snapshot(*nodes)), "0/forward/0/collectives/")
    cell = one(shown, ".grid-row .col-params")
    assert cell.text.replace("\n", "") == "…3.mlp.up_proj"
    assert "model.layers.3.mlp.up_proj" in one(shown, ".grid-row").get_attribute("title")


@pytest.mark.slow(quick="test_equal_layers_are_one_row_and_the_odd_one_is_named")
@needs_browser
def test_layers_are_found_once_per_module(page):
    shown = page(inspection(gathered_layers()), "0/forward/0/overview/")
    splits = (
        "const graph = compiles[0].at(compiles[0].graphs[0], 0); delete graph.memo.layers;"
        "let splits = 0; const old = String.prototype.split;"
        "String.prototype.split = function (...given) { splits++; return old.apply(this, given); };"
        "layersOf(graph); String.prototype.split = old;"
        "return [splits, graph.memo.layers.size];"
    )
    shown.execute_script(splits)
    count, nodes = shown.execute_script(splits)
    assert count == 0
    assert nodes > LAYERS


@pytest.mark.slow(quick="test_every_view_of_a_real_dump_opens")
@needs_browser
def test_likely_views_are_prepared_when_idle(page):
    joint = graph_of(
        "joint", *[(f"p{at}" if at else None, gathered_layers(odd=at)) for at in (0, 1)]
    )
    forward = graph_of(
        "forward", *[(f"p{at}" if at else None, gathered_layers(odd=at)) for at in range(4)]
    )
    shown = page(Inspection(dump_of(joint, forward)), "0/forward/2/listing/")
    ready = (
        "[[1, 1], [1, 3], [0, 1]].every(([graph, step]) => {"
        "const found = compiles[0].builtGraphs.get("
        "`${compiles[0].graphs[graph].name}\\n${step}`);"
        "return found && ['layers', 'curves', 'changes', 'collectives'].every("
        "(key) => key in found.memo); })"
    )
    assert wait_for(shown, ready)


@pytest.mark.slow(quick="test_equal_layers_are_one_row_and_the_odd_one_is_named")
@needs_browser
def test_compared_graphs_are_folded_by_layer(page):
    graphs = gathered_layers(), gathered_layers(extra=5)
    shown = page(inspection(*graphs), "0/forward/0/compare//fold=yes&with=0/forward/1")
    texts = wait_for(shown, "[...document.querySelectorAll('.fold')].map((each) => each.innerText)")
    (layers,) = [text for text in texts if "model.layers.*" in text]
    assert TIMES in layers
    assert "+ 0 to 1" in layers
    one(shown, ".fold", "model.layers.*").click()
    one(shown, ".fold.deep", "model.layers.5").click()
    assert one(shown, ".cell.after.inserted", "relu")


@pytest.mark.slow(quick="test_a_fold_of_collectives_keeps_selection_order_and_heading")
@needs_browser
@pytest.mark.parametrize("fold", ["", "/fold=yes&by=module"])
def test_headings_of_tables_explain_themselves(page, fold):
    shown = page(Inspection(small_dump()))
    for tab in ("overview", "diff", "memory", "timeline", "collectives", "compare"):
        shown.execute_script("location.hash = arguments[0]", f"0/forward/2/{tab}/6{fold}")
        shown.execute_script("fromAddress()")
        heads = all_of(shown, "main th[scope=col], main [role=columnheader]")
        assert heads or tab == "diff"
        bare = [each.text for each in heads if not each.get_attribute("title")]
        assert not bare, tab


@pytest.mark.slow(quick="test_timeline_and_memory_react_to_pointer_and_keys")
@needs_browser
def test_needed_until_is_a_link_to_the_last_reader(page):
    shown = page(Inspection(small_dump()), "0/forward/2/memory/6")
    row = one(shown, ".alive tbody tr", "gather_v")
    *_, until = row.find_elements("css selector", "td")
    assert until.text == "mm_1"
    until.find_element("css selector", "button.link").click()
    assert one(shown, ".detail h2").text == "mm_1"
    shown.execute_script("go({tab: 'listing', node: 6})")
    one(shown, ".detail dd button.link", "mm_1").click()
    assert one(shown, ".detail h2").text == "mm_1"


@pytest.mark.slow(quick="test_every_view_fits_the_width")
@needs_browser
def test_names_keep_the_number_of_their_layer_where_there_is_little_room(page):
    shown = page(inspection(gathered_layers()), "0/forward/0/collectives/")
    shown.execute_script(
        "document.querySelectorAll('.col-params').forEach((each) => (each.style.width = '70px'))"
    )
    numbers = [each.text for each in all_of(shown, ".grid-row .col-params .layer")]
    assert {"…0.", "…1."} < set(numbers)
    cut = (
        "return [...document.querySelectorAll('.col-params .layer')].filter((each) =>"
        " each.scrollWidth > each.clientWidth + 1 || each.getBoundingClientRect().right >"
        " each.closest('.col-params').getBoundingClientRect().right).length"
    )
    assert shown.execute_script(cut) == 0
    beside = (
        "return document.querySelector('.grid').scrollWidth"
        " <= document.querySelector('.grid').clientWidth"
    )
    assert shown.execute_script(beside)  # at 1,280 px, the table does not scroll sideways


@pytest.mark.slow(quick="test_every_view_fits_the_width")
@needs_browser
@pytest.mark.parametrize(
    ("name", "shown_as"),
    [
        ("model.layers.34.mlp.up.weight", "…34.mlp.up"),
        ("model.decoder.layers.3.w", "…3.w"),
        ("blocks.1.mlp.0.weight", "…1.mlp.0"),
        ("0.weight", "0.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_parameters_of_collectives_begin_at_their_layer_if_the_page_is_narrow(page, name, shown_as):
    shown = page(inspection(gathered_layers()), "0/forward/0/collectives/")
    text = (
        "const cell = document.querySelector('.grid-row .col-params');"
        "cell.replaceChildren(paramCut(arguments[0]));"
        "return cell.innerText.replaceAll('\\n', '');"
    )
    assert shown.execute_script(text, name) == shown_as
    size = {"width": 1920, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    shown.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert shown.execute_script(text, name) == name
    finally:
        shown.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow(quick="test_every_view_fits_the_width")
@needs_browser
def test_long_names_break_between_their_parts(page):
    shown = page(inspection(gathered_layers()))
    parts = "return wrapping(arguments[0]).map((each) => each.textContent ?? each)"
    for name in (
        "model.layers.66.mlp.down_proj.weight",
        "all_gather_into_tensor_coalesced_default_8",
    ):
        found = shown.execute_script(parts, name)
        assert "".join(found) == name
        assert len(found) > 3
        assert all(each[-1] in "._" for each in found[:-1] if each)
    assert shown.execute_script(parts, "wait_tensor_default_72") == ["wait_tensor_default_72"]
