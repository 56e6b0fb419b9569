"""Shared parts of the commands: arguments, output, and error messages."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from zpasses.errors import OptionError, ZpassesError, suggestion
from zpasses.inspect import Inspection, Limits
from zpasses.inspect import open as open_dump
from zpasses.inspect.escape import printable
from zpasses.inspect.json_text import json_text
from zpasses.inspect.view import View
from zpasses.tools.cli.completion import complete_compile, complete_graph

Command = TypeVar("Command", bound=Callable[..., Any])


class CommandError(click.ClickException):
    """A command cannot be carried out. The process ends with status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"zpasses: {self.format_message()}", file=file, err=file is None)


class CommandGroup(click.Group):
    """Lists commands in the order of their declaration. For an unknown command, it suggests a
    similar name.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise CommandError(
                f"there is no command {args[0]!r}.{suggestion(args[0], self.commands)}"
            )
        return super().resolve_command(ctx, args)


def errors_as_messages(command: Command) -> Command:
    """Decorator: report errors of zpasses as messages, without a traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (ZpassesError, OptionError) as error:
            lines = printable(str(error)).split("\n")
            raise CommandError("\n    ".join(lines)) from error
        except BrokenPipeError:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # the reader, such as `head`, has closed the pipe
            return None

    return wrapped  # type: ignore[return-value]


dump_argument = click.argument("dump", metavar="DIR", type=click.Path(path_type=Path))
graph_argument = click.argument(
    "graph", metavar="[GRAPH]", required=False, shell_complete=complete_graph
)
as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print plain values instead of text."
)


def trusted_option(command: Command) -> Command:
    """Decorator: add --trusted, which becomes the argument `limits`."""
    return click.option(
        "--trusted",
        "limits",
        is_flag=True,
        callback=lambda ctx, param, given: Limits.trusted() if given else None,
        help="The dump is your own: read it, however much time and memory it takes.",
    )(command)


trace_option = click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A trace of torch.profiler, .json or .json.gz: shows measured times beside the predicted.",
)


def rank_and_compile_options(command: Command) -> Command:
    """Decorator: add --rank and --compile."""
    for option in (
        click.option(
            "--compile",
            "compile_name",
            metavar="NAME",
            shell_complete=complete_compile,
            help='Only this compile, by Dynamo\'s id ("0/0") or by its folder.',
        ),
        click.option(
            "--rank",
            type=click.IntRange(min=0),
            help="Rank to show. Default: the lowest rank in the dump.",
        ),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class DumpArguments:
    """The dump that a command line names, and the part of it to show."""

    dump: Path
    rank: int | None
    compile_name: str | None
    limits: Limits | None

    def open(self, dump: Path | None = None, *, rank: int | None = None) -> Inspection:
        """Open the dump, or another one.

        Args:
            dump: None for the dump of the command line.
            rank: None for the rank of the command line.
        """
        return open_dump(
            self.dump if dump is None else dump,
            rank=self.rank if rank is None else rank,
            compile_name=self.compile_name,
            limits=self.limits,
        )


def dump_command(
    name: str | None = None,
    *,
    picks: Collection[str] = ("rank", "compile_name"),
    prints: bool = True,
    status: Callable[[View], int] = lambda view: 0,
) -> Callable[[Callable[..., View | None]], click.Command]:
    """Decorator: a command that reads a dump. Its function takes `DumpArguments`, and returns the
    page to print.

    Args:
        name: of the command; None takes that of the function.
        picks: which of --rank and --compile the command has.
        prints: whether the command prints a page, also as JSON. Otherwise, the function returns
            None.
        status: the exit status for a page.
    """
    shared = click.command()(
        dump_argument(rank_and_compile_options(trusted_option(as_json(lambda: None))))
    )
    names = ("dump", *picks, "limits", *(["as_json"] if prints else []))
    first, *last = [param for param in shared.params if param.name in names]

    def decorate(function: Callable[..., View | None]) -> click.Command:
        @errors_as_messages
        @functools.wraps(function)
        def run(
            dump: Path,
            limits: Limits | None,
            rank: int | None = None,
            compile_name: str | None = None,
            as_json: bool = False,
            **given: Any,
        ) -> None:
            view = function(DumpArguments(dump, rank, compile_name, limits), **given)
            if view is not None:
                print_view(view, as_json)
                click.get_current_context().exit(status(view))

        command = click.command(name)(run)
        command.params = [first, *command.params, *last]
        return command

    return decorate


def print_view(view: View, as_json: bool) -> None:
    """Print a page as text, or its values as JSON."""
    values = versioned(view.data) if as_json else None
    text = json_text(values, _JSON_LEVELS + 1) if as_json else view.text(_colored(), _width())
    click.echo(text, color=True)


JSON_SCHEMA = 2
"""Version of the values that --json prints. It rises if a value is removed or gets another meaning;
new values do not raise it."""


def versioned(data: Any) -> dict[str, Any]:
    """Plain values with the version of their schema. A list is that of the graphs of a page."""
    return {"schema": JSON_SCHEMA, **(data if isinstance(data, dict) else {"graphs": data})}


def _width() -> int | None:
    """Columns of the terminal; None if the output is no terminal, so that nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


_JSON_LEVELS = 3
"""Nesting depth of lines in JSON output: a node is one line."""


def _colored() -> bool:
    """Whether to print colors: on a terminal that supports them, unless NO_COLOR is set
    (no-color.org).
    """
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def write_output(path: Path, text: str) -> None:
    """Write text to a file, or to standard output for "-".

    Raises:
        CommandError: if the file cannot be written.
    """
    if str(path) == "-":
        click.echo(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if is_full(error) and path.is_file():
            path.unlink()  # half a page is none
        how = (
            "free some space, or name a file elsewhere with -o"
            if is_full(error)
            else "name a file in a folder that exists with -o"
        )
        raise CommandError(f"cannot write {path}: {error.strerror}; {how}.") from error


def is_full(error: OSError) -> bool:
    """Whether a disk, a quota or the largest size of a file is exhausted."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
