"""The plans of one training step, as plain data. This file loads no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zpasses.inspect.units import bytes_text, time_text
from zpasses.inspect.view import Table, Text, View

NOTABLY = 0.999
"""Durations that differ by a factor nearer to 1 are equal."""


@dataclass(frozen=True)
class GraphFigures:
    """What the cost model says about forward, backward, or all graphs of a step."""

    total_us: float
    exposed_us: float
    """Time in which no kernel runs because a collective is awaited."""
    bound_us: float
    """Duration that no schedule of the graph's collectives can beat."""
    peak_bytes: int
    collectives: int
    """Number of launches."""


@dataclass(frozen=True)
class Resting:
    """What a rank holds beside the step, in bytes of the device."""

    shard_bytes: int = 0
    gradient_bytes: int = 0
    """That are there at a time."""
    state_bytes: int = 0
    """Of all states, wherever they rest."""
    optimizer: str | None = None
    """Whose states these are; None if they are not known."""
    optimizer_us: float = 0.0
    """Duration of its step, by micro-batch, if all states stay."""
    params_on_host: int = 0
    """Bytes of the shards that rest on the host, and of their gradients, which go there."""


@dataclass(frozen=True)
class DeviceUse:
    """What a plan takes of a rank's device together with what rests there."""

    resting_bytes: int
    """Shards, gradients, and the states that stay."""
    total_bytes: int
    """These, the peak, and two buckets of the other states."""
    states_on_host: int
    """Bytes of the other states."""
    optimizer_us: float
    """Duration of the optimizer's step, by micro-batch."""
    fits: bool
    """Whether the total fits the device, and its host what rests there."""
    device_bytes: str | None
    """The option of `zpasses.offload_optimizer`; None if all states stay."""


@dataclass(frozen=True)
class PlanPoint:
    """One plan of the step, or a stage without a budget."""

    name: str
    """"plan", "zero2", "zero3" or "pipeline"; also these with ", no copy engines"."""
    budget: str | None
    """Text of the option `memory_budget`; None for a stage without a budget."""
    limit_bytes: int | None
    """The peak that the budget allows."""
    graphs: Mapping[str, GraphFigures]
    """Of "forward" and "backward"; or of "step", if its blocks are compiled one by one."""
    kept_bytes: int
    """Bytes of the full parameters that are kept until backward or longer."""
    cached_bytes: int
    """Bytes of those that are kept until the parameters change."""
    activations: float
    """Fraction of the activations that forward saves, of those that the partitioner saves by
    default."""
    ahead: int | None = None
    """For how many graphs ahead gathers start; None if the step is one graph."""
    host_bytes: int = 0
    """Bytes of those that rest on the host until backward."""
    chunks: int = 1
    """In how many chunks the head and its loss are computed."""
    device: DeviceUse | None = None
    """None without an optimizer."""
    least_us: float | None = None
    """Duration that no plan within the budget can beat, whatever it saves, keeps and moves; None if
    it is not known."""
    routes: tuple[str, ...] = ()
    """Of each launch of gathers that copy engines could run: which route it takes, and why."""

    @property
    def fits_device(self) -> bool:
        return self.device is None or self.device.fits

    @property
    def with_optimizer_us(self) -> float:
        """Duration of the step, and of that of the optimizer."""
        return self.total_us + (0.0 if self.device is None else self.device.optimizer_us)

    @property
    def offload_call(self) -> str | None:
        """The call that brings the states to where the plan has them; None if all stay."""
        if self.device is None or self.device.device_bytes is None:
            return None
        return f'zpasses.offload_optimizer(optimizer, device_bytes="{self.device.device_bytes}")'

    @property
    def total_us(self) -> float:
        return sum(each.total_us for each in self.graphs.values())

    @property
    def exposed_us(self) -> float:
        return sum(each.exposed_us for each in self.graphs.values())

    @property
    def bound_us(self) -> float:
        return sum(each.bound_us for each in self.graphs.values())

    @property
    def peak_bytes(self) -> int:
        """The largest peak of the graphs, above what rests between steps."""
        return max(each.peak_bytes for each in self.graphs.values())

    @property
    def collectives(self) -> int:
        return sum(each.collectives for each in self.graphs.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        sums = ("total_us", "exposed_us", "bound_us", "peak_bytes", "collectives")
        found = dataclasses.asdict(self)
        found["memory_budget"] = found.pop("budget")
        ahead = {} if self.ahead is None else {"ahead": found["ahead"]}
        del found["ahead"]
        if self.device is None:
            del found["device"]
        else:
            found["with_optimizer_us"] = self.with_optimizer_us
        graphs = found.pop("graphs")
        return _rounded({**found, **ahead, **graphs, **{key: getattr(self, key) for key in sums}})


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _rounded(value)
        if isinstance(value, dict)
        else round(value, 3)
        if isinstance(value, float)
        else value
        for key, value in values.items()
    }


@dataclass(frozen=True)
class StepTable:
    """What a step was planned for."""

    function: str
    world: int
    target: str
    """Name of the target."""
    given_target: str | None
    """The option `target`; None for this machine."""
    backwards_per_step: int
    """The option of this name: forwards from one optimizer step to the next."""
    pipeline: str | None = field(default=None, kw_only=True)
    """The option `pipeline`; None for stage 3."""
    blocks: str | None = field(default=None, kw_only=True)
    """Names of the modules that are compiled one by one; None if the step is one graph."""
    step_in_backward: bool = field(default=False, kw_only=True)
    """Whether parameters of blocks step in backward, so that gradients of two blocks are there at a
    time."""
    offload_parameters: str | None = field(default=None, kw_only=True)
    """Which parameters have their shards on the host, "frozen" or "all"; None: none."""
    repeated: int | None = field(default=None, kw_only=True)
    """How many layers were captured, of which the others are copies; None if all were."""

    def options_of(self, point: PlanPoint) -> dict[str, str | int]:
        """The options of the backend that reproduce a plan."""
        found: dict[str, str | int] = {}
        if self.pipeline is not None:
            found["pipeline"] = self.pipeline
        if point.budget is not None:
            found["memory_budget"] = point.budget
        if self.backwards_per_step > 1:
            found["backwards_per_step"] = self.backwards_per_step
        if self.given_target is not None:
            found["target"] = self.given_target
        return found

    def call_of(self, point: PlanPoint) -> str:
        """The options that reproduce a plan, as a program gives them."""
        options = self.options_of(point)
        if self.blocks is None:
            return f"options={json.dumps(options)}"
        given = "".join(f", {name}={json.dumps(value)}" for name, value in options.items())
        return f"zpasses.compile_blocks(model, {json.dumps(self.blocks)}{given})"

    @property
    def early_call(self) -> str | None:
        """The call with which parameters step in backward; None if they do not."""
        return "zpasses.step_in_backward(optimizer)" if self.step_in_backward else None

    @property
    def params_call(self) -> str | None:
        """The call that brings parameters to the host; None if all stay on the device."""
        if self.offload_parameters is None:
            return None
        trained = ", trained=True" if self.offload_parameters == "all" else ""
        return f"zpasses.offload_parameters(model{trained})"

    def calls_of(self, point: PlanPoint) -> Text:
        """All that a program gives and calls for a plan."""
        calls = self.call_of(point), self.params_call, point.offload_call, self.early_call
        return Text(tuple(filter(None, calls)))

    def view(self, shown: Table, result: Iterable[str | Text], legend: Sequence[str]) -> View:
        """The page of a table, its result and its legend."""
        title = f"{self.function}, {self.world} ranks, target {self.target}"
        if self.repeated is not None:
            legend = [
                *legend,
                f"Estimated from {self.repeated} layers, with the same values saved in each.",
            ]
        parts = (shown, *result, Text(tuple(legend)))
        return View(title, parts, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found = {name: getattr(self, name) for name in ("function", "world", "target")}
        given = {"pipeline": self.pipeline, "compile_blocks": self.blocks}
        return found | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class PlanTable(StepTable):
    """All plans of one step that are worth having, and which of them a budget chooses."""

    plans: tuple[PlanPoint, ...]
    """From the leanest to the fastest."""
    stages: tuple[PlanPoint, ...]
    """Today's stages without a budget."""
    memory: str | None
    """The budget that was asked for; None chooses the fastest plan."""
    memory_bytes: int | None
    """The peak that it allows."""
    chosen: PlanPoint | None
    """One of `plans`; None if none fits."""
    missing: str | None
    """Why no plan fits; None if one does."""
    seconds: float
    """Duration of the planning."""
    resting: Resting = Resting()
    uncompiled: Mapping[str, int] = field(default_factory=dict)
    """Module that has a notable part of the parameters, outside of the blocks -> their bytes in the
    unsharded model."""
    host_memory: str | None = None
    """The option `host_memory`: what a plan may take of the host."""
    device_memory: str | None = None
    """What the whole device may take. The fastest plan that fits it is chosen."""

    def fastest_of(self, points: Sequence[PlanPoint]) -> PlanPoint:
        """Returns the fastest with its optimizer; the leanest of those that are as fast."""
        best = min(each.with_optimizer_us for each in points)
        return next(each for each in points if each.with_optimizer_us * NOTABLY <= best)

    def options_of(self, point: PlanPoint) -> dict[str, str | int]:
        found = super().options_of(point)
        if point.host_bytes and self.host_memory is not None:
            found["host_memory"] = self.host_memory
        return found

    @property
    def options(self) -> dict[str, str | int] | None:
        """The options of the backend that reproduce the chosen plan."""
        return None if self.chosen is None else self.options_of(self.chosen)

    @property
    def offload_call(self) -> str | None:
        """The call that brings the states to where the chosen plan has them; None if all stay."""
        return None if self.chosen is None else self.chosen.offload_call

    @property
    def reason(self) -> str:
        """Why the chosen plan is chosen, or why there is none."""
        if self.chosen is None:
            return self.missing or ""
        if self.device_memory is not None:
            return self._device_reason(self.chosen)
        better = [
            point
            for point in self.plans
            if point.total_us < NOTABLY * self.chosen.total_us and point is not self.chosen
        ]
        lean = [point for point in better if point.peak_bytes <= (self.chosen.limit_bytes or 0)]
        if self.memory is not None and lean:
            # The planner compares estimates, so a smaller budget may lead to a faster plan.
            fastest = min(lean, key=lambda point: point.total_us)
            return (
                f"It is what memory_budget={self.memory!r} leads to. A smaller one, "
                f"memory_budget={fastest.budget!r}, leads to a faster plan: "
                f"{time_text(fastest.total_us)}."
            )
        why = (
            f"It is the fastest within {self.memory}."
            if self.memory is not None
            else "It is the fastest, whatever its memory."
        )
        return f"{why} {self._next(better)}"

    def _device_reason(self, chosen: PlanPoint) -> str:
        rests, why = self.resting, f"It is the fastest that fits in {self.device_memory}, with"
        if self.offload_parameters == "all":  # states of parameters on the host do not stay
            return f"{why} the copies of states and parameters."
        why += " the copies of states." if self.offload_call else " all states."
        most = NOTABLY * chosen.with_optimizer_us - rests.optimizer_us
        faster = [each for each in self.plans if each.total_us < most]
        if not faster:
            return f"{why} More memory gains nothing."
        first = faster[0]  # with all states, which its own use may not have
        need = rests.shard_bytes + rests.gradient_bytes + rests.state_bytes + first.peak_bytes
        return (
            f"{why} With {bytes_text(need)}, all states stay and it takes "
            f"{time_text(first.total_us + rests.optimizer_us)}."
        )

    def _next(self, better: Sequence[PlanPoint]) -> str:
        """What more memory would gain, given the plans that are faster than the chosen one."""
        if better:
            first = better[0]
            return (
                f"The next faster plan takes {time_text(first.total_us)} and needs "
                f"{bytes_text(first.peak_bytes)}."
            )
        return "More memory gains nothing."

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **super().to_json(),
            "backwards_per_step": self.backwards_per_step,
            "memory": self.memory,
            "plans": [{**each.to_json(), "chosen": each is self.chosen} for each in self.plans],
            "stages": [each.to_json() for each in self.stages],
            **({} if self.blocks is None else {"uncompiled": dict(self.uncompiled)}),
            "options": self.options,
            **self._device_json(),
            **self._params_json(),
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
        }

    def _params_json(self) -> dict[str, Any]:
        if self.offload_parameters is None:
            return {}
        on_host = self.resting.params_on_host
        return {"offload_parameters": self.params_call, "params_on_host": on_host}

    def _device_json(self) -> dict[str, Any]:
        if self.resting.optimizer is None:
            return {}
        return {
            "resting": dataclasses.asdict(self.resting),
            "device_memory": self.device_memory,
            "offload_optimizer": self.offload_call,
            "step_in_backward": self.early_call,
        }


def not_dominated(points: Iterable[PlanPoint]) -> list[PlanPoint]:
    """Returns the points than which no smaller one is as fast, from the leanest to the fastest."""
    found: list[PlanPoint] = []
    ranked = sorted(
        points, key=lambda each: (each.peak_bytes, each.total_us, each.limit_bytes or 0)
    )
    for point in ranked:
        if not found or point.total_us < NOTABLY * found[-1].total_us:
            found.append(point)
    return found


def worth_showing(made: Iterable[PlanPoint], chosen: PlanPoint | None) -> list[PlanPoint]:
    """Returns the plans that are not dominated, and the chosen one in any case, from the leanest to
    the fastest.
    """
    points = not_dominated(each for each in made if chosen is None or each.graphs != chosen.graphs)
    if chosen is not None:
        points = [
            each
            for each in points
            if each.peak_bytes < chosen.peak_bytes or each.total_us < chosen.total_us
        ]
        points.append(chosen)
    return sorted(points, key=lambda each: (each.peak_bytes, -each.total_us))


_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def budget_text(nbytes: int) -> str:
    """Returns a short text of a size that is at least `nbytes`, as the option `memory_budget` takes
    it.
    """
    unit, scale = next((each for each in _UNITS if nbytes >= each[1]), _UNITS[-1])
    size = nbytes / scale
    decimals = 0 if unit == "B" else 3 if size < 10 else 2 if size < 100 else 1
    factor = 10**decimals
    return f"{math.ceil(size * factor) / factor:g}{unit}" if size < 1e4 else f"{nbytes}B"
