"""The documentation as a site: it builds without warnings, is complete, and needs no network."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from zpasses.tools.picture import find_browser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
API = [path.stem for path in (DOCS / "api").glob("*.md")]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs (pip install -e '.[docs]')"
)


class Page(HTMLParser):
    """Addresses that a page mentions, and the anchors that it has."""

    def __init__(self, path):
        super().__init__()
        self.addresses, self.anchors = [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src", "action", "poster", "data") and value:
                self.addresses.append(value)
            elif name == "srcset":
                self.addresses += [part.split()[0] for part in value.split(",")]
            elif name == "id":
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_document_is_in_the_navigation():
    from mkdocs.config import load_config

    def paths(entry):
        if isinstance(entry, str):
            return [entry]
        below = entry.values() if isinstance(entry, dict) else entry
        return [path for each in below for path in paths(each)]

    listed = paths(load_config(str(ROOT / "mkdocs.yml")).nav)
    documents = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted({*documents, "index.md", "contributing.md"})


def test_home_page_is_the_readme(site):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    headings = [text.replace("`", "") for text in re.findall(r"^## (.+)$", readme, re.MULTILINE)]
    page = (site / "index.html").read_text(encoding="utf-8")
    shown = re.findall(r"<h2 id=.*?>(.*?)<a class=\"headerlink\"", page)
    assert [unescape(re.sub(r"<.*?>", "", text)) for text in shown] == headings


def test_no_page_refers_to_another_host(site, pages):
    for path, page in pages.items():
        outside = [each for each in page.addresses if urlsplit(each).netloc]
        assert not outside, f"{path.relative_to(site)}: {outside}"
    for path in site.rglob("*.css"):
        outside = re.findall(r"(?:@import|url\()[^);]*//[^);]*", path.read_text(encoding="utf-8"))
        assert not outside, f"{path.relative_to(site)}: {outside}"


def test_links_and_anchors_lead_somewhere(site, pages):
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its addresses start at the root of a server
        for address in page.addresses:
            parts = urlsplit(address)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path.relative_to(site)}: {address}"
            if parts.fragment and target in pages and not parts.fragment.startswith("__"):
                anchors = pages[target].anchors
                assert unquote(parts.fragment) in anchors, f"{path.relative_to(site)}: {address}"


def test_api_reference_has_every_public_name(site, pages):
    reference = [page for path, page in pages.items() if path.parent == site / "api"]
    documented = [found for page in reference for each in page.anchors if (found := named(each))]
    names = ("zpasses", *(f"zpasses.{each}" for each in API if each != "zpasses"))
    modules = [importlib.import_module(each) for each in names]
    for module in modules:
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not name.startswith("_") and value not in modules:
                assert any(value is each for each in documented), f"{module.__name__}.{name}"


def named(anchor):
    """What an entry of the API reference describes; None for a member of a class."""
    module, _, name = anchor.rpartition(".")
    if module.partition(".")[0] != "zpasses":
        return None
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:  # its parent is a module that is not a package
        return None
    return getattr(importlib.import_module(module), name, None)


def test_sections_of_docstrings_are_rendered(site):
    text = (site / "api" / "zpasses.html").read_text(encoding="utf-8")
    for section in ("Parameters:", "Raises:"):
        assert section in text
    assert "Args:" not in text


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium (Debian: apt install chromium)")
def test_search_works_without_a_server(site, tmp_path):
    flags = "headless no-sandbox disable-gpu disable-dev-shm-usage disable-background-networking"
    flags += f" no-first-run virtual-time-budget=20000 dump-dom user-data-dir={tmp_path}/browser"
    page = f"{(site / 'index.html').as_uri()}?q=coalesce_grad_reduction"
    command = [find_browser(), *(f"--{each}" for each in flags.split()), page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert "accumulation.html" in "".join(
        re.findall(r'class="md-search-result__link".*', done.stdout)
    )
