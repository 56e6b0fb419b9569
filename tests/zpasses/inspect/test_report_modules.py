"""Tests of the page: equal layers are shown once in every view."""

import pytest

from tests.cases import some_quick
from tests.zpasses.inspect.browsing import (
    all_of,
    needs_browser,
    one,
    wait_for,
)
from tests.zpasses.inspect.graphs import dump_of, graph_of, node, snapshot
from zpasses.dumps.format import Buffer, Param, Ref, Source
from zpasses.inspect import Inspection
from zpasses.inspect.modules import template

LAYERS = 12


def layered(odd=None, changed=()):
    """A model of equal layers of two nodes, of which `odd` has a slower one."""
    nodes = [node(0, "x", "x", op="placeholder")]
    last, end = 0, 3 * LAYERS + 1
    for layer in range(LAYERS):
        for part in ("up", "down"):
            key = len(nodes)
            module = f"model.layers.{layer}.{part}"
            target = "aten.tanh.default" if layer in changed else "aten.relu.default"
            nodes.append(
                node(
                    key,
                    f"{part}_{layer}",
                    target,
                    (Ref(last),),
                    cost_us=40.0 if layer == odd else 10.0,
                    source=Source("model.py", 7, "x = layer(x)", module),
                    buffers=(Buffer(64, key, end, "parameter", (f"{module}.weight",)),),
                )
            )
            last = key
    nodes.append(node(end, "output", "output", ((Ref(last),),), op="output"))
    return snapshot(
        *nodes, live=(0, *(64 * at for at in range(1, 2 * LAYERS + 1)), 64 * 2 * LAYERS)
    )


def inspection(*states):
    params = {
        name: Param(name, (4, 4), "float32", 64, 32, 4)
        for each in layered().nodes
        for buffer in each.buffers
        for name in buffer.params
    }
    steps = [(f"p{at}" if at else None, state) for at, state in enumerate(states)]
    return Inspection(dump_of(graph_of("forward", *steps), parameters=params))


def folds(shown):
    return [each.text for each in all_of(shown, ".fold")]


@needs_browser
def test_equal_layers_are_one_row_and_the_odd_one_is_named(page):
    shown = page(inspection(layered(odd=3)), "0/forward/0/listing//fold=yes")
    inputs, layers, output = folds(shown)
    assert "(inputs)" in inputs
    assert "(output)" in output
    for part in (
        "model.layers.*",
        f"× {LAYERS}",  # noqa: RUF001
        "2 nodes",
        "20 µs to 80 µs of compute each",
        "not as the others: model.layers.3",
    ):
        assert part in layers
    all_of(shown, ".fold")[1].click()
    wait_for(shown, f"document.querySelectorAll('.fold.deep').length === {LAYERS}")
    all_of(shown, ".fold.deep")[4].click()
    assert one(shown, ".line", "up_4 = relu(down_3)")


@pytest.mark.slow(quick="test_equal_layers_are_one_row_and_the_odd_one_is_named")
@needs_browser
def test_a_selected_node_is_visible_in_a_folded_list(page):
    shown = page(inspection(layered()), "0/forward/0/listing/9/fold=yes")
    assert "up_4" in one(shown, ".row.active").text


@pytest.mark.slow(quick="test_equal_layers_are_one_row_and_the_odd_one_is_named")
@needs_browser
def test_the_difference_of_equal_layers_is_one_row(page):
    shown = page(
        inspection(layered(), layered(changed=range(1, LAYERS))), "0/forward/1/diff//fold=yes"
    )
    layers = folds(shown)[1]
    assert "~ 0 to 2" in layers
    assert "unchanged" in folds(shown)[0]


@pytest.mark.slow(quick="test_equal_layers_are_one_row_and_the_odd_one_is_named")
@needs_browser
def test_small_graphs_are_not_folded_unless_asked(page):
    shown = page(inspection(layered()), "0/forward/0/listing/")
    assert folds(shown) == []
    one(shown, '[aria-label="Fold by module"]').click()
    assert len(folds(shown)) == 3
    assert "fold=yes" in shown.execute_script("return location.hash")


@pytest.mark.slow(quick="test_equal_layers_are_one_row_and_the_odd_one_is_named")
@needs_browser
def test_nodes_of_a_line_are_folded(page):
    shown = page(inspection(layered()), "0/forward/0/source//fold=yes")
    assert any(f"× {LAYERS}" in each for each in folds(shown))  # noqa: RUF001


@pytest.mark.slow(quick="test_memory_and_times_on_the_page_equal_the_models")
@needs_browser
def test_memory_has_sums_by_module_and_a_band_for_each_buffer(page):
    shown = page(inspection(layered()), "0/forward/0/memory/")
    band = all_of(shown, ".lifetime")[0]
    assert "alive from up_0 to output" in band.get_attribute("title")
    band.click()
    assert one(shown, ".detail h2").text == "up_0"
    one(shown, '[aria-label="Sums by module"]').click()
    rows = [each.text for each in all_of(shown, ".alive tbody tr")]
    assert {each.split(" 64")[0] for each in rows} == {"model.layers.0.up 1"}
    one(shown, ".detail button").click()
    rows = [each.text for each in all_of(shown, ".alive tbody tr")]
    assert f"model.layers.*.up {LAYERS} 768 B 50.0 % 64 B" in rows


@pytest.mark.slow(quick="test_timeline_and_memory_react_to_pointer_and_keys")
@needs_browser
def test_memory_and_timeline_zoom_and_name_the_layers(page):
    shown = page(inspection(layered()), "0/forward/0/memory/")
    texts = "window.texts = []; const old = CanvasRenderingContext2D.prototype.fillText;"
    shown.execute_script(
        texts + "CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {"
        "window.texts.push(text); return old.call(this, text, ...rest); };"
    )
    one(shown, '[aria-label="Zoom in"]').click()
    wait_for(shown, "window.texts.some((each) => /^layers[.]\\d+$/.test(each))")
    wait_for(shown, "window.texts.some((each) => /^node \\d+$/.test(each))")
    shown.execute_script("window.texts = []")
    one(shown, "#tab-timeline").click()
    wait_for(shown, "window.texts.some((each) => /^(model[.])?layers[.]3$/.test(each))")


@pytest.mark.slow(quick="test_the_timeline_shows_equal_layers_once")
@needs_browser
def test_labels_of_the_timeline_keep_the_number_of_the_layer(page):
    shown = page(inspection(layered()))
    names = "model.layers.33.mlp.up_proj.weight", "lm_head.weight", "3", "wte"
    widest, headless, bare, plain = shown.execute_script(
        "return arguments[0].map(shortNames)", names
    )
    assert widest == [
        "model.layers.33.mlp.up_proj.weight",
        "layers.33.mlp.up_proj.weight",
        "33.mlp.up_proj.weight",
        "33…up_proj.weight",
        "33",
    ]
    assert headless == ["lm_head.weight", "weight"]
    assert (bare, plain) == (["3"], ["wte"])
    fitting = (
        "return fittingText({measureText: (text) => ({width: text.length})}, arguments[0], "
        "arguments[1])"
    )
    for room, expected in ((28, widest[1]), (20, widest[3]), (5, "33"), (1, "")):
        assert shown.execute_script(fitting, widest, room) == expected
    assert shown.execute_script(fitting, ["scaled_dot_product_12"], 8) == "…duct_12"


@pytest.mark.slow(quick="test_the_timeline_shows_equal_layers_once")
@needs_browser
def test_a_point_above_the_compute_stream_names_its_layer(page):
    shown = page(inspection(layered()), "0/forward/0/timeline/")
    chart = one(shown, "canvas")
    shown.execute_script(
        "const box = arguments[0].getBoundingClientRect();"
        "arguments[0].dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + "
        "TRACK.left + 5, clientY: box.top + TRACK.top - 8}))",
        chart,
    )
    assert one(shown, ".tooltip").text == "model.layers.0\n20 µs of compute, 0 exposed"


@needs_browser
@pytest.mark.parametrize(
    "module",
    some_quick(
        ["layers.3.mlp.up", "layers.3", "3", "blocks.3.mlp.0", "a.3.experts.12.up", "norm2", ""],
        ["a.3.experts.12.up"],
    ),
)
def test_page_and_command_line_fold_alike(page, module):
    shown = page(inspection(layered()))
    assert shown.execute_script("return template(arguments[0])", module) == template(module)
