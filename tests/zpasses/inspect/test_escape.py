"""Tests of what pages do with characters that steer a terminal, hide text or forge a line."""

import json
import re
import sys
import unicodedata

import pytest

from tests.zpasses.inspect.graphs import hostile_dump, small_dump
from zpasses.dumps.format import Failure
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


@pytest.mark.parametrize("page", ["overview", "show", "diff", "collectives", "memory"])
def test_no_text_of_a_dump_forges_a_line(page):
    view = getattr(hostile_dump(EVIL), page)()
    for text in (view.text(), view.text(color=True), view._repr_html_()):
        assert "FORGED" in text
        assert not any(line.startswith("FORGED") for line in text.splitlines())
        assert "\u202e" not in text
        assert "\x1b[2J" not in text


def test_no_text_of_a_dump_forges_a_line_of_the_page_or_of_the_trace():
    inspection = hostile_dump(EVIL)
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
    for event in inspection.timeline("joint")["traceEvents"]:
        assert "\n" not in event["name"]


def test_further_lines_of_an_error_are_indented():
    dump = small_dump(error=Failure("ValueError", "first\nsecond", "sdma"))
    shown = str(Inspection(dump).overview())
    assert "FAILED in sdma: ValueError: first\n    second" in shown
