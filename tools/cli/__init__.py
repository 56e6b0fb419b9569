"""The command line, `zpasses`: what passes did to graphs, captures of runs that are not here, the
pass that broke a run.

Exit codes: 0; 1 from `diff` when graphs differ, and from `bisect` when a pass was found; 2 when
something cannot be done, and the message says what to do."""

from zpasses.tools.cli.main import main

__all__ = ["main"]
