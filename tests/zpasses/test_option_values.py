import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zpasses import OptionError
from zpasses.option_values import (
    build_dataclass,
    describe_type,
    field_types,
    format_size,
    format_value,
    parse_value,
)


@dataclass(frozen=True)
class Choices:
    flag: bool = False
    count: int = 1
    size_mb: float | None = None
    dtype: torch.dtype | None = None
    form: Literal["auto", "fast"] = "auto"
    stage: Literal[1, 2, 3] | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


def test_text_is_read_as_the_field_s_type():
    texts = {
        "flag": "true",
        "count": "3",
        "size_mb": "2.5",
        "dtype": "bfloat16",
        "form": "fast",
        "stage": "2",
    }
    assert build_dataclass(Choices, texts, "pass 'x'") == Choices(
        True, 3, 2.5, torch.bfloat16, "fast", 2
    )


def test_none_is_written_out():
    assert (
        build_dataclass(Choices, {"size_mb": "none", "dtype": "none", "stage": "none"}, "pass 'x'")
        == Choices()
    )


def test_values_of_the_right_type_are_taken_as_they_are():
    extra = {"a": 1}
    made = build_dataclass(
        Choices, {"size_mb": 2, "dtype": torch.float16, "extra": extra}, "pass 'x'"
    )
    assert (made.size_mb, type(made.size_mb), made.dtype, made.extra) == (
        2.0,
        float,
        torch.float16,
        extra,
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("flag", "yes", "bool"),
        ("flag", 1, "bool"),
        ("count", "2.5", "int"),
        ("count", True, "int"),
        ("size_mb", "large", "float or none"),
        ("dtype", "bf16", "a dtype such as bfloat16 or none"),
        ("dtype", "nn", "a dtype such as bfloat16 or none"),
        ("form", "slow", "'auto' or 'fast'"),
        ("stage", "4", "1 or 2 or 3 or none"),
        ("stage", True, "1 or 2 or 3 or none"),
        ("extra", "a=1", "dict"),
    ],
)
def test_ill_typed_values_name_what_was_expected(name, value, expected):
    with pytest.raises(OptionError) as caught:
        build_dataclass(Choices, {name: value}, "pass 'x'")
    assert f"pass 'x', option {name!r}: got {value!r}" in str(caught.value)
    assert expected in str(caught.value)


def test_unknown_option_names_the_nearest_and_the_known():
    with pytest.raises(
        OptionError,
        match=r"pass 'x' has no option 'dtpye'. Did you mean \"dtype\"\? Known: count, dtype, extra",  # noqa: E501
    ):
        build_dataclass(Choices, {"dtpye": 1}, "pass 'x'")


def test_types_are_resolved_from_text_annotations():
    assert field_types(Choices)["count"] is int


def test_kinds_are_described_in_words():
    assert describe_type(bool) == "bool"
    assert describe_type(dict) == "dict"


VALUES = st.one_of(
    st.tuples(st.just(bool), st.booleans()),
    st.tuples(st.just(int), st.integers()),
    st.tuples(st.just(float), st.floats(allow_nan=False)),
    st.tuples(st.just(float | None), st.one_of(st.none(), st.floats(allow_nan=False))),
    st.tuples(
        st.just(torch.dtype | None),
        st.sampled_from([None, torch.bfloat16, torch.float32, torch.int8]),
    ),
    st.tuples(st.just(Literal["a", "b", 3, None]), st.sampled_from(["a", "b", 3, None])),
)


@given(VALUES)
def test_formatted_values_are_read_back(pair):
    kind, value = pair
    read = parse_value(format_value(value), kind, "here")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(1536, "1.5 KiB"), (10**17, "93,132,257 GiB"), (0, "0 B")]
)
def test_sizes_are_told_without_exponents(nbytes, text):
    assert format_size(nbytes) == text
