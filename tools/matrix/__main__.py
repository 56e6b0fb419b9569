"""The command line of `zpasses.tools.matrix`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import zpasses.tools.matrix as matrix
from zpasses.tools.matrix.environments import (
    CHECKOUT,
    EnvironmentFailedError,
    Pair,
    make_environment,
)
from zpasses.tools.matrix.results import Result, read_results, table
from zpasses.tools.programs import run_limited

__all__ = ["main"]

QUICK = ("-n", "2", "--dist", "worksteal", "-m", "not slow", "--hypothesis-profile", "quick")
"""Arguments of pytest in `make test`."""

_FAILED_TESTS = "ended with status 1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the matrix. Returns the exit code: 1 if a pair has a failed test or did not run."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:at])
    folder = options.folder.absolute()
    pairs = [Pair(torch, python) for torch in options.torch for python in options.python]
    results = []
    for pair in pairs:
        print(f"{pair.folder}: {folder / pair.folder}", flush=True)
        results.append(_run(pair, folder / pair.folder, given[at + 1 :], options.timeout))
    print(table(results))
    return 0 if all(each.is_green for each in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zpasses.tools.matrix",
        description=matrix.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument(
        "--torch", nargs="+", required=True, metavar="VERSION", help="such as 2.15 or 2.15.0"
    )
    parser.add_argument(
        "--python", nargs="+", default=[own], metavar="VERSION", help=f"default: {own}"
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument(
        "--folder",
        type=Path,
        default=cache / "zpasses" / "matrix",
        help="for the environments, 2 GB each, and the logs of pytest; default: %(default)s",
    )
    parser.add_argument(
        "--timeout", type=float, default=4 * 3600, metavar="S", help="for the tests of one pair"
    )
    return parser


def _run(pair: Pair, folder: Path, arguments: Sequence[str], timeout_s: float) -> Result:
    """Runs the tests of one pair to their end."""
    try:
        python = make_environment(pair, folder)
    except EnvironmentFailedError as error:
        return Result(pair, problem=str(error))
    report, log = folder / "report.xml", folder / "pytest.log"
    report.unlink(missing_ok=True)
    named = ("-o", "junit_family=xunit1", f"--junitxml={report}")  # with files of tests
    command = [python, "-m", "pytest", *QUICK, *named, *arguments]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    problem, _ = run_limited(command, variables, log, timeout_s, folder=CHECKOUT)
    if problem == _FAILED_TESTS and report.exists():
        problem = None
    return read_results(pair, report, problem and f"pytest {problem}; see {log}")


if __name__ == "__main__":
    sys.exit(main())
