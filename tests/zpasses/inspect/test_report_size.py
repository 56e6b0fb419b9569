"""The page of a large graph: its size, and how many elements it has. Times are in
docs/measurements.md.
"""

import re

from tests.zpasses.inspect.browsing import all_of, needs_browser, one, wait_for
from tests.zpasses.inspect.graphs import chain, dump_of, graph_of, node, snapshot
from zpasses.dumps.nodes import Buffer, Ref
from zpasses.inspect import Inspection

MOST_BYTES = 2_500_000
"""Of the page of 20,000 nodes and one pass."""


@needs_browser
def test_only_visible_nodes_of_a_large_graph_are_on_the_page(page):
    size = 20_000
    before = chain(size)
    nodes = list(before.nodes)
    for at in range(100, size, 400):
        buffers = (Buffer(1 << 20, 100_000 + at, size, "bucket"),)
        nodes.insert(at, node(100_000 + at, f"extra{at}", args=(Ref(0),), buffers=buffers))
    after = snapshot(*nodes, live=[0] * len(nodes), number=1)
    inspected = Inspection(dump_of(graph_of("joint", (None, before), ("insert", after))))
    assert len(inspected.html()) < MOST_BYTES
    browser = page(inspected)
    for tab in ("diff", "memory", "timeline", "listing", "source", "overview"):
        browser.execute_script(f"go({{graph: 'joint', step: 1, tab: '{tab}'}})")
        assert len(all_of(browser, "body *")) < 3000, tab
        counts = re.findall(r"(?<![\w.,_])\d{4,}(?![\w.])", one(browser, "main").text)
        assert counts == [], tab  # digits are in groups
    assert "50" in one(browser, "main .chip.inserted").text
    browser.execute_script("go({graph: 'joint', step: 1, tab: 'listing', node: 19990})")
    active = "document.querySelector('main .row.active')?.textContent"
    assert "n19990 = " in wait_for(browser, active)
