"""What the commands share: arguments, output, and errors as messages."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from zpasses.errors import OptionError, ZpassesError
from zpasses.inspect.view import View

__all__ = [
    "CommandError",
    "Group",
    "as_json",
    "dump_argument",
    "explained",
    "graph_argument",
    "picking",
    "show",
    "write",
]

Command = TypeVar("Command", bound=Callable[..., Any])


class CommandError(click.ClickException):
    """Something cannot be done; the process ends with status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"zpasses: {self.format_message()}", file=file, err=file is None)


class Group(click.Group):
    """Commands in the order in which they are declared; one that is not there is answered with the
    nearest name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        from zpasses.errors import nearest

        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise CommandError(f"there is no command {args[0]!r}.{nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def explained(command: Command) -> Command:
    """Errors of zpasses as messages."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (ZpassesError, OptionError) as error:
            raise CommandError(_printable(str(error))) from error
        except BrokenPipeError:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # `| head` has seen enough
            return None

    return wrapped  # type: ignore[return-value]


def _printable(text: str) -> str:
    from zpasses.inspect.view import printable

    return printable(text)


dump_argument = click.argument("dump", metavar="DIR", type=click.Path(path_type=Path))
graph_argument = click.argument("graph", metavar="[GRAPH]", required=False)
as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print plain values instead of text."
)


def picking(command: Command) -> Command:
    """Adds --rank and --compile."""
    for option in (
        click.option(
            "--compile",
            "compile_name",
            metavar="NAME",
            help='Only this compile, by Dynamo\'s id ("0/0") or by its folder.',
        ),
        click.option(
            "--rank",
            type=click.IntRange(min=0),
            help="Whose graphs; by default the lowest rank that was dumped.",
        ),
    ):
        command = option(command)
    return command


def show(view: View, as_json: bool) -> None:
    """Print a page, or its values."""
    if as_json:
        click.echo(json.dumps(view.data, indent=1))
    else:
        click.echo(view.text(color=_colored()), color=True)


def _colored() -> bool:
    """On a terminal, unless NO_COLOR is set (no-color.org) or the terminal cannot."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def write(path: Path, text: str) -> None:
    """Write a file; "-" is standard output.

    Raises:
        CommandError: where it cannot be written.
    """
    if str(path) == "-":
        click.echo(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(
            f"cannot write {path}: {error.strerror}; name a file in a folder that exists with -o."
        ) from error
