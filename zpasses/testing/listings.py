"""Listings of graphs in text files next to the tests, and the comparison with them.

The fixture `listing_snapshot` is made of this. This module loads no torch.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "listings"
"""The folder next to a test module that holds a folder of listings per module."""

_LABEL = re.compile(r"[\w-]+")


def file_stem(names: Iterable[str], parameters: str) -> str:
    """The name of a test's listings, without label and ending.

    Args:
        names: the names of the classes around the test, and of the test.
        parameters: the id of its parameters; "" for none.
    """
    suffix = f"[{re.sub(r'[^A-Za-z0-9_=+-]', '_', parameters)}]" if parameters else ""
    return ".".join(names) + suffix


def owner_of(path: Path, stems: Collection[str]) -> str | None:
    """The stem, out of `stems`, of the test that a file belongs to."""
    name = path.name.removesuffix(".txt")
    return next((each for each in (name, name.rpartition(".")[0]) if each in stems), None)


def stale_files(folder: Path, stems: Collection[str]) -> list[Path]:
    """The listings in a module's folder that belong to none of its tests with these stems."""
    return [path for path in sorted(folder.glob("*.txt")) if owner_of(path, stems) is None]


@dataclass
class Snapshots:
    """The listings of one test."""

    folder: Path
    stem: str
    update: bool
    command: str
    """The command that rewrites the listings of this test."""
    used: set[Path] = field(default_factory=set)
    written: list[Path] = field(default_factory=list)

    def compare(self, text: str, label: str) -> None:
        """Compare a text with its file, or write the file.

        Raises:
            AssertionError: if the file is missing or differs.
            ValueError: for a label that is not made of letters, digits, "_" and "-", or was used
                before in this test.
        """
        if label and not _LABEL.fullmatch(label):
            raise ValueError(
                f"listing_snapshot: got the label {label!r}; expected letters, digits, '_' and '-'."
            )
        path = self.folder / f"{self.stem}{'.' * bool(label)}{label}.txt"
        if path in self.used:
            raise ValueError(
                f"listing_snapshot: this test has used {_shown(path)} before; give each listing a "
                "label of its own: listing_snapshot(graph, 'after')."
            )
        self.used.add(path)
        text = text.rstrip("\n") + "\n"
        expected = path.read_text(encoding="utf-8") if path.exists() else None
        if text == expected:
            return
        if self.update:
            _write(path, text)
            self.written.append(path)
        elif expected is None:
            raise AssertionError(
                f"the listing {_shown(path)} does not exist. This command writes it:\n\n"
                f"    {self.command}\n\nIt would hold:\n\n{text}"
            )
        else:
            raise AssertionError(
                f"the graph differs from {_shown(path)}. If the graph is right, this command "
                f"rewrites the listing:\n\n    {self.command}\n\n{_difference(expected, text)}"
            )

    def finish(self) -> None:
        """Called after a test that passed: remove or report its listings that it did not use.

        Raises:
            AssertionError: if there are any, unless listings are updated.
        """
        mine = [
            path for path in self.folder.glob("*.txt") if owner_of(path, {self.stem}) is not None
        ]
        unused = sorted(set(mine) - self.used)
        if self.update:
            remove(unused)
        elif unused:
            raise AssertionError(unused_message(unused, self.command))


def unused_message(paths: Iterable[Path], command: str) -> str:
    """Says that no test uses some files, and which command removes them."""
    names = "\n".join(f"    {_shown(path)}" for path in paths)
    return f"no test uses these listings:\n{names}\nThis command removes them:\n    {command}"


def remove(paths: Iterable[Path]) -> None:
    """Remove files, and their folder when it is empty."""
    for path in paths:
        path.unlink(missing_ok=True)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()


def _write(path: Path, text: str) -> None:
    """Write a whole file or none: other processes may read or write next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, delete=False, suffix=".new"
    ) as new:
        new.write(text)
    Path(new.name).chmod(0o644)
    os.replace(new.name, path)


def _shown(path: Path) -> str:
    return os.path.relpath(path)


def _difference(expected: str, text: str) -> str:
    lines = difflib.unified_diff(
        expected.splitlines(), text.splitlines(), "listing", "graph", lineterm=""
    )
    return "\n".join(lines)
