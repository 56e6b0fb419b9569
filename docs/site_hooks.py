"""Hooks of `mkdocs build`: README.md and CONTRIBUTING.md become pages, and links fit the site.

On the site, a link to a file of docs/ leads to its page and has the page's title. A link to any
other file of the repository becomes plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Files at the root of the repository, and the pages of the site that show them."""

_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#]*)(#[^()\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs with the files of docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    uri = page.file.src_uri
    folder = "" if uri in PAGES.values() else f"docs/{uri}".rpartition("/")[0]
    titles = dict(_titles(config.nav))

    def mended(link: re.Match[str]) -> str:
        image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if not target or ":" in target:
            return link[0]
        path = normpath(f"{folder}/{target}" if folder else target)
        if path not in PAGES and not path.startswith("docs/"):
            return text
        to = PAGES.get(path) or path.removeprefix("docs/")
        shown = titles.get(to, text) if text.endswith(".md") else text
        return f"{image}[{shown}]({'../' * uri.count('/')}{to}{anchor})"

    return _outside_fences(markdown, lambda text: _LINK.sub(mended, text))


def _titles(entry: Any) -> list[tuple[str, str]]:
    """(page, title) of every page in a part of mkdocs' nav."""
    if isinstance(entry, dict):
        here = [(page, title) for title, page in entry.items() if isinstance(page, str)]
        return here + [
            pair
            for below in entry.values()
            if not isinstance(below, str)
            for pair in _titles(below)
        ]
    return [pair for below in entry for pair in _titles(below)]


def _outside_fences(markdown: str, change: Any) -> str:
    """The text with `change` applied to everything but fenced code."""
    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(markdown[at:])])
