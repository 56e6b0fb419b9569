"""Tests of the page: what it says where, at every width, and that its address keeps the view."""

import pytest

from tests.cases import some_quick
from tests.zpasses.inspect.browsing import (
    all_of,
    needs_browser,
    one,
    wait_for,
)
from tests.zpasses.inspect.graphs import (
    chain,
    dump_of,
    gather,
    graph_of,
    node,
    replace,
    small_dump,
    snapshot,
    two_gathers,
    wait,
)
from zpasses.dumps.format import Buffer, Failure, Prediction, Ref, Source
from zpasses.inspect import Inspection, communication

FAILURE = Failure("KeyError", "'w'", "overlap", raised="train.py:7 in rewrite: names['w']")


def queueing():
    """Two gathers that start at once, of which the first is needed last."""
    return snapshot(
        node(0, "a", "a", op="placeholder"),
        gather(1, "gather_w", 0, 3, cost_us=10.0),
        gather(2, "gather_v", 0, 4, cost_us=5.0, param="v"),
        wait(4, "v", 2, param="v"),
        wait(3, "w", 1),
        node(5, "output", "output", ((Ref(3), Ref(4)),), op="output"),
    )


def test_exposed_time_beyond_the_transfer_is_queueing():
    first, second = communication(queueing()).rows
    assert (first.exposed_us, first.queued_us) == (0.0, 0.0)
    assert (second.time_us, second.exposed_us, second.queued_us) == (5.0, 15.0, 10.0)
    text = str(Inspection(dump_of(graph_of("forward", (None, queueing())))).collectives())
    assert "queueing" in text
    assert "exposed 15 us (10 us of it queueing behind earlier collectives)" in text
    plain = str(Inspection(dump_of(graph_of("forward", (None, two_gathers())))).collectives())
    assert "queueing" not in plain


@pytest.mark.slow(quick="test_the_page_estimates_no_step_of_a_compile_that_has_no_graph_that_runs")
@needs_browser
def test_a_failed_pass_is_no_success_on_any_view(page):
    for left in (two_gathers(), two_gathers(early=True), None):
        states = ("bucket{cap_mb=0}", two_gathers()), ("overlap", left)
        graph = graph_of("forward", (None, two_gathers()), *states, error=FAILURE)
        shown = page(Inspection(dump_of(graph, error=FAILURE)), "0/forward/2/diff/")
        for tab in ("diff", "memory", "listing", "timeline", "collectives"):
            one(shown, f"#tab-{tab}").click()
            text = one(shown, "main").text
            assert "raised at train.py:7" in text
            assert "changed nothing" not in text
            assert ("may be wrong" in text) == (left is not None)


@pytest.mark.slow(quick="test_memory_and_times_on_the_page_equal_the_models")
@needs_browser
def test_exposed_time_on_the_page_is_split_into_transfer_and_queueing(page):
    shown = page(
        Inspection(dump_of(graph_of("forward", (None, queueing())))), "0/forward/0/collectives/2"
    )
    assert (
        "15 µs, of which 10 µs is queueing behind earlier collectives" in one(shown, ".detail").text
    )


@pytest.mark.slow(quick="test_memory_and_times_on_the_page_equal_the_models")
@needs_browser
def test_the_earlier_curve_keeps_its_order_and_its_peak(page):
    def state(order, removed=()):
        nodes = {
            key: node(key, f"n{key}", "aten.relu.default", (Ref(0),)) for key in range(1, 7)
        } | {0: node(0, "x", "x", op="placeholder"), 7: node(7, "end", "output", (), op="output")}
        nodes[3] = node(3, "n3", buffers=(Buffer(1000, 3, 3, "activation"),))
        nodes[5] = node(5, "n5", buffers=(Buffer(400, 5, 5, "activation"),))
        return snapshot(*(nodes[key] for key in order if key not in removed))

    before = state((0, 1, 2, 3, 4, 5, 6, 7))
    after = state((0, 5, 1, 2, 4, 6, 7))  # n5 moved to the start, and n3 is gone
    shown = page(Inspection(dump_of(graph_of("forward", (None, before), ("overlap", after)))))
    curve = shown.execute_script(
        "const data = compiles[0].graphs[0];"
        "return [...curveOfStepBefore(compiles[0].at(data, 0), compiles[0].at(data, 1))];"
    )
    assert curve == [0, 0, 0, 0, 1000, 400, 0]


@pytest.mark.slow(quick="test_every_view_of_a_real_dump_opens")
@needs_browser
def test_graphs_that_run_come_first_and_the_joint_graph_raises_no_alarm(page):
    graphs = [
        graph_of("captured", (None, chain(5))),
        graph_of("joint", (None, two_gathers()), ("overlap", two_gathers(early=True))),
        graph_of("forward", (None, two_gathers())),
    ]
    shown = page(Inspection(dump_of(*graphs)))
    assert [each.text for each in all_of(shown, ".nav h2")] == ["forward", "joint", "captured"]
    cards = all_of(shown, ".card header")
    assert "peak" not in cards[1].text
    assert "split into forward and backward before it runs" in cards[1].text
    assert all_of(all_of(shown, ".card")[1], ".delta.worse") == []


@pytest.mark.slow(quick="test_zoom_whole_graph_and_line_survive_a_reload")
@needs_browser
def test_the_address_keeps_filter_and_sorting_and_the_theme_survives(page):
    shown = page(Inspection(small_dump()), "0/forward/2/collectives//filter=gather_v&sort=time")
    wait_for(shown, "document.querySelectorAll('.grid .row').length === 1")
    assert one(shown, ".filter").get_attribute("value") == "gather_v"
    assert one(shown, '[aria-sort="ascending"]').text.startswith("time")
    one(shown, ".col-bytes button").click()
    assert "sort=bytes&down=1" in shown.execute_script("return location.hash")
    one(shown, "#theme").click()
    shown.refresh()
    assert shown.execute_script("return document.documentElement.dataset.theme") == "dark"
    shown.execute_script("localStorage.clear()")
    assert one(shown, '[aria-sort="descending"]').text.startswith("bytes")


@needs_browser
@pytest.mark.parametrize(
    ("address", "said"),
    some_quick(
        [
            ("0/backwards/1/diff/", 'has no graph "backwards"; this is forward'),
            ("0/forward/9/diff/", "has no step 9; it has 0 to 2"),
            ("0/forward/1/pictures/", 'no view "pictures"'),
            ("7/forward/1/diff/", "no compile 7"),
            ("0/forward/2/listing/99", "no node with the id 99"),
        ],
        [("0/forward/9/diff/", "has no step 9; it has 0 to 2")],
    ),
)
def test_an_address_that_names_something_else_says_so(page, address, said):
    assert said in one(page(Inspection(small_dump()), address), ".notice").text


@pytest.mark.slow(quick="test_an_address_that_names_something_else_says_so")
@needs_browser
def test_an_unknown_kind_of_collectives_in_the_address_is_named(page):
    for more in ("", "&filter=w", "&exposed=1"):
        shown = page(Inspection(small_dump()), f"0/forward/2/collectives//kind=all_gather{more}")
        assert one(shown, "main p.pad").text == (
            'This graph has no collective of the kind "all_gather". Its kinds are '
            "all_gather_into_tensor."
        )
        kind = one(shown, '[aria-label="Kind of collective"]')
        assert kind.get_attribute("value") == "all_gather"


@pytest.mark.slow(quick="test_zoom_whole_graph_and_line_survive_a_reload")
@needs_browser
def test_a_view_has_the_name_of_its_tab_in_addresses(page):
    shown = page(Inspection(small_dump()), "0/forward/2/listing/")
    titles = [each.text for each in all_of(shown, '[role="tab"]')]
    assert "Graph" in titles
    for title in titles:
        shown.execute_script("location.hash = arguments[0]", f"0/forward/2/{title.lower()}/")
        assert one(shown, '[aria-selected="true"]', title).text == title
        assert not all_of(shown, ".notice")


@pytest.mark.slow(quick="test_zoom_whole_graph_and_line_survive_a_reload")
@needs_browser
def test_back_leads_away_from_an_address_that_the_page_rewrites(page):
    shown = page(Inspection(small_dump()), "0/forward/2/diff/")
    shown.execute_script("location.hash = '0/forward/2/graph/'")
    wait_for(shown, "state.tab === 'listing'")
    shown.back()
    wait_for(shown, "state.tab === 'diff'")


STRANGE = [
    ("zzz", '"#zzz" names nothing that this page shows: "zzz" is no number'),
    ("0/forward/last/diff/", '"last" is no number'),
    ("0/forward/2/listing/gather_v", '"gather_v" is no number'),
]


@pytest.mark.slow(quick="test_an_address_that_names_something_else_says_so")
@needs_browser
def test_an_address_of_another_form_says_so(page):
    for address, said in STRANGE:
        shown = page(Inspection(small_dump()), address)
        assert said in one(shown, ".notice").text
    shown = page(Inspection(small_dump()), "0/forward/2/compare//with=7%2Fforward%2F1")
    assert 'no graph "7/forward/1" to compare with' in one(shown, ".notice").text
    assert not all_of(page(Inspection(small_dump())), ".notice")


def long_graph():
    """60 nodes in two states, of two lines of one file."""
    nodes = [
        replace(each, source=Source("model.py", 3 + each.id % 2, "code", "up"))
        if each.op == "call_function"
        else each
        for each in chain(60).nodes
    ]
    after = [replace(each, id=900) if each.id == 40 else each for each in nodes]
    return dump_of(graph_of("forward", (None, snapshot(*nodes)), ("overlap", snapshot(*after))))


@needs_browser
def test_zoom_whole_graph_and_line_survive_a_reload(page):
    shown = page(Inspection(long_graph()))
    for tab, key in (("memory", "nodes="), ("timeline", "time=")):
        shown.execute_script(f"go({{graph: 'forward', step: 1, tab: '{tab}', node: null}})")
        one(shown, "[aria-label='Zoom in']").click()
        wait_for(shown, f"location.hash.includes('{key}')")
        kept = shown.execute_script("return location.hash")
        shown.refresh()
        one(shown, "[aria-label='Zoom in']").click()
        wait_for(shown, "location.hash !== arguments[0]", kept)
        narrow = shown.execute_script(
            "return ['nodes', 'time'].map((key) => (state.view[key] || '0-0').split('-'))"
            ".map(([from, to]) => to - from)[arguments[0]]",
            0 if tab == "memory" else 1,
        )
        assert 0 < narrow <= 0.7 * 0.7 * 60 + 1  # twice zoomed in, not once
    one(shown, "#tab-diff").click()
    one(shown, "label", "show the whole graph").click()
    shown.refresh()
    assert (
        one(shown, "label", "show the whole graph")
        .find_element("css selector", "input")
        .is_selected()
    )
    assert not all_of(shown, ".gap")
    one(shown, "#tab-source").click()
    one(shown, ".line.source", "code").click()
    assert shown.execute_script("return state.view.line") == "model.py:3"
    shown.execute_script("keep({line: 'model.py:4'}); redraw()")
    shown.refresh()
    assert "line 4: " in one(shown, ".nodes-of h3").text
    shown.execute_script("go({node: 2})")  # a node of line 3
    assert "line 3: " in one(shown, ".nodes-of h3").text


@pytest.mark.slow(quick="test_listing_filters_and_selects_a_node")
@needs_browser
def test_empty_lists_say_why(page):
    shown = page(Inspection(small_dump()), "0/forward/2/listing//filter=nothing")
    assert 'No node matches all words of the filter "nothing"' in one(shown, "main").text
    one(shown, "#tab-collectives").click()
    assert "No collective matches" in one(shown, "main").text


@pytest.mark.slow(quick="test_everything_is_reachable_by_keyboard")
@needs_browser
def test_next_change_goes_from_block_to_block(page):
    old = chain(60)
    nodes = [
        node(900 + each.id, f"new{each.id}") if each.id in (10, 11, 12, 40) else each
        for each in old.nodes
    ]
    shown = page(
        Inspection(dump_of(graph_of("forward", (None, old), ("overlap", snapshot(*nodes))))),
        "0/forward/1/diff/",
    )
    wait_for(shown, "document.querySelectorAll('.pair').length > 3")
    places = []
    for _ in range(3):
        one(shown, "button", "↓ change").click()
        wait_for(shown, "document.querySelector('.row.active')")
        places.append(one(shown, ".row.active").text)
    assert "new10" in places[0]
    assert "new40" in places[1]
    assert places[2] == places[1]  # there is no third block


@pytest.mark.slow(quick="test_timeline_and_memory_react_to_pointer_and_keys")
@needs_browser
def test_why_the_peak_changed_is_one_click(page):
    shown = page(Inspection(small_dump()), "0/forward/2/memory/")
    one(shown, ".runline button", "Why?").click()
    first, second = (each.text for each in all_of(shown, ".compared thead th.right")[:2])
    assert "bucket" in first
    assert "overlap" in second  # what the pass added is new
    assert "v" in one(shown, ".peak-delta", "new at the peak").text


@needs_browser
@pytest.mark.parametrize("width", some_quick([390, 640, 1280, 1920], [390]))
def test_every_view_fits_the_width(page, width):
    shown = page(Inspection(small_dump()))
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 700}
    shown.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for tab in ("overview", "diff", "memory", "timeline", "collectives", "listing", "source"):
            shown.execute_script(f"go({{tab: '{tab}', node: 6, step: 2}})")
            assert shown.execute_script("return document.documentElement.scrollWidth") == width
            last = "return document.getElementById('tab-compare').getBoundingClientRect().right"
            assert shown.execute_script(last) <= width  # all tabs are visible without scrolling
        one(shown, ".detail button").click()
        if width < 700:
            assert not shown.execute_script("return document.querySelector('.nav').offsetHeight")
            one(shown, "#menu").click()
        assert shown.execute_script("return document.querySelector('.nav').offsetHeight")
    finally:
        shown.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture
def at_width(browser, page):
    """Opens an inspection's page at a width."""

    def show(inspection, address, width):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        return page(inspection, address)

    yield show
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow(quick="test_every_view_fits_the_width")
@needs_browser
def test_a_narrow_header_keeps_the_button_of_the_theme(at_width):
    dumps = [
        dump_of(
            graph_of("forward", (None, two_gathers())), rank=rank, name=f"{rank}/0_of_a_long_run"
        )
        for rank in (0, 1)
    ]
    both = replace(dumps[0], ranks={**dumps[0].ranks, **dumps[1].ranks})

    class TwoRanks:
        def html(self):
            return Inspection(both, 0).html(Inspection(both, 1))

    shown = at_width(TwoRanks(), "", 390)
    assert one(shown, "#compile")
    button = one(shown, "#theme")
    assert button.location["x"] + button.size["width"] <= 390


LONG = "all_gather_into_tensor_coalesced_default"


def long_names():
    """A graph whose node and parameter have long names."""
    param = "model.layers.79.mlp.down_proj.weight"
    nodes = [
        replace(each, name=LONG, params=(param,)) if each.name == "gather_w" else each
        for each in two_gathers().nodes
    ]
    nodes = [
        replace(each, buffers=tuple(replace(one, params=(param,)) for one in each.buffers))
        if each.name == LONG
        else each
        for each in nodes
    ]
    return Inspection(dump_of(graph_of("forward", (None, snapshot(*nodes)))))


@pytest.mark.slow(quick="test_every_view_fits_the_width")
@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_names_in_memory_have_two_lines_at_most(at_width, width):
    shown = at_width(long_names(), "0/forward/0/memory/3", width)
    name = one(shown, ".buffers button", LONG[:10])
    assert name.size["height"] <= 2 * 20
    lines = shown.execute_script(
        "const range = document.createRange(); range.selectNodeContents(arguments[0]);"
        "return new Set([...range.getClientRects()].map((each) => each.top)).size",
        one(shown, ".buffers td.wrap", "model"),
    )
    assert lines <= 2
    table = "const box = document.querySelector('.alive .scroll');"
    assert shown.execute_script(f"{table} return box.scrollWidth <= box.clientWidth")


@pytest.mark.slow(quick="test_every_view_fits_the_width")
@needs_browser
@pytest.mark.parametrize("view", ["diff", "compare"])
def test_a_narrow_page_has_both_sides_in_one_list(at_width, view):
    nodes = list(two_gathers().nodes)
    nodes[5] = replace(nodes[5], args=(Ref(4), Ref(4)))
    after = snapshot(*nodes[:-1], node(20, "extra"), nodes[-1])
    graph = graph_of("forward", (None, two_gathers()), ("p", after))
    shown = at_width(Inspection(dump_of(graph)), f"0/forward/1/{view}/", 390)
    first, second = ("before", "after") if view == "diff" else ("first", "second")
    rows = [each.text.split("\n") for each in all_of(shown, ".pair")]
    assert [(row[0], row[-1].split("  #")[0]) for row in rows if not row[0].isdigit()] == [
        (first, "mm = mm(x, w)"),
        (second, "mm = mm(w, w)"),
        (second, "extra = relu()"),
    ]
    assert len(rows) == 12  # 9 equal nodes
    assert not all_of(shown, ".cell.none")
    widest = "return Math.max(...[...document.querySelectorAll('.cell')].map((e) => e.scrollWidth))"
    assert shown.execute_script(widest) > 300  # whole lines, which scroll
    shown.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    wait_for(shown, "document.querySelectorAll('.cell.none').length > 0")


@pytest.mark.slow(quick="test_memory_and_times_on_the_page_equal_the_models")
@needs_browser
def test_the_overview_shows_how_far_the_step_is_from_its_bound(page):
    graphs = [
        replace(
            graph_of(name, (None, two_gathers())),
            prediction=Prediction(200.0, 50.0, 150.0, 100.0, 1 << 20, 2 << 20, 2, 0),
        )
        for name in ("forward", "backward")
    ]
    shown = page(Inspection(dump_of(*graphs)))
    card = one(shown, ".card", "The step")
    assert "50.0 % can be saved" in card.text
    assert "400 µs" in card.text
    widths = [
        each.get_attribute("style") for each in card.find_elements("css selector", ".predicted-bar")
    ]
    assert widths == ["width: 100%;", "width: 75%;", "width: 50%;"]


@pytest.mark.slow(quick="test_the_timeline_shows_equal_layers_once")
@needs_browser
def test_a_layer_begins_once_in_memory(page):
    modules = ["layers.0.up", "layers.1.up", "", "layers.1.up", "layers.0.up", "layers.2.up"]
    nodes = [node(0, "x", "x", op="placeholder")] + [
        node(at, f"n{at}", args=(Ref(at - 1),), source=Source("m.py", 1, "code", module))
        for at, module in enumerate(modules, 1)
    ]
    nodes.append(node(7, "output", "output", ((Ref(6),),), op="output"))
    shown = page(Inspection(dump_of(graph_of("forward", (None, snapshot(*nodes))))))
    starts = shown.execute_script(
        "go({graph: 'forward', step: 0, tab: 'memory'});"
        "return layerStarts(current.graph, 0, 8).map(({at, layer}) => [at, layer])"
    )
    assert [at for at, _ in starts] == [1, 2, 6]
    assert len({layer for _, layer in starts}) == 3
