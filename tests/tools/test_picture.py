"""Pictures of report pages, and the one that README.md shows."""

import struct
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.zpasses.inspect.real import real_dump
from zpasses.pipeline.pipeline import catalogue
from zpasses.tools import picture

COMMITTED = Path(__file__).parents[2] / "docs" / "images" / "report.png"
needs_browser = pytest.mark.skipif(
    picture.find_browser() is None, reason="needs Chromium (Debian: apt install chromium)"
)


def size_of(png):
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def draw(*arguments):
    return CliRunner().invoke(picture.main, [str(each) for each in arguments])


def test_picture_of_the_readme_is_small():
    width, height = size_of(COMMITTED)
    assert width <= 1280
    assert height <= width
    assert COMMITTED.stat().st_size < 300_000


def test_the_default_pass_runs_in_the_demo():
    (default,) = [each.default for each in picture.main.params if each.name == "after"]
    assert default in [each.name for each in catalogue()["zero3"]]


@pytest.mark.slow(quick="test_every_view_of_a_real_dump_opens")
@needs_browser
@pytest.mark.parametrize("view", ["memory", "diff"])
def test_view_is_drawn_in_the_size_asked_for(tmp_path, view):
    out = tmp_path / "view.png"
    size = ("--width", 900, "--height", 500)
    ran = draw(real_dump()[0], "-o", out, "--view", view, "--pass", "schedule", *size)
    assert ran.exit_code == 0, ran.output
    assert size_of(out) == (900, 500)
    assert out.stat().st_size > 10_000  # an empty page has 5 kB


@pytest.mark.slow(quick="test_every_view_of_a_real_dump_opens")
@needs_browser
def test_file_that_cannot_be_written_is_named(tmp_path):
    ran = draw(real_dump()[0], "-o", tmp_path / "none" / "view.png", "--pass", "schedule")
    assert ran.exit_code == 2
    assert f"cannot write {tmp_path / 'none' / 'view.png'}: No such file" in ran.output


def test_unknown_pass_is_an_error_with_the_known_ones(tmp_path):
    ran = draw(real_dump()[0], "-o", tmp_path / "view.png", "--pass", "schedul")
    assert ran.exit_code == 2
    assert "no pass 'schedul' ran on graph" in ran.output
    assert "schedule" in ran.output


def test_missing_browser_is_an_error_that_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(picture, "_BROWSERS", ("no-such-browser",))
    ran = draw(real_dump()[0], "-o", tmp_path / "view.png", "--pass", "schedule")
    assert ran.exit_code == 2
    assert "found none of no-such-browser; install Chromium" in ran.output
