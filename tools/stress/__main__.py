"""The command `python -m zpasses.tools.stress`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

import zpasses.tools.stress as stress
from zpasses.errors import OptionError, suggestion
from zpasses.tools.config_options import add_options, config_of
from zpasses.tools.stress.cases import CaseResult, StressConfig
from zpasses.tools.stress.suites import SUITES, StressReport, run_suites, summary

_DETAIL_CHARS = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run suites. Returns the exit code: 1 if a case is wrong, hangs or crashes."""
    parser = argparse.ArgumentParser(
        prog="python -m zpasses.tools.stress",
        description=stress.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}; or all")
    parser.add_argument("--count", type=int, default=100, help="Cases of each suite. Default: 100")
    parser.add_argument(
        "--seed", type=int, default=0, help="The cases are SEED, SEED + 1, ... Default: 0"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="SUITE:SEED",
        help="Only this case; may be repeated.",
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="Start no case after this time."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all results to FILE, too.")
    add_options(parser, StressConfig)
    options = parser.parse_args(arguments)
    try:
        seeds = _seeds(options)
        with tempfile.TemporaryDirectory(prefix="zpasses-stress-") as folder:
            config = config_of(StressConfig, vars(options), scratch=Path(folder))
            report = _run(seeds, config, options.time_limit)
    except OptionError as error:
        parser.error(str(error))
    if options.json is not None:
        shown = {**vars(report), "results": [asdict(each) for each in report.results]}
        options.json.write_text(json.dumps(shown, indent=1), encoding="utf-8")
    print(summary(report))
    for result in report.bad:
        print(f"\n{result.outcome}: {result.suite}:{result.seed} ({result.kind})")
        print(textwrap.indent(result.detail[:_DETAIL_CHARS], "  "))
        print(f"  repeat it: {parser.prog} --only {result.suite}:{result.seed}{_changed(config)}")
    return 1 if report.bad else 0


def _seeds(options: argparse.Namespace) -> dict[str, Sequence[int]]:
    """Suite -> its cases."""
    seeds: dict[str, Sequence[int]] = {
        name: range(options.seed, options.seed + options.count)
        for name in SUITES
        if name in options.suites or not options.suites
    }
    if options.only:
        if options.suites:
            raise OptionError("--only names its suites; omit the SUITE arguments.")
        seeds = {}
        for case in options.only:
            name, _, number = case.partition(":")
            if not number.isdecimal():
                raise OptionError(f"--only {case}: expected SUITE:SEED, such as graphs:17.")
            seeds[name] = [*seeds.get(name, ()), int(number)]
    for name in (*options.suites, *seeds):
        if name not in SUITES:
            raise OptionError(f"there is no suite {name!r}.{suggestion(name, SUITES)}")
    return seeds


def _run(
    seeds: dict[str, Sequence[int]], config: StressConfig, time_limit_s: float | None
) -> StressReport:
    with tqdm(total=sum(map(len, seeds.values())), unit="case", disable=None) as bar:

        def progress(result: CaseResult) -> None:
            bar.update()
            if result.is_bad:
                bar.write(f"{result.suite}:{result.seed}: {result.outcome}", nolock=True)

        return run_suites(SUITES, seeds, config, time_limit_s, progress)


def _changed(config: StressConfig) -> str:
    """The options that determine a case besides its seed, if they are not the default."""
    default = StressConfig(config.scratch)
    ranks = "" if config.ranks == default.ranks else f" --ranks {','.join(map(str, config.ranks))}"
    return ranks + ("" if config.codegen == default.codegen else f" --codegen {config.codegen}")


if __name__ == "__main__":
    sys.exit(main())
