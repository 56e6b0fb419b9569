"""Shared parts of the commands that run a training program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from zpasses.tools.cli.common import errors_as_messages


def program_command(
    metavar: str, *options: Callable[[Any], Any], limited: str = "one run"
) -> Callable[[Callable[..., None]], click.Command]:
    """Decorator: a command that runs a program, whose words become the argument `command`. Options
    stand before it, and --timeout becomes the argument `timeout_s`.

    Args:
        metavar: the name of the program in the help text.
        options: further options.
        limited: what the time limit is of.
    """
    shared: tuple[Callable[[Any], Any], ...] = (
        click.argument("command", metavar=metavar, nargs=-1, required=True, type=click.UNPROCESSED),
        *options,
        click.option(
            "--timeout",
            "timeout_s",
            metavar="SECONDS",
            type=click.FloatRange(min=1),
            default=1800.0,
            show_default=True,
            help=f"Time limit of {limited}.",
        ),
    )
    settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}

    def decorate(function: Callable[..., None]) -> click.Command:
        run: Any = errors_as_messages(function)
        for option in reversed(shared):
            run = option(run)
        return click.command(context_settings=settings)(run)

    return decorate


def count_option(
    name: str, default: int, text: str, most: int | None = None, least: int = 1
) -> Callable[[Any], Any]:
    """An option that takes a number of at least `least`."""
    return click.option(
        name, type=click.IntRange(least, most), default=default, show_default=True, help=text
    )


warmup_option = count_option("--warmup", 3, "Optimizer steps before them.")
