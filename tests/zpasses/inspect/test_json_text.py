"""Tests of JSON with a line per item."""

import json

from hypothesis import given
from hypothesis import strategies as st

from zpasses.inspect.json_text import json_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
)


@given(VALUES, st.integers(0, 5))
def test_the_text_is_the_json_of_the_value(value, levels):
    assert json.loads(json_text(value, levels)) == value


def test_deep_values_are_one_line_each():
    rows = [{"id": at, "args": [{"node": at}] * 12} for at in range(2)]
    lines = json_text({"nodes": rows}, 2).splitlines()
    assert len(lines) == 6
    assert json.loads(lines[2].rstrip(",")) == rows[0]
