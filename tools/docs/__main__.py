"""The command line of `zpasses.tools.docs`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from zpasses.tools.docs.tables import fill_regions

COMMAND = "python -m zpasses.tools.docs"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with status 1 if a page is stale.")
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=".",
    help="Folder that holds README.md and docs/; by default the current one.",
)
def main(check: bool, root: Path) -> None:
    """Write the generated tables of README.md and docs/*.md."""
    pages = [
        page for page in (root / "README.md", *sorted(root.glob("docs/*.md"))) if page.exists()
    ]
    if not pages:
        raise click.UsageError(f"{root.absolute()} has neither README.md nor docs/*.md.")
    stale = {}
    for page in pages:
        text = page.read_text()
        try:
            filled = fill_regions(text)
        except ValueError as error:
            raise click.ClickException(f"{page.relative_to(root)}: {error}") from error
        if filled != text:
            stale[page] = filled
    for page, filled in stale.items():
        if check:
            click.echo(f"{page.relative_to(root)} is stale. Run: {COMMAND}", err=True)
        else:
            page.write_text(filled)
            click.echo(f"wrote {page.relative_to(root)}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
