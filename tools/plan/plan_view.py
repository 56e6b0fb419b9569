"""What `zpasses plan` prints of the plans of a step. This file loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zpasses.inspect.units import bytes_text, time_text
from zpasses.inspect.view import Text, View, table, text_of
from zpasses.tools.plan.plan_table import DeviceUse, GraphFigures, PlanPoint, PlanTable

_LONGEST_LEGEND = 110


Point = TypeVar("Point")


@dataclass(frozen=True)
class Column(Generic[Point]):
    """What a table says of each plan, or of each mesh."""

    name: str
    cell: Callable[[Point], str]
    legend: str = ""
    shown: bool = True


def _of_device(cell: Callable[[DeviceUse], str]) -> Callable[[PlanPoint], str]:
    return lambda point: "" if point.device is None else cell(point.device)


TIMES: tuple[Column[PlanPoint], ...] = (
    Column(
        "step",
        lambda point: time_text(point.total_us),
        "predicted mean duration of a forward and its backward.",
    ),
    Column(
        "exposed",
        lambda point: time_text(point.exposed_us),
        "its part in which only collectives run.",
    ),
    Column(
        "bound",
        lambda point: time_text(point.bound_us),
        "what no schedule of the same collectives can beat.",
    ),
)
PEAK: Column[PlanPoint] = Column(
    "peak", lambda point: bytes_text(point.peak_bytes), "memory above what rests between steps."
)
COLLECTIVES: Column[PlanPoint] = Column("collectives", lambda point: str(point.collectives))
DEVICE: tuple[Column[PlanPoint], ...] = (
    Column(
        "rests",
        _of_device(lambda use: bytes_text(use.resting_bytes)),
        "shards, gradients and the states that stay.",
    ),
    Column("states out", _of_device(lambda use: bytes_text(use.states_on_host))),
    Column(
        "total",
        _of_device(lambda use: f"{bytes_text(use.total_bytes)}{'' if use.fits else ', too much'}"),
        "with the peak, and buckets of states in flight.",
    ),
    Column(
        "with optimizer",
        lambda point: "" if point.device is None else time_text(point.with_optimizer_us),
        "step, and that of the optimizer, by what it reads and writes, or by the copies of the "
        "states that are out.",
    ),
)


def _columns(found: PlanTable) -> list[Column[PlanPoint]]:
    one_graph, there = found.blocks is None, found.resting.params_on_host
    moved = any(each.host_bytes for each in found.plans)
    columns: tuple[Column[PlanPoint], ...] = (
        Column("memory_budget", lambda point: point.budget or ""),
        Column(
            "ahead",
            lambda point: "" if point.ahead is None else str(point.ahead),
            "for how many graphs after the one that computes gathers have started.",
            not one_graph,
        ),
        *TIMES,
        Column(
            "least",
            lambda point: "" if point.least_us is None else time_text(point.least_us),
            "what no plan within the budget can beat, whatever it keeps, recomputes and moves.",
            any(each.least_us is not None for each in found.plans),
        ),
        PEAK,
        COLLECTIVES,
        Column(
            "kept",
            lambda point: bytes_text(point.kept_bytes),
            "full parameters that stay until backward.",
        ),
        Column(
            "cached",
            lambda point: bytes_text(point.cached_bytes),
            "those that stay longer.",
            one_graph and not found.repeated,
        ),
        Column(
            "activations",
            lambda point: f"{point.activations:.0%}",
            "share that forward saves.",
            one_graph,
        ),
        Column(
            "host",
            lambda point: bytes_text(point.host_bytes + there),
            _host_legend(found),
            moved or there > 0,
        ),
        Column(
            "chunks",
            lambda point: str(point.chunks),
            "those of the loss.",
            any(each.chunks > 1 for each in found.plans),
        ),
        *(DEVICE if found.resting.optimizer is not None else ()),
    )
    return [each for each in columns if each.shown]


def legend_of(columns: Iterable[Column[Any]]) -> list[str]:
    """Returns the lines that say what the columns are."""
    lines = [""]
    for each in columns:
        if each.legend:
            said = f"{each.name}: {each.legend}"
            longer = f"{lines[-1]} {said}".lstrip()
            if len(longer) <= _LONGEST_LEGEND:
                lines[-1] = longer
            else:
                lines.append(said)
    return lines


def plan_view(found: PlanTable) -> View:
    """The table as a page."""
    columns = _columns(found)
    marks = [
        f"{number}{' chosen' if each is found.chosen else ''}"
        for number, each in enumerate(found.plans, 1)
    ]
    marks += [f"{each.name}, no budget" for each in found.stages]
    points = (*found.plans, *found.stages)
    shown = table(
        ["plan", *(each.name for each in columns)],
        [
            [mark, *(each.cell(point) for each in columns)]
            for mark, point in zip(marks, points, strict=True)
        ],
        right=[each.name for each in columns[1:]],
        yields=("cached", "activations", "collectives", "kept"),
    )
    result: list[str | Text] = [text_of(f"No plan fits. {found.reason}")]
    if found.chosen is not None:
        result = [
            f"Chosen: memory_budget={found.chosen.budget!r}. {found.reason}",
            Text(tuple(_graph_line(*each) for each in found.chosen.graphs.items())),
            found.calls_of(found.chosen),
        ]
        if found.chosen.routes:
            result.append(_routes_text(found.chosen.routes))
    legend = legend_of(columns)
    if found.resting.optimizer is not None:
        legend.append(_rank_has(found))
    if found.blocks is not None:
        legend += _blocks_legend(found.blocks, found.uncompiled)
    elif found.repeated is None and not any(each.name == "least" for each in columns):
        legend.append('For the least time of each budget: pip install "zpasses[plan]"')
    return found.view(shown, result, legend)


def _host_legend(found: PlanTable) -> str:
    what = []
    if any(each.host_bytes for each in found.plans):
        what.append("them" if found.blocks is None else "what blocks save, inputs included")
    if there := found.resting.params_on_host:
        grads = " and their gradients" if found.offload_parameters == "all" else ""
        what.append(f"shards{grads} ({bytes_text(there)})")
    return f"bytes of {' and of '.join(what)} that rest there."


def _rank_has(found: PlanTable) -> str:
    rests = found.resting
    freed = " at a time, which backward frees," if found.step_in_backward else ""
    return (
        f"A rank has {bytes_text(rests.shard_bytes)} of shards, {bytes_text(rests.gradient_bytes)} "
        f"of gradients{freed} and {bytes_text(rests.state_bytes)} of states of {rests.optimizer}."
    )


_MOST_UNCOMPILED = 3


def _blocks_legend(blocks: str, uncompiled: Mapping[str, int]) -> tuple[str, ...]:
    outside = "Not counted: what runs between the blocks, which is not compiled"
    ranked = sorted(filter(None, uncompiled), key=uncompiled.__getitem__, reverse=True)
    named = ranked[:_MOST_UNCOMPILED]
    if not named:
        return (f"{outside}.",)
    sizes = [f"{name} with {bytes_text(uncompiled[name])}" for name in named]
    names = ",".join([blocks, *named])
    return (
        f"{outside}, above all {', '.join(sizes)} of parameters.",
        f'Name modules as blocks to count them: --compile-blocks "{names}"',
    )


_MOST_ROUTES = 10


def _routes_text(routes: Sequence[str]) -> Text:
    taken = sum(": by " in each for each in routes)
    shown = [f"  {each}" for each in routes[:_MOST_ROUTES]]
    if len(routes) > _MOST_ROUTES:
        shown.append(f"  and {len(routes) - _MOST_ROUTES} more, which --json has")
    title = f"Copy engines run {taken} of {len(routes)} launches of gathers:"
    return Text((title, *shown))


def _graph_line(name: str, figures: GraphFigures) -> str:
    return (
        f"{name}: achieved {time_text(figures.total_us)}, of which {time_text(figures.exposed_us)} "
        f"is exposed; bound {time_text(figures.bound_us)}; peak {bytes_text(figures.peak_bytes)}"
    )
