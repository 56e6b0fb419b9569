"""Loss curves of `examples/train_gpt.py --json`, and what they differ by, as an SVG.

    python -m zpasses.tools.curves exact.json int8.json fp8.json -o curves.svg

The picture in docs/encoding.md is made by it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from zpasses.tools.cli.common import CommandError, errors_as_messages
from zpasses.tools.plan.plan_picture import STYLE, check_matplotlib

_MEAN_OF = 10
"""Steps of which a point is the mean."""


def curves_figure(curves: dict[str, list[float]]) -> Any:
    """Returns a matplotlib Figure: losses over steps, and what each differs by from the first.

    Args:
        curves: name -> loss of each step.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    exact = next(iter(curves.values()))
    for number, (name, losses) in enumerate(curves.items()):
        line: dict[str, Any] = {"color": f"C{number}", "linewidth": 1}
        above.plot(*_means(losses), **line, label=name)
        if number:
            apart = [loss - true for loss, true in zip(losses, exact, strict=True)]
            below.plot(*_means(apart), **line)
    above.set_ylabel("loss, nats per byte")
    below.set_ylabel(f"minus {next(iter(curves))}")
    below.set_xlabel(f"step, means of {_MEAN_OF}")
    for axes in (above, below):
        axes.grid()
    figure.legend(loc="outside upper center", ncols=len(curves), frameon=False)
    return figure


def _means(values: list[float]) -> tuple[list[int], list[float]]:
    starts = range(0, len(values), _MEAN_OF)
    cut = [values[at : at + _MEAN_OF] for at in starts]
    return [at + len(part) for at, part in zip(starts, cut, strict=True)], [
        round(sum(part) / len(part), 5) for part in cut
    ]


def _losses(path: Path) -> list[float]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["losses"]
        return [float(each) for each in found]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"{path} is no report of a run: expected what examples/train_gpt.py --json writes."
        ) from error


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "reports", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option(
    "-o",
    "--output",
    "out",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The SVG to write.",
)
@errors_as_messages
def main(reports: tuple[Path, ...], out: Path) -> None:
    """Draw the losses of runs, and what they differ by from the first. Needs matplotlib."""
    check_matplotlib("this picture")
    import matplotlib

    curves = {path.stem.replace("-", " "): _losses(path) for path in reports}
    lengths = {name: len(losses) for name, losses in curves.items()}
    if len({*lengths.values()}) > 1 or not all(lengths.values()):
        raise CommandError(f"expected runs with the same number of steps; got {lengths}.")
    with matplotlib.rc_context(STYLE):
        curves_figure(curves).savefig(out, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
