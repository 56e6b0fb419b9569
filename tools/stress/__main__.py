"""The command `python -m zpasses.tools.stress`."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import click
from tqdm import tqdm

from zpasses.errors import suggestion
from zpasses.tools.stress.cases import CaseResult, StressConfig
from zpasses.tools.stress.run import StressReport, run_suites, summary
from zpasses.tools.stress.suites import SUITES

__all__ = ["main"]

_DETAIL_CHARS = 2000


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("suites", nargs=-1, metavar="[SUITE]...")
@click.option(
    "--count",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Cases of each suite.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="The first case. The cases are SEED, SEED + 1, ...",
)
@click.option(
    "--only", multiple=True, metavar="SUITE:SEED", help="Only this case; may be repeated."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Start no case after this time.",
)
@click.option(
    "--case-limit",
    "limit",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="A case that takes longer counts as hanging.",
)
@click.option(
    "--ranks",
    default="2,3",
    show_default=True,
    metavar="N,...",
    help="Numbers of real ranks to draw from, for suites that start processes.",
)
@click.option(
    "--vote-limit",
    type=click.FloatRange(min=1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="The option agreement_timeout_s of training in the suite faults.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Cases of the suite faults at a time.",
)
@click.option(
    "--codegen",
    type=click.Choice(["eager", "inductor"]),
    default="eager",
    show_default=True,
    help="The option codegen of the suite programs.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write all results to this file.",
)
@click.pass_context
def main(
    ctx: click.Context,
    suites: tuple[str, ...],
    count: int,
    seed: int,
    only: tuple[str, ...],
    time_limit: float | None,
    limit: float,
    ranks: str,
    vote_limit: float,
    jobs: int,
    codegen: Literal["eager", "inductor"],
    json_path: Path | None,
) -> None:
    """Try to break zpasses with drawn cases.

    SUITE is graphs, faults, caches or programs; without it, all run. Each case can be
    repeated with --only. The exit status is 1 if a case is wrong, hangs or crashes.
    """
    seeds = (
        _only(only)
        if only
        else {name: range(seed, seed + count) for name in SUITES if not suites or name in suites}
    )
    if only and suites:
        raise click.UsageError("--only names its suites; omit the SUITE arguments.")
    for name in (*suites, *seeds):
        _check_suite(name)
    with tempfile.TemporaryDirectory(prefix="zpasses-stress-") as folder:
        config = StressConfig(Path(folder), _numbers(ranks), limit, vote_limit, jobs, codegen)
        total = sum(map(len, seeds.values()))
        with tqdm(total=total, unit="case", disable=None) as bar:

            def progress(result: CaseResult) -> None:
                bar.update()
                if result.is_bad:
                    bar.write(f"{result.suite}:{result.seed}: {result.outcome}", nolock=True)

            report = run_suites(SUITES, seeds, config, time_limit, progress)
    if json_path is not None:
        json_path.write_text(json.dumps(_as_json(report), indent=1), encoding="utf-8")
    click.echo(summary(report))
    for result in report.bad:
        click.echo(
            f"\n{result.outcome}: {result.suite}:{result.seed} ({result.kind})\n"
            f"{_indented(result.detail[:_DETAIL_CHARS])}\n"
            f"  repeat it: python -m zpasses.tools.stress --only {result.suite}:{result.seed}"
            f"{'' if ranks == '2,3' else f' --ranks {ranks}'}"
            f"{'' if codegen == 'eager' else f' --codegen {codegen}'}"
        )
    ctx.exit(1 if report.bad else 0)


def _only(cases: tuple[str, ...]) -> dict[str, list[int]]:
    seeds: dict[str, list[int]] = {}
    for case in cases:
        name, _, number = case.partition(":")
        if not number.isdecimal():
            raise click.UsageError(f"--only {case}: expected SUITE:SEED, such as graphs:17.")
        seeds.setdefault(name, []).append(int(number))
    return seeds


def _check_suite(name: str) -> None:
    if name not in SUITES:
        raise click.UsageError(f"there is no suite {name!r}.{suggestion(name, SUITES)}")


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.UsageError(f"--ranks {text}: expected numbers of ranks, such as 2,3.")
    return tuple(map(int, parts))


def _as_json(report: StressReport) -> dict[str, object]:
    return {
        "results": [asdict(each) for each in report.results],
        "unfinished": report.unfinished,
        "seconds": report.seconds,
    }


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


if __name__ == "__main__":
    main(prog_name="python -m zpasses.tools.stress")
