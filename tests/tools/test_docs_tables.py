"""Generated tables in the documentation: they are current, and a change of the code shows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner

from zpasses import Options, Pass, Target
from zpasses.pipeline.pipeline import catalogue
from zpasses.tools.docs import tables
from zpasses.tools.docs.__main__ import main
from zpasses.tools.docs.fields import FieldDoc, describe_fields, first_sentence
from zpasses.tools.docs.tables import fill_regions

ROOT = Path(__file__).parents[2]

PAGE = """# Options

Text before.

<!-- generated: options -->
stale
<!-- end -->

Text after.
"""


@dataclass(frozen=True)
class Sample:
    """A dataclass to describe."""

    size: int
    """Rows of the result. More about rows."""
    mode: Literal["a", "b"] | None = None
    """Either `a`
    or `b`."""
    names: list[str] = field(default_factory=list)
    made: int = field(default=0, init=False)


@dataclass(frozen=True)
class OtherOptions(Options):
    """The options with another default."""

    backwards_per_step: int = 2
    """Backwards of an optimizer step."""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "options.md").write_text(PAGE)
    return tmp_path


def run(root, *arguments):
    return CliRunner().invoke(main, ["--root", str(root), *arguments])


# --- the command -------------------------------------------------------------------------------------  # noqa: E501
def test_pages_of_this_repository_are_current():
    done = run(ROOT, "--check")
    assert done.exit_code == 0, done.output


def test_check_names_the_stale_page_and_the_command_that_mends_it(root):
    done = run(root, "--check")
    assert done.exit_code == 1
    assert done.output == "docs/options.md is stale. Run: python -m zpasses.tools.docs\n"
    assert (root / "docs" / "options.md").read_text() == PAGE


def test_writing_mends_the_page_and_leaves_its_prose(root):
    done = run(root)
    assert (done.exit_code, done.output) == (0, "wrote docs/options.md\n")
    text = (root / "docs" / "options.md").read_text()
    assert text.startswith(PAGE.partition("stale")[0])
    assert text.endswith(PAGE.partition("stale")[2])
    assert "| `zero_stage`" in text
    assert (run(root, "--check").exit_code, run(root).output) == (0, "")


def test_a_changed_field_makes_the_page_stale(root, monkeypatch):
    run(root)
    monkeypatch.setattr(tables, "Options", OtherOptions)
    assert run(root, "--check").exit_code == 1


def test_a_region_that_cannot_be_filled_is_an_error(root):
    begin, end = "<!-- generated: options -->\n", "<!-- end -->\n"
    other = begin.replace("options", "passes")
    for text, message in (
        (
            begin.replace("options", "optons") + end,
            "nothing generates 'optons'. Did you mean \"opt",
        ),
        (begin, "docs/options.md: region 'options' has no '<!-- end -->'"),
        (begin + other + end, "docs/options.md: region 'options' has no '<!-- end -->'"),
    ):
        (root / "docs" / "options.md").write_text(text)
        done = run(root, "--check")
        assert done.exit_code == 1
        assert message in done.output


def test_a_folder_without_pages_is_an_error(tmp_path):
    done = run(tmp_path)
    assert done.exit_code == 2
    assert "has neither README.md nor docs/*.md" in done.output


def test_a_page_without_regions_stays_as_it_is():
    assert (
        fill_regions("# Title\n\n`<!-- generated: x -->` in prose\n")
        == "# Title\n\n`<!-- generated: x -->` in prose\n"
    )


# --- fields ------------------------------------------------------------------------------------------  # noqa: E501
def test_fields_have_type_default_and_the_docstring_below_them():
    assert describe_fields(Sample) == (
        FieldDoc("size", "int", dataclasses.MISSING, "Rows of the result. More about rows."),
        FieldDoc("mode", "'a' or 'b' or none", None, "Either `a` or `b`."),
        FieldDoc("names", "list", [], ""),
    )


def test_the_first_sentence_of_a_docstring():
    assert first_sentence("One. Two.") == "One"
    assert first_sentence("One\nline.") == "One line"
    dotted = "Takes 1.5 MiB, e.g. `x`, or zpasses.Pass"
    assert first_sentence(f"{dotted}. More.") == dotted
    assert first_sentence("") == ""


def test_cells_escape_what_would_end_them():
    assert "a \\| b" in tables._table(("x",), [("a | b",)])


def test_every_field_has_a_docstring():
    for cls in (Options, Target, *catalogue().values()):
        if isinstance(cls, type):
            fields = describe_fields(cls)
            missing = [each.name for each in fields if not each.doc and each.name != "name"]
            assert not missing, f"{cls}: {missing}"
            assert not issubclass(cls, Pass) or cls.__doc__, cls


def test_passes_of_other_packages_stay_out_of_the_pages(monkeypatch):
    class Foreign(Pass):
        name = "foreign"

    monkeypatch.setattr(tables, "catalogue", lambda: {**catalogue(), "foreign": Foreign})
    assert "foreign" not in tables.generate("passes")
    assert "`schedule" in tables.generate("passes")
