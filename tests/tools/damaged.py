"""Commands on damaged files."""

import traceback

from click.testing import CliRunner

from zpasses.tools.cli.main import cli


def run_all(commands):
    """Runs commands of `zpasses`, of which none may raise. Returns how many refused a file."""
    refused = 0
    for command in commands:
        done = CliRunner().invoke(cli, command)
        raised = "".join(traceback.format_exception(*done.exc_info)) if done.exc_info else ""
        assert isinstance(done.exception, SystemExit | None), (command, raised)
        assert done.exit_code in (0, 1, 2), command
        refused += done.exit_code == 2
    return refused
