"""Tests of folding figures by module."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpasses.inspect.modules import fold_modules, modules_text, template


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("layers.3.mlp.up", "layers.*.mlp.up"),
        ("layers.3", "layers.*"),
        ("3", "*"),
        ("blocks.3.mlp.0", "blocks.*.mlp.0"),
        ("layers.3.experts.12.up", "layers.*.experts.*.up"),
        ("model.norm2", "model.norm2"),
        ("", ""),
    ],
)
def test_numbers_of_layers_are_folded_and_parts_of_a_layer_are_not(module, expected):
    assert template(module) == expected


def test_a_layer_that_differs_is_named():
    figures = {f"layers.{at}.mlp": 100.0 for at in range(8)} | {"layers.7.mlp": 160.0, "head": 5.0}
    layers, head = fold_modules(figures)
    assert (layers.name, len(layers.members), layers.total) == ("layers.*.mlp", 8, 860.0)
    assert (layers.least, layers.most, layers.odd) == (100.0, 160.0, ("layers.7.mlp",))
    assert (head.name, head.odd) == ("head", ())


def test_a_single_layer_keeps_its_number():
    assert [each.name for each in fold_modules({"layers.3.mlp": 1.0})] == ["layers.3.mlp"]


def test_modules_of_a_bucket_are_one_text():
    names = [f"layers.{at}.mlp" for at in range(80)] + ["norm", "head"]
    assert modules_text(names) == "layers.*.mlp (80 times) and 2 more"


@given(
    st.dictionaries(
        st.lists(st.sampled_from(["layers", "0", "1", "mlp", "2"]), min_size=1, max_size=4).map(
            ".".join
        ),
        st.floats(0, 1e9),
    )
)
def test_folding_loses_no_module_and_no_bytes(figures):
    folded = fold_modules(figures)
    members = {name: value for each in folded for name, value in each.members.items()}
    assert members == figures
    assert sum(each.total for each in folded) == pytest.approx(sum(figures.values()))
