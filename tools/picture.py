"""One view of a dump's report page as a PNG, drawn by Chromium without a window.

    python -m zpasses.tools.picture build/demo -o report.png
    python -m zpasses.tools.picture build/demo --view diff --graph forward -o diff.png

The picture in README.md is the first of these.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote

import click

from zpasses.inspect import Inspection
from zpasses.inspect import open as open_dump
from zpasses.inspect.find import select_graphs, step_after
from zpasses.tools.cli.common import (
    CommandError,
    dump_argument,
    errors_as_messages,
    rank_and_compile_options,
)

VIEWS = ("overview", "diff", "memory", "timeline", "collectives", "listing", "source")

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--virtual-time-budget=5000",
)
_TIMEOUT_S = 120.0


def find_browser() -> str | None:
    """Path of a Chromium, or None."""
    return next((found for name in _BROWSERS if (found := shutil.which(name))), None)


def _draw_page(address: str, out: Path, size: tuple[int, int], folder: Path) -> None:
    """Write what a browser shows at an address to the PNG `out`.

    Args:
        address: of the page, such as `file:///report.html`.
        out: the file to write.
        size: width and height in pixels.
        folder: an existing folder for the browser's own files.

    Raises:
        CommandError: when there is no Chromium, or it draws nothing.
    """
    browser = find_browser()
    if browser is None:
        names = ", ".join(_BROWSERS)
        raise CommandError(
            f"found none of {names}; install Chromium (Debian: apt install chromium)."
        )
    drawn = folder / "page.png"
    command = [
        browser,
        *_FLAGS,
        f"--user-data-dir={folder / 'browser'}",
        f"--window-size={size[0]},{size[1]}",
        f"--screenshot={drawn}",
        address,
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{browser} drew nothing within {_TIMEOUT_S:g} s.") from error
    if not drawn.exists():
        raise CommandError(f"{browser} drew nothing. The end of its output:\n{done.stderr[-1000:]}")
    try:
        shutil.copyfile(drawn, out)
    except OSError as error:
        raise CommandError(
            f"cannot write {out}: {error.strerror}; name a file in a folder that exists with -o."
        ) from error


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@dump_argument
@click.option(
    "-o",
    "--output",
    "out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    required=True,
    help="The PNG to write.",
)
@click.option("--graph", default="backward", show_default=True, help="The graph to show.")
@click.option(
    "--pass",
    "after",
    metavar="PASS",
    default="schedule",
    show_default=True,
    help="Show the graph after this pass.",
)
@click.option(
    "--view",
    type=click.Choice(VIEWS),
    default="memory",
    show_default=True,
    help="The view to show.",
)
@click.option(
    "--width", type=click.IntRange(640, 4096), default=1100, show_default=True, help="Pixels."
)
@click.option(
    "--height", type=click.IntRange(400, 4096), default=720, show_default=True, help="Pixels."
)
@rank_and_compile_options
@errors_as_messages
def main(
    dump: Path,
    out: Path,
    graph: str,
    after: str,
    view: str,
    width: int,
    height: int,
    rank: int | None,
    compile_name: str | None,
) -> None:
    """Draw one view of a dump's report page as a PNG. Needs Chromium."""
    opened = open_dump(dump).dump
    picked = select_graphs(opened, graph, rank=rank, compile_name=compile_name)[0]
    step = step_after(picked, after)
    address = f"#0/{quote(picked.graph.name, safe='')}/{step.index}/{view}/"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        Inspection(opened, rank, picked.compile.folder).write_html(page)
        _draw_page(page.as_uri() + address, out.absolute(), (width, height), Path(folder))


if __name__ == "__main__":
    main()
