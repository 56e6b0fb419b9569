"""Tests of JSON that is written in pieces."""

import json

from hypothesis import given
from hypothesis import strategies as st

from zpasses.inspect.json_text import batched, json_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
)


@given(VALUES, st.integers(0, 5), st.sampled_from([None, 1, 2]), st.integers(1, 50))
def test_pieces_are_the_json_of_the_value(value, levels, indent, size):
    pieces = list(json_pieces(value, levels, indent))
    assert json.loads("".join(pieces)) == value
    assert "".join(batched(iter(pieces), size)) == "".join(pieces)


def test_compact_text_is_that_of_json():
    value = {"a": [1, {"b": [2, "é"]}], "c": {}}
    expected = json.dumps(value, separators=(",", ":"))
    assert all("".join(json_pieces(value, levels)) == expected for levels in range(5))


def test_deep_values_are_one_line_each():
    rows = [{"id": at, "args": [{"node": at}] * 12} for at in range(2)]
    lines = "".join(json_pieces({"nodes": rows}, 2, 1)).splitlines()
    assert len(lines) == 6
    assert json.loads(lines[2].rstrip(",")) == rows[0]


def test_rows_are_pieces():
    pieces = list(json_pieces([{"a": [0] * 1000}] * 10, 1))
    assert max(map(len, pieces)) < 2100
