"""Runs `python -m zpasses.tools.stress` in this process."""

import contextlib
import io
from types import SimpleNamespace

from zpasses.tools.stress.__main__ import main


def stress(*arguments):
    out, both = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(both):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
    return SimpleNamespace(
        exit_code=code, stdout=out.getvalue(), output=out.getvalue() + both.getvalue()
    )
