"""Tests of the page of a model of 80 layers: its size, and how many elements it has. Times are in
docs/measurements.md.
"""

import pytest

from tests.zpasses.inspect.browsing import (
    needs_browser,
    one,
)
from tests.zpasses.inspect.graphs import (
    MM,
    dump_of,
    gather,
    graph_of,
    node,
    output,
    placeholder,
    replace,
    snapshot,
    value,
    wait,
)
from zpasses.dumps.format import Buffer, Ref, Source
from zpasses.inspect import Inspection

LAYERS = 80
MOST_BYTES = 9_400_000
"""The page of the real dump is 1.54 times as large as this one: it has more steps and names. Its
limit is 15 MB."""
MOST_ELEMENTS = 1500
PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SHAPE = (1, 4096, 8192)
OPS = ("aten.mul.Tensor", "aten.rsqrt.default", "aten.view.default", "aten.add.Tensor")


def llama(first_id, calls):
    """A graph as large as one of Llama with 80 layers.

    Args:
        first_id: id of its first node.
        calls: computing calls per parameter.
    """
    ids = iter(range(first_id, first_id + 1_000_000))
    nodes = [node(next(ids), "x", "primals_1", op="placeholder", shape=SHAPE)]
    last = nodes[0].id
    for layer in range(LAYERS):
        for part in PARTS:
            param = f"model.layers.{layer}.{part}.weight"
            source = Source(f"modeling_{part[:3]}.py", 100 + calls, "x = x * y", param[:-7])
            shard, start, full = next(ids), next(ids), next(ids)
            at = f"{layer}_{part.replace('.', '_')}"
            about = {"param": param, "buffers": (Buffer(1 << 20, start, full, "parameter"),)}
            nodes += [
                placeholder(shard, f"primals_{shard}"),
                gather(start, f"all_gather_into_tensor_{at}", shard, full, **about),
                wait(full, f"wait_tensor_{at}", start, param=param),
            ]
            for call in range(calls):
                id, op = next(ids), MM if call == 0 else OPS[call % len(OPS)]
                args = (Ref(last), Ref(full) if call == 0 else SHAPE)
                buffers = (Buffer(64 << 20, id, id, "activation"),)
                about = {"shape": SHAPE, "source": source, "buffers": buffers}
                nodes.append(node(id, f"{op.split('.')[1]}_{id}", op, args, **about))
                last = id
    nodes.append(output(next(ids), last))
    return snapshot(*nodes, live=[1 << 30] * len(nodes))


def changed(graph, stride):
    """The graph after a pass that changes every node of this distance, and moves a quarter."""
    nodes = [
        replace(each, vals=(value(2, 2),)) if at % stride == 0 and each.vals else each
        for at, each in enumerate(graph.nodes)
    ]
    quarter = len(nodes) // 4
    gathers = [each for each in nodes[:quarter] if each.collective]
    early = {each.id for each in gathers}
    inputs = [each for each in nodes if each.op == "placeholder"]
    rest = [each for each in nodes if each.op != "placeholder" and each.id not in early]
    return snapshot(*inputs, *gathers, *rest, live=graph.live_bytes)


def page_of(**calls):
    """Each graph before its passes, and after two of them."""
    graphs = []
    for at, (name, count) in enumerate(calls.items()):
        graph = llama(100_000 * at, count)
        passes = [("gather-params", changed(graph, 9)), ("schedule", changed(graph, 11))]
        graphs.append(graph_of(name, (None, graph), *passes))
    return Inspection(dump_of(*graphs))


@pytest.mark.slow(quick="test_only_visible_nodes_of_a_large_graph_are_on_the_page")
def test_the_page_of_80_layers_is_small():
    inspected = page_of(joint=44, forward=16, backward=38)
    (compiled,) = inspected.dump.ranks[0].compiles
    nodes = [len(each.first.snapshot.nodes) for each in compiled.graphs.values()]
    assert sum(nodes) > 40_000
    assert len(inspected.html().encode()) < MOST_BYTES


@pytest.mark.slow(quick="test_only_visible_nodes_of_a_large_graph_are_on_the_page")
@needs_browser
def test_a_page_of_80_layers_has_few_elements_in_every_view(page):
    shown = page(page_of(backward=38))
    count = "return document.querySelectorAll('*').length"
    assert shown.execute_script(count) < MOST_ELEMENTS
    for tab in ("diff", "memory", "timeline", "collectives", "listing", "source", "compare"):
        shown.execute_script("go({graph: 'backward', step: 2, tab: arguments[0]})", tab)
        assert one(shown, "main").text
        assert shown.execute_script(count) < MOST_ELEMENTS, tab
    for unfolded in ("diff", "listing", "compare"):
        shown.execute_script("keep({fold: 'no'}); go({tab: arguments[0]}); redraw()", unfolded)
        assert shown.execute_script(count) < MOST_ELEMENTS, unfolded
