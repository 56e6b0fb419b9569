"""The suite "schedule": predicted time and memory of one training step under several schedulers of
collectives, for models, worlds and hardware that this machine does not have.

Every scheduler gets the same graphs, and every result is judged by the same model of time and
memory. Inductor's scheduler takes its durations from that model. All results are judged a second
time by Inductor's own estimates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import fx
from tqdm import tqdm

from zpasses.backend.partition_plan import StepPlan
from zpasses.backend.step_trials import StepTrials
from zpasses.compat.inductor_overlap import (
    inductor_node_ms,
    schedule_blocks_by_inductor,
    schedule_by_inductor,
)
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.time.clock import Clock, CollectiveTiming
from zpasses.cost.time.roofline import compute_us
from zpasses.cost.time.step_time import (
    collective_timing,
    is_copy_engine_collective,
    step_time,
)
from zpasses.cost.time.target import Target, use_target
from zpasses.errors import OptionError, suggestion
from zpasses.graph.queries import collective_of, collectives, is_wait, started_by
from zpasses.passes import ZERO3, Schedule
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.pipeline import Pipeline
from zpasses.tools.bench.launch import RankError, rank_main, run_ranks
from zpasses.tools.bench.report import report_text, two_decimals
from zpasses.tools.bench.schedule_models import MODELS, CapturedStep, Step, captured_step

_WORKER = "zpasses.tools.bench.predicted_schedules"
_GIB = float(1 << 30)

SCHEDULERS = (
    "single",
    "one ahead",
    "bucket 512",
    "inductor",
    "inductor +4",
    "blocks",
    "no engines",
    "zero3",
    "zero3 +0%",
    "budget 10%",
)
"""Names of the schedulers, in the order of the table:

- single: every collective is awaited where it starts.
- one ahead, bucket 512: `schedule{plan=one-ahead,copy_engines=off}` with 5 % more memory, and
  `cap_mb` 12 or 512.
- inductor: `schedule_overlap_bucketing`, with 1 GiB or 5 % more memory, its default; or 4 GiB.
- blocks: `manual_overlap_bucketing` of one transformer block ahead, as in torchtitan.
- no engines: `zero3` with `copy_engines=off`.
- zero3: the named pipeline, and the same with one gather and one reduction in flight.
- budget 10%: `zero3` with the option `memory_budget="10%"`, which may also recompute more.

The last four have backward find parameters as the backend plans it, and bounds of their own; the
bound of the table is that of zero3. The others have it find those that do not raise the peak.
"""

_PLANS: dict[str, Callable[[StepTrials], StepPlan]] = {
    "no engines": lambda trials: trials.again(False).fitting(Schedule.memory_budget),
    "zero3": lambda trials: trials.fitting(Schedule.memory_budget),
    "zero3 +0%": lambda trials: trials.fitting("0%"),
    "budget 10%": lambda trials: trials.fastest(trials.limit_bytes("10%")),
}


@dataclass(frozen=True)
class ScheduleConfig:
    """What to predict."""

    models: tuple[str, ...] = tuple(MODELS)
    """Models to capture."""
    worlds: tuple[int, ...] = (8, 64, 512)
    """Numbers of fake ranks."""
    tokens: tuple[int, ...] = (4096, 16384)
    """Tokens of the one sequence per rank."""
    targets: tuple[str, ...] = ("h100", "mi300x")
    """Hardware to plan for."""
    schedulers: tuple[str, ...] = SCHEDULERS
    """Schedulers to compare."""
    layers: int | None = None
    """Layers of every model. Default: each model's own number."""
    timeout_s: float = 600.0
    """Time limit per model, world and number of tokens, in seconds."""

    def __post_init__(self) -> None:
        for target in self.targets:
            Target.parse(target)
        for given, known in ((self.models, MODELS), (self.schedulers, SCHEDULERS)):
            for name in given:
                if name not in known:
                    raise OptionError(
                        f"got {name!r}; expected names of {', '.join(known)}."
                        f"{suggestion(name, known)}"
                    )


@dataclass(frozen=True)
class SchedulePoint:
    """One scheduler on one step."""

    scheduler: str
    forward_ms: float
    backward_ms: float
    peak_bytes: int
    """The larger peak of the two graphs, above what rests between steps."""
    collectives: int
    inductor_ms: float
    """Both graphs, by Inductor's own estimates."""
    gathers: int = 0
    on_engines: int = 0
    """Launches of gathers, and how many of them run on copy engines."""
    bound_ms: float | None = None
    """Least duration of these graphs, if the backend plans what they keep."""

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class ScheduleRow:
    """All schedulers on one step."""

    model: str
    ranks: int
    tokens: int
    target: str
    bound_ms: tuple[float, float]
    """Least duration of forward and backward that any schedule can have."""
    points: tuple[SchedulePoint, ...]
    failed: dict[str, str]
    """Scheduler -> its error."""


@dataclass
class ScheduleReport:
    config: ScheduleConfig
    rows: list[ScheduleRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Model, world and tokens -> the end of the log."""


def run_schedule(config: ScheduleConfig) -> ScheduleReport:
    """Capture every model, world and number of tokens in a new process, and compare schedulers."""
    report = ScheduleReport(config)
    tasks = [
        {"model": model, "ranks": ranks, "tokens": tokens}
        for model in config.models
        for ranks in config.worlds
        for tokens in config.tokens
    ]
    for task in tqdm(tasks):
        shared = ("targets", "layers", "schedulers")
        given = {**task, **{name: getattr(config, name) for name in shared}}
        try:
            (rows,) = run_ranks(_WORKER, given, ranks=1, timeout_s=config.timeout_s)
            report.rows += [_row(**row) for row in rows]
        except RankError as error:
            report.failed[f"{task['model']}, {task['ranks']} ranks, {task['tokens']} tokens"] = str(
                error
            )
    return report


def _row(points: list[dict[str, Any]], bound_ms: list[float], **rest: Any) -> ScheduleRow:
    made = tuple(SchedulePoint(**point) for point in points)
    return ScheduleRow(points=made, bound_ms=(bound_ms[0], bound_ms[1]), **rest)


def schedule_table(report: ScheduleReport) -> str:
    """One line per step: milliseconds and GiB of each scheduler, then the ratios of the targets."""
    by_inductor = [
        _step_of(row) | {point.scheduler: point.inductor_ms for point in row.points}
        for row in report.rows
    ]
    failed = [
        f"FAILED {name} ({', '.join(_step_of(row).values())}): {reason}"
        for row in report.rows
        for name, reason in row.failed.items()
    ]
    title = "\nThe same, by Inductor's own estimates, in milliseconds:"
    tables = ([_shown(row) for row in report.rows], title, by_inductor) if report.rows else ()
    return report_text(report, *tables, *failed)


def _step_of(row: ScheduleRow) -> dict[str, Any]:
    return {
        "model": row.model,
        "ranks": str(row.ranks),
        "tokens": str(row.tokens),
        "target": row.target,
    }


def _shown(row: ScheduleRow) -> dict[str, Any]:
    bound = sum(row.bound_ms)
    ratios: dict[str, Any] = {}
    for point in row.points:
        if point.bound_ms is not None and point.scheduler != "no engines":
            ratios[f"{point.scheduler} / bound"] = f"{point.total_ms / point.bound_ms:.3f}"
        if point.on_engines:
            ratios[f"{point.scheduler}: on engines"] = f"{point.on_engines} of {point.gathers}"
    ours = next((point for point in row.points if point.scheduler == "zero3"), None)
    peers = [
        point.total_ms
        for point in row.points
        if not point.scheduler.startswith(("zero3", "budget", "no engines"))
    ]
    if ours is not None and peers:
        ratios["zero3 / best peer"] = two_decimals(ours.total_ms / min(peers))
    return {
        **_step_of(row),
        **{
            point.scheduler: f"{point.total_ms:.1f}, {point.peak_bytes / _GIB:.1f}"
            for point in row.points
        },
        "bound": bound,
        **ratios,
    }


# --- in the measured process ----------------------------------------------------------------------
def measure(task: dict[str, Any]) -> list[ScheduleRow]:
    """Returns a row per target."""
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    shape = MODELS[task["model"]]
    shape = replace(shape, layers=task["layers"] or shape.layers)
    joint = Pipeline(tuple(each for each in ZERO3 if each.level is Level.JOINT))
    targets = [Target.parse(name) for name in task["targets"]]
    plans = {name: plan for name, plan in _PLANS.items() if name in task["schedulers"]}
    with captured_step(shape, task["ranks"], task["tokens"], str(joint), targets, plans) as step:
        rows = []
        for target in targets:
            with use_target(target):
                rows.append(_compare(step, target, shape.layers, task))
    return rows


def _compare(given: CapturedStep, target: Target, layers: int, task: dict[str, Any]) -> ScheduleRow:
    points, failed = [], {}
    planned = given.planned[target.name]
    for name, run in _schedulers(target, layers, planned).items():
        if name not in task["schedulers"]:
            continue
        step = planned.get(name, given.lean)
        copied = step.copied()
        try:
            copied.forward = run(copied.forward)
            copied.backward = run(copied.backward)
        except Exception as error:  # a peer may not support a graph
            failed[name] = f"{type(error).__name__}: {error}"
            continue
        bound = sum(_bounds_ms(step)) if name in planned else None
        points.append(replace(_judge(name, copied, target), bound_ms=bound))
    bounds = _bounds_ms(planned.get("zero3", given.lean))
    return ScheduleRow(
        task["model"],
        task["ranks"],
        task["tokens"],
        target.name,
        (bounds[0], bounds[1]),
        tuple(points),
        failed,
    )


def _bounds_ms(step: Step) -> list[float]:
    return [schedule_bound_us(Schedule().problem(graph)) / 1e3 for graph in step.graphs]


_Scheduler = Callable[[fx.GraphModule], fx.GraphModule]


def _schedulers(target: Target, layers: int, planned: dict[str, Step]) -> dict[str, _Scheduler]:
    def passes(*run: Pass) -> _Scheduler:
        def rewrite(gm: fx.GraphModule) -> fx.GraphModule:
            for each in run:
                each.rewrite(gm.graph)
            return gm

        return rewrite

    def node_ms(node: fx.Node) -> float:
        return _node_us(node, target) / 1e3

    blocks = [
        ["model.embed_tokens"],
        *([f"model.layers.{number}"] for number in range(layers)),
        ["model.norm", "lm_head"],
    ]
    schedulers: tuple[_Scheduler, ...] = (
        passes(),
        passes(Schedule("one-ahead", 12.0, "5%", copy_engines="off")),
        passes(Schedule("one-ahead", 512.0, "5%", copy_engines="off")),
        lambda gm: schedule_by_inductor(gm, node_ms, 1.0),
        lambda gm: schedule_by_inductor(gm, node_ms, 4.0),
        lambda gm: schedule_blocks_by_inductor(gm, blocks),
    )
    found = dict(zip(SCHEDULERS, schedulers, strict=False))
    for name, step in planned.items():
        assert step.memory_budget is not None
        engines: Literal["auto", "off"] = "off" if name == "no engines" else "auto"
        found[name] = passes(Schedule(memory_budget=step.memory_budget, copy_engines=engines))
    return found


def _node_us(node: fx.Node, target: Target) -> float:
    collective = collective_of(node)
    if collective is None:
        return compute_us(node, target)
    return collective_timing(node, collective, target).duration_us


def _judge(name: str, step: Step, target: Target) -> SchedulePoint:
    forward, backward = (step_time([graph], target).total_us / 1e3 for graph in step.graphs)
    launched = [each for graph in step.graphs for _, each in collectives(graph)]
    gathers = [each for each in launched if "gather" in each.op]
    return SchedulePoint(
        name,
        forward,
        backward,
        max(liveness(graph).peak_bytes for graph in step.graphs),
        len(launched),
        sum(_by_inductor_ms(graph, target) for graph in step.graphs),
        len(gathers),
        sum(map(is_copy_engine_collective, gathers)),
    )


def _by_inductor_ms(graph: fx.Graph, target: Target) -> float:
    """Duration of a graph by Inductor's estimates of every node, without mutual slowdown."""
    clock = Clock()
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_wait(node):
            if (started := started_by(node)) in numbers:
                clock.wait(numbers[started])
            continue
        took = inductor_node_ms(node, target.tflops, target.memory_gb_s)
        if collective_of(node) is None:
            clock.work(took)
        else:
            numbers[node] = len(numbers)
            clock.enqueue(numbers[node], took, CollectiveTiming(took))
    return clock.now_us


if __name__ == "__main__":
    rank_main(measure)
