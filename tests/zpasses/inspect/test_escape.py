"""Tests of what pages do with characters that steer a terminal, hide text or forge a line."""

import json
import re
import sys
import unicodedata

import pytest

from tests.zpasses.inspect.graphs import dump_of, graph_of, replace, small_dump, two_gathers
from zpasses.dumps.format import Failure, PassRun
from zpasses.inspect import Inspection
from zpasses.inspect.escape import one_line, one_line_values, printable

STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_every_control_and_format_character_is_escaped():
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        if unicodedata.category(char) == "Cn":
            continue  # a newer Unicode than Python's may define it
        steers = unicodedata.category(char) in STEERING
        assert (one_line(char) != char) == steers, hex(code)
        assert (printable(char) != char) == (steers and char not in "\t\n"), hex(code)


def test_escapes_are_those_of_python():
    assert one_line("a\nb\tc\rd\x1be\u202ef\U000e0041") == r"a\nb\tc\rd\x1be\u202ef\U000e0041"
    assert printable("a\nb\tc\x1b") == "a\nb\tc\\x1b"
    assert one_line("größe ≤ 3 😀") == "größe ≤ 3 😀"


def test_values_are_escaped_with_their_keys():
    given = {"a\n": ["\x1b", {"b": "\u202e"}], "n": float("nan"), "i": 3}
    expected = {r"a\n": [r"\x1b", {"b": r"\u202e"}], "n": "nan", "i": 3}
    assert one_line_values(given) == expected


EVIL = "x\nFORGED\x1b[2J\u202e"


def hostile_dump():
    """Every text that a page prints is hostile."""
    graph = two_gathers()
    nodes = tuple(
        replace(
            node,
            name=f"{node.name}{EVIL}",
            target=f"{node.target}{EVIL}",
            params=(EVIL,),
            tag=None if node.tag is None else replace(node.tag, role=EVIL, params=(EVIL,)),
            collective=node.collective
            and replace(node.collective, kind=EVIL, group=EVIL, decision=EVIL, route=EVIL),
            source=node.source and replace(node.source, text=EVIL, file=EVIL, module=EVIL),
            buffers=tuple(replace(each, kind=EVIL, params=(EVIL,)) for each in node.buffers),
            kwargs={EVIL: EVIL},
        )
        for node in graph.nodes
    )
    evil = replace(graph, nodes=nodes, number=1)
    dump = dump_of(graph_of("forward", (None, graph), (EVIL, evil)), name=EVIL)
    (compiled,) = dump.ranks[0].compiles
    step = compiled.graphs["forward"].steps[1]
    run = step.run
    assert isinstance(run, PassRun)
    steps = (
        compiled.graphs["forward"].steps[0],
        replace(step, run=replace(run, name=EVIL, text=EVIL, notes=(EVIL,))),
    )
    renamed = replace(compiled.graphs["forward"], name="forward", steps=steps)
    failure = Failure(EVIL, EVIL, EVIL, EVIL)
    info = replace(compiled.info, error=failure)
    compiled = replace(compiled, graphs={"forward": renamed}, info=info)
    meta = {**dump.meta, "zpasses": EVIL, EVIL: EVIL}
    return Inspection(
        replace(dump, meta=meta, ranks={0: replace(dump.ranks[0], compiles=(compiled,))})
    )


@pytest.mark.parametrize("page", ["overview", "show", "diff", "collectives", "memory"])
def test_no_text_of_a_dump_forges_a_line(page):
    view = getattr(hostile_dump(), page)()
    for text in (view.text(), view.text(color=True), view._repr_html_()):
        assert "FORGED" in text
        assert not any(line.startswith("FORGED") for line in text.splitlines())
        assert "\u202e" not in text
        assert "\x1b[2J" not in text


def test_no_text_of_a_dump_forges_a_line_of_the_page_or_of_the_trace():
    inspection = hostile_dump()
    data = re.search(r'id="data">(.*?)</script>', inspection.html(), re.DOTALL)[1]
    forged = []
    queue = [("", json.loads(data))]
    while queue:
        key, value = queue.pop()
        if isinstance(value, dict):
            queue += [*value.items(), *((key, name) for name in value)]
        elif isinstance(value, list):
            queue += [(key, each) for each in value]
        elif isinstance(value, str):
            assert not set(value) & {"\x1b", "\u202e"}
            forged += [key] if "\n" in value else []
    assert set(forged) == {"message", "traceback", "notes"}  # shown as blocks
    for event in inspection.timeline("forward")["traceEvents"]:
        assert "\n" not in event["name"]


def test_further_lines_of_an_error_are_indented():
    dump = small_dump(error=Failure("ValueError", "first\nsecond", "sdma"))
    shown = str(Inspection(dump).overview())
    assert "FAILED in sdma: ValueError: first\n    second" in shown
