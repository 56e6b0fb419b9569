"""Pictures of loss curves."""

import json

import pytest
from click.testing import CliRunner

from zpasses.tools import curves


def draw(folder, reports):
    for name, losses in reports.items():
        (folder / f"{name}.json").write_text(json.dumps({"losses": losses}))
    named = [str(folder / f"{name}.json") for name in reports]
    return CliRunner().invoke(curves.main, [*named, "-o", str(folder / "curves.svg")])


def test_curves_have_their_names_and_the_same_bytes_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    reports = {"exact": [3.0, 2.0] * 10, "both-int8": [3.1, 2.0] * 10}
    drawn = []
    for _ in range(2):
        assert draw(tmp_path, reports).exit_code == 0
        drawn.append((tmp_path / "curves.svg").read_bytes())
    assert drawn[0] == drawn[1]
    assert b">both int8<" in drawn[0]


def test_points_are_means_of_steps():
    assert curves._means([1.0] * 10 + [2.0, 4.0]) == ([10, 12], [1.0, 3.0])


@pytest.mark.parametrize(
    ("other", "said"), [([1.0], "same number of steps"), ({"a": 1}, "no report of a run")]
)
def test_other_files_are_refused(tmp_path, other, said):
    pytest.importorskip("matplotlib")
    found = draw(tmp_path, {"exact": [3.0, 2.0], "other": other})
    assert found.exit_code != 0
    assert said in found.output
