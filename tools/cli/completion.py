"""Shell completion of commands and options, by click."""

from __future__ import annotations

import click

__all__ = ["completion"]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands and options in a shell.

    For bash, add `eval "$(zpasses completion bash)"` to ~/.bashrc. For zsh, add the same line with
    zsh to ~/.zshrc. For fish, run `zpasses completion fish >
    ~/.config/fish/completions/zpasses.fish`.
    """
    from click.shell_completion import get_completion_class

    root = ctx.find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(root, {}, "zpasses", "_ZPASSES_COMPLETE").source())
