"""Tests of tables in narrow terminals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpasses.inspect.fitted_table import abbreviated
from zpasses.inspect.view import ChangeLines, Code, Text, table


@pytest.mark.parametrize(
    ("name", "limit", "shown"),
    [
        ("model.layers.34.mlp.up.weight", 40, "model.layers.34.mlp.up.weight"),
        ("model.layers.34.self_attn.q_proj.weight", 34, "…layers.34.self_attn.q_proj.weight"),
        ("model.layers.34.self_attn.q_proj.weight", 28, "…34.self_attn.q_proj.weight"),
        ("model.layers.34.self_attn.q_proj.weight", 18, "…34…q_proj.weight"),
        ("model.layers.34.self_attn.q_proj.weight and 6 more", 21, "…34…q_proj.weight +6"),
        ("model.layers.34.input_layernorm.weight", 18, "…34…input_….weight"),
        ("model.layers.*.mlp.up_proj (80 times) and 3 more", 24, "…*.mlp.up_proj x80 +3"),
        ("model.embed_tokens.weight", 20, "…embed_tokens.weight"),
        ("transformers/models/llama/modeling_llama.py:164", 23, "…/modeling_llama.py:164"),
        ("all_gather_into_tensor_coalesced_default_12", 24, "all_gather…coalesced…12"),
        ("reduce_scatter_tensor_default_3", 20, "reduce_scatter…3"),
    ],
)
def test_abbreviations_keep_what_identifies(name, limit, shown):
    assert abbreviated(name, limit) == shown


NAMES = st.lists(st.text("abz_*019", min_size=1, max_size=12), min_size=1, max_size=6).map(
    ".".join
) | st.text("ab_ /:.…()+x019", max_size=60)


@given(NAMES, st.sampled_from(["", " and 7 more", " (80 times)"]), st.integers(9, 50))
def test_abbreviations_are_never_too_long(name, more, limit):
    text = name + more
    found = abbreviated(text, limit)
    assert len(found) <= limit
    assert found == text or len(text) > limit


def numbers(width):
    return table(
        ("name", "why", "size", "time"),
        [
            ("layer_" * 5 + str(at), "no room for it, here", f"{at} B", f"{at} us")
            for at in range(3)
        ],
        right=("size", "time"),
        yields=("why", "size"),
        below=("why",),
        whole=("why",),
    ).text(width=width)


def test_columns_yield_in_order_and_figures_are_never_cut():
    assert numbers(80) == numbers(None)
    assert "why" in numbers(66).splitlines()[0]
    narrow = numbers(50)
    assert "    no room for it, here" in narrow.splitlines()
    assert "why" not in narrow.splitlines()[0]
    assert "size" in narrow.splitlines()[0]
    least = numbers(24)
    assert "Not shown at this width: size." in least
    assert [line.split()[-2:] for line in least.splitlines() if line.endswith(" us")] == [
        ["0", "us"],
        ["1", "us"],
        ["2", "us"],
    ]


def test_a_table_without_room_keeps_its_figures():
    shown = table(("a name", "x"), [("n" * 40, "123456789")], right=("x",)).text(width=15)
    assert "123456789" in shown
    assert "nnnn…nnnn" in shown


LINE = "pipeline: " + ",".join(f"a-pass-{at}{{cap_mb={at}}}" for at in range(12))


@pytest.mark.parametrize("width", [30, 80])
def test_pipelines_and_sentences_fit_the_width(width):
    shown = Text((LINE, "    " + "some words, " * 12)).text(width=width).splitlines()
    assert max(map(len, shown)) <= width
    assert all(line.startswith("    ") for line in shown[1:])
    assert "".join(line.strip() for line in shown[: len(shown) // 2]).startswith(LINE[:60])
    assert Text((LINE,)).text() == LINE


def test_commands_stay_on_one_line_to_be_copied():
    command = f"Shown by: zpasses diff {'a' * 60} backward --ranks 0 1"
    assert Text((command,)).text(width=40) == command


def test_the_note_of_a_node_stands_below_its_code_where_there_is_no_room():
    line = f"{'mm_1 = mm(view_1, permute_1)':60}  # f32[64, 128] 32 KiB; gather: layers.1.w"
    assert Code((line,)).text(width=200) == line
    assert Code((line,)).text(width=76).splitlines() == [
        "mm_1 = mm(view_1, permute_1)  # f32[64, 128] 32 KiB; gather: layers.1.w"
    ]
    assert Code((line,)).text(width=50).splitlines() == [
        "mm_1 = mm(view_1, permute_1)",
        "    # f32[64, 128] 32 KiB; gather: layers.1.w",
    ]


def test_lines_of_changes_fit_the_width():
    shown = ChangeLines((("moved", "a_long_name " * 9), ("", "0/0 forward:"))).text(width=40)
    assert max(map(len, shown.splitlines())) <= 40
    assert shown.splitlines()[1].startswith("    a_long_name")
    assert "\x1b[1m0/0 forward:" in ChangeLines((("", "0/0 forward:"),)).text(True, 40)
