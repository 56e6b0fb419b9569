"""The page of `zpasses plan --html`: time over memory, as one file without network and script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from zpasses.inspect.escape import one_line
from zpasses.inspect.units import bytes_text, time_text
from zpasses.tools.plan.table import PlanPoint, PlanTable, plan_view

__all__ = ["Label", "plan_page"]

WIDTH, HEIGHT = 960, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 28, 22, 52
_CHAR, _LINE = 7.2, 15.0
"""Largest width of a character and height of a line of labels, in pixels."""
_RADIUS = 6.0
_LAYERS = ("stage", "plan", "chosen")
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
_TIMES = (("s", 1e6), ("ms", 1e3), ("us", 1.0))


@dataclass(frozen=True)
class Label:
    """A text whose left end is at `x` and whose baseline is at `y`, in pixels."""

    text: str
    x: float
    y: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom."""
        return self.x, self.y - _LINE + 4, self.x + len(self.text) * _CHAR, self.y + 4


@dataclass(frozen=True)
class _Mark:
    """One point of the picture."""

    kind: str
    x: float
    y: float
    title: str
    """Shown where the pointer is."""


@dataclass(frozen=True)
class _Tick:
    at: float
    text: str


def plan_page(found: PlanTable) -> str:
    """Returns the page."""
    from jinja2 import Environment, select_autoescape

    source = (files("zpasses.tools.plan") / "page.html").read_text(encoding="utf-8")
    template = Environment(autoescape=select_autoescape(default=True)).from_string(source)
    view = plan_view(found)
    return template.render(
        title=one_line(view.title),
        picture=_Picture(found),
        details=view._repr_html_(),
        width=WIDTH,
        height=HEIGHT,
    )


class _Picture:
    """The coordinates of everything in the picture, in pixels."""

    left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM

    def __init__(self, found: PlanTable) -> None:
        points = [*found.plans, *found.stages]
        memory = [each.peak_bytes for each in points]
        budget = found.memory_bytes
        self._memory = _Axis(memory, self.left, self.right, _UNITS, wide=budget)
        self._time = _Axis(
            [each.total_us for each in points] + [each.bound_us for each in found.plans],
            self.bottom,
            self.top,
            _TIMES,
        )
        self.memory_unit, self.time_unit = self._memory.unit, self._time.unit
        self.memory_ticks, self.time_ticks = self._memory.ticks, self._time.ticks
        self.plans = self._stairs([(each.peak_bytes, each.total_us) for each in found.plans])
        self.bound = self._stairs([(each.peak_bytes, each.bound_us) for each in found.plans])
        self.marks = [self._mark("plan", f"plan {n}", p) for n, p in enumerate(found.plans, 1)]
        if found.chosen is not None:
            self.marks[found.plans.index(found.chosen)] = self._mark(
                "chosen", f"plan {found.plans.index(found.chosen) + 1}, chosen", found.chosen
            )
        self.marks += [
            self._mark("stage", f"{each.name}, no budget", each) for each in found.stages
        ]
        self.budget: float | None = None
        if budget is not None and budget <= self._memory.end:
            self.budget = self._memory.at(budget)
        self.labels = self._labels(found, budget)

    @property
    def drawn(self) -> list[_Mark]:
        """The marks, those that others may cover first: stages are rings around what they share a
        place with.
        """
        return sorted(self.marks, key=lambda mark: _LAYERS.index(mark.kind))

    def _mark(self, kind: str, name: str, point: PlanPoint) -> _Mark:
        budget = f", memory_budget={point.budget!r}" if point.budget is not None else ""
        text = (
            f"{name}{budget}: {time_text(point.total_us)}, bound {time_text(point.bound_us)}, peak "
            f"{bytes_text(point.peak_bytes)}, {point.collectives} collectives"
        )
        x, y = self._memory.at(point.peak_bytes), self._time.at(point.total_us)
        return _Mark(kind, x, y, one_line(text))

    def _stairs(self, points: Sequence[tuple[float, float]]) -> str:
        """Points of a polyline: a plan is possible with its memory and with more."""
        corners: list[tuple[float, float]] = []
        for memory, duration in points:
            x, y = self._memory.at(memory), self._time.at(duration)
            corners += [(x, corners[-1][1]), (x, y)] if corners else [(x, y)]
        corners.append((self.right, corners[-1][1]))
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)

    def _labels(self, found: PlanTable, budget: float | None) -> list[Label]:
        """Names of the points beside them, where they cover neither points nor each other."""
        names = [
            f"{number}{' chosen' if each is found.chosen else ''}"
            for number, each in enumerate(found.plans, 1)
        ]
        names += [f"{each.name}, no budget" for each in found.stages]
        taken = [(m.x - _RADIUS, m.y - _RADIUS, m.x + _RADIUS, m.y + _RADIUS) for m in self.marks]
        if self.budget is not None:
            taken.append((self.budget - 2, self.top, self.budget + 2, self.bottom))
        placed: list[Label] = []
        if budget is not None:
            text = f"budget {one_line(found.memory or '')}"
            at = self.budget
            if at is None:
                text, at = f"{text} →", self.right - len(f"{text} →") * _CHAR
            elif at + len(text) * _CHAR > self.right - 4:
                at -= len(text) * _CHAR + 10
            placed.append(Label(text, at + 5, self.top + 12))
        ranked = sorted(zip(names, self.marks, strict=True), key=lambda each: len(each[0]) < 4)
        for name, mark in ranked:
            boxes = [*taken, *(each.box for each in placed)]
            label = next(
                (
                    each
                    for each in self._places(name, mark)
                    if not any(_overlap(each.box, box) for box in boxes)
                ),
                None,
            )
            if label is not None:  # else the pointer and the table tell
                placed.append(label)
        return placed

    def _places(self, name: str, mark: _Mark) -> Iterable[Label]:
        width, gap = len(name) * _CHAR, _RADIUS + 3
        for far in (0.0, 12.0, 26.0, 40.0):
            for x, y in (
                (mark.x + gap + far, mark.y - 4 - far),
                (mark.x + gap + far, mark.y + 12 + far),
                (mark.x - gap - width - far, mark.y + 12 + far),
                (mark.x - gap - width - far, mark.y - 4 - far),
                (mark.x - width / 2, mark.y - gap - 4 - far),
                (mark.x - width / 2, mark.y + gap + 12 + far),
            ):
                label = Label(name, x, y)
                left, top, right, bottom = label.box
                if left > self.left and right < WIDTH and top > 0 and bottom < self.bottom:
                    yield label


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


class _Axis:
    """A linear axis over values, with round ticks.

    Args:
        values: what it covers, with a margin.
        first, last: its ends in pixels.
        units: names and sizes, the largest first.
        wide: a value that it covers, too, if it is not far beyond the others.
    """

    def __init__(
        self,
        values: Sequence[float],
        first: float,
        last: float,
        units: Sequence[tuple[str, float]],
        wide: float | None = None,
    ) -> None:
        low, high = min(values), max(values)
        margin = 0.08 * (high - low) or 0.1 * high or 1.0
        if wide is not None and wide <= high + (high - low or high):
            low, high = min(low, wide), max(high, wide)
        self.start, self.end = max(0.0, low - margin), high + margin
        self._first, self._last = first, last
        self.unit, scale = next((u for u in units if high >= u[1]), units[-1])
        step = _round_step((self.end - self.start) / scale / 7)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        numbers = range(
            math.ceil(self.start / scale / step), math.floor(self.end / scale / step) + 1
        )
        self.ticks = [_Tick(self.at(n * step * scale), f"{n * step:.{decimals}f}") for n in numbers]

    def at(self, value: float) -> float:
        share = (value - self.start) / (self.end - self.start)
        return round(self._first + share * (self._last - self._first), 1)


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
