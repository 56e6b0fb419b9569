"""Suite `faults`: one rank of a training run on real gloo ranks meets a fault.

The program trains a small model for a few steps, with a graph break in its forward. The fault
happens on one rank, at a drawn place of a drawn step. Every other rank must end with the right
numbers, or with an error that names the rank and comes within the time limit of the votes and a
slack.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zpasses
from zpasses.pipeline.events import observe_graphs
from zpasses.testing.ranks import Outcome as RankOutcome
from zpasses.testing.ranks import run_in_fresh_ranks
from zpasses.tools.stress.cases import CaseResult, Outcome, StressConfig, own_part

PLACES = (
    "before the first compile",
    "in a pass",
    "in a backward pass of the compiler",
    "before forward",
    "between the graphs of forward",
    "before backward",
    "in backward",
    "before the optimizer step",
    "in the optimizer step",
    "after the optimizer step",
)
"""Where a rank can fail."""

COMPILE_PLACES = PLACES[:3]
"""Those that only the first step comes to."""

ENDINGS = ("raise", "raise and exit", "exit", "kill", "stop", "sleep beyond the limit")
"""What a failing rank does. The first stays alive after the exception left the program."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on one rank."""

    kind: str
    """One of ENDINGS, or what else the rank does differently."""
    rank: int
    step: int
    """Step in which it happens, from 0."""
    place: str = ""
    """One of PLACES, for ENDINGS."""


@dataclass(frozen=True)
class Program:
    """What all ranks are to run."""

    ranks: int
    stage: int
    steps: int
    micro_batches: int
    window: bool
    """Whether the micro-batches of a step share one `coalesce_grad_reduction`."""
    merged: bool
    """Whether buckets merge collectives; otherwise there is one per parameter."""
    limit_s: float
    """Option `agreement_timeout_s`."""
    fault: Fault
    scratch: str
    """Folder for the file that says when the fault happened."""


@dataclass(frozen=True)
class RankResult:
    """How a rank ended."""

    error: str
    """Type and text of the exception that ended training; "" if training ended normally."""
    right: bool
    """Whether the parameters are those of an unsharded run after as many steps."""
    steps: int
    """Steps that ended normally."""
    at: float
    """When training ended, as `time.time()`."""


SLACK_S = 10.0
"""How much longer than the limit an error may take."""

_DIFFERENCES = (
    "compiles another pipeline",
    "ends after fewer steps",
    "evaluates alone",
    "freezes a parameter",
    "one micro-batch less",
    "one more micro-batch",
    "reads another layer",
    "reads in another order",
    "skips a layer",
    "steps twice",
)
"""What a rank can do differently from the others. A rank may then end normally only with the
parameters of an unsharded run: a difference may change nothing, such as an evaluation, or come
after the last collective of another rank."""

_HARMLESS = ("another batch size", "sleep within the limit")
"""What a rank may do. Training must end with the right numbers."""


def draw(seed: int, ranks: Iterable[int], limit_s: float, scratch: str = "") -> Program:
    """The program and the fault of a seed."""
    chance = random.Random(seed)
    world, steps = chance.choice(list(ranks)), chance.randint(2, 4)
    family = chance.choices(("ending", "difference", "harmless"), (6, 4, 1))[0]
    kinds = {"ending": ENDINGS, "difference": _DIFFERENCES, "harmless": _HARMLESS}[family]
    kind = chance.choice(kinds)
    stage = chance.choice((1, 2, 3))
    place = "" if kind in (*_DIFFERENCES, "another batch size") else chance.choice(PLACES)
    return Program(
        ranks=world,
        stage=stage,
        steps=steps,
        micro_batches=chance.randint(1, 3),
        window=chance.random() < 0.3,
        merged=chance.random() < 0.5,
        limit_s=limit_s,
        fault=Fault(
            kind,
            rank=chance.randrange(world),
            # Later steps compile nothing.
            step=0 if place in COMPILE_PLACES else chance.randrange(steps),
            place=place,
        ),
        scratch=scratch,
    )


def run(seeds: Iterable[int], config: StressConfig) -> Iterator[CaseResult]:
    """Run one case per seed. Most of a case is waiting, so several run at a time."""
    with ThreadPoolExecutor(config.jobs) as pool:
        running: deque[Future[CaseResult]] = deque()
        for seed in seeds:
            running.append(pool.submit(_case, seed, config))
            if len(running) == config.jobs:
                yield running.popleft().result()
        for each in running:
            yield each.result()


def _case(seed: int, config: StressConfig) -> CaseResult:
    with tempfile.TemporaryDirectory(prefix="zpasses-fault-", dir=config.scratch) as scratch:
        return _run_program(seed, draw(seed, config.ranks, config.vote_limit_s, scratch))


def _run_program(seed: int, program: Program) -> CaseResult:
    started, fault = time.monotonic(), program.fault
    silent = fault.kind == "stop"
    # Compiles on loaded cores come on top of the waiting.
    patience = 60 + 2 * (program.limit_s + SLACK_S)
    outcomes = run_in_fresh_ranks(
        train, program, ranks=program.ranks, timeout_s=patience, answers=program.ranks - silent
    )
    file = Path(program.scratch, "fault")
    at = float(file.read_text()) if file.exists() else None
    verdicts = [
        _judge(program, outcome, at)
        for outcome in outcomes
        if not (outcome.rank == fault.rank and _is_gone(fault))
    ]
    worst = max(verdicts, key=lambda each: _SEVERITY.index(each[0]))
    where = f" {fault.place}" if fault.kind in (*ENDINGS, "sleep within the limit") else ""
    return CaseResult(
        "faults",
        fault.kind,
        seed,
        worst[0],
        f"{worst[1]}; rank {fault.rank}: {fault.kind}{where}, step {fault.step} of {program}",
        time.monotonic() - started,
    )


_SEVERITY = ("equal", "refused", "hang", "crash", "wrong")


def _is_gone(fault: Fault) -> bool:
    """Whether the rank at fault cannot report."""
    return fault.kind in ("raise and exit", "exit", "kill", "stop")


def _judge(program: Program, outcome: RankOutcome, fault_at: float | None) -> tuple[Outcome, str]:
    """What came of one rank."""
    me, fault = f"rank {outcome.rank}", program.fault
    if outcome.timed_out:
        return "hang", f"{me} did not end\n{outcome}"
    if not outcome.ok:
        return "crash", f"{me} died\n{outcome}"
    result: RankResult = outcome.result
    if not result.error:
        if not result.right:
            return "wrong", f"{me} ended normally with wrong parameters"
        return "equal", f"{me} ended normally"
    if fault_at is None or fault.kind in _HARMLESS:
        return "wrong", f"{me} raised without a fault: {result.error}"
    if outcome.rank != fault.rank:
        seconds = result.at - fault_at
        if seconds > program.limit_s + SLACK_S:
            return "hang", f"{me} raised after {seconds:.0f} s: {result.error}"
        if f"rank {fault.rank}" not in result.error.lower():
            text = f"{me} raised an error that does not name rank {fault.rank}: {result.error}"
            return "crash", text
    return "refused", f"{me}: {result.error}"


# --- on a rank ------------------------------------------------------------------------------------
class InjectedError(RuntimeError):
    """The exception of an injected fault."""


class _Layers(nn.Module):
    """Layers of equal shape, so that a mistaken parameter cannot be told from shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.order: tuple[str, ...] = ("a", "b", "c")
        self.injector: _Injector | None = None

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order[:2]:
            x = torch.tanh(getattr(self, name)(x))
        x = _between_graphs(self, x)
        for name in self.order[2:]:
            x = torch.tanh(getattr(self, name)(x))
        return self.head(x)  # type: ignore[no-any-return]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _between_graphs(model: _Layers, x: Tensor) -> Tensor:
    if model.injector is not None:
        model.injector.reach("between the graphs of forward")
    return x


class _Injector:
    """Lets the fault happen on its rank, at its place and step."""

    def __init__(self, program: Program) -> None:
        self._program, self._fault = program, program.fault
        self._mine = program.fault.rank == dist.get_rank()
        self.step = 0

    def reach(self, place: str) -> None:
        fault = self._fault
        if self._mine and fault.place == place and fault.step <= self.step:
            self._mine = False
            self._happen()

    def differs(self, kind: str) -> bool:
        """Whether this rank differs from the others in this step, in the given way."""
        mine = self._mine and self._fault.kind == kind and self._fault.step == self.step
        if mine:
            self.note_time()
        return mine

    def note_time(self) -> None:
        file = Path(self._program.scratch, "fault")
        if not file.exists():
            file.write_text(str(time.time()))

    def _happen(self) -> None:
        kind = self._fault.kind
        self.note_time()
        if kind in ("raise", "raise and exit"):
            raise InjectedError(f"injected into rank {dist.get_rank()}")
        if kind == "exit":
            os._exit(0)
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        elif kind == "sleep beyond the limit":
            time.sleep(self._program.limit_s + 12)
        elif kind == "sleep within the limit":
            time.sleep(self._program.limit_s / 3)
        else:
            raise AssertionError(kind)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, compiles reach the places that lie in the compiler."""

        def observe(observed: Any) -> None:
            backward = "backward" in observed.kind
            self.reach("in a backward pass of the compiler" if backward else "in a pass")

        with observe_graphs(observe):
            yield


def train(program: Program) -> RankResult:
    """Train, meet the fault, and compare this rank's shards with an unsharded run."""
    torch.manual_seed(0)
    model, reference = _Layers(), _Layers()
    reference.load_state_dict(model.state_dict())
    expected = _reference(reference, program)
    injector = _Injector(program)
    done, error = 0, ""
    try:
        with injector.watching():
            for _ in _steps(model, program, injector):
                done += 1
    except Exception as caught:
        if program.fault.kind == "raise and exit" and _is_injected(caught):
            os._exit(1)
        error = f"{type(caught).__name__}: {caught}"
    at = time.time()
    return RankResult(error, _equals(model, expected[done]), done, at)


def _is_injected(error: BaseException | None) -> bool:
    return error is not None and (
        "injected into" in str(error) and f"rank {dist.get_rank()}" in str(error)
    )


def _steps(model: _Layers, program: Program, injector: _Injector) -> Iterator[None]:
    """Each step of sharded training."""
    fault, mine = program.fault, program.fault.rank == dist.get_rank()
    injector.reach("before the first compile")
    mesh = init_device_mesh("cpu", (program.ranks,))
    if mine and fault.kind == "freezes a parameter":
        injector.note_time()
        model.b.weight.requires_grad_(False)
    zpasses.shard(model, mesh=mesh)
    options: dict[str, Any] = {
        "codegen": "eager",
        "agreement_timeout_s": program.limit_s,
        "zero_stage": program.stage,
    }
    if not program.merged:
        options["pipeline"] = _SINGLE[program.stage]
        del options["zero_stage"]
    if mine and fault.kind == "compiles another pipeline":
        injector.note_time()
        other = 2 if program.stage == 3 else 3
        changed = {"zero_stage": other} if program.merged else {"pipeline": _SINGLE[other]}
        options = {**options, **changed}
    model.injector = injector
    compiled = torch.compile(model, backend="zpasses", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer.register_step_pre_hook(lambda *_: injector.reach("in the optimizer step"))
    for step in range(program.steps):
        injector.step = step
        if injector.differs("ends after fewer steps"):
            return
        if injector.differs("evaluates alone"):
            with torch.no_grad():
                compiled(_data(program, fault.rank, step, 0))
        _accumulate(compiled, model, program, injector)
        injector.reach("before the optimizer step")
        optimizer.step()
        if injector.differs("steps twice"):
            optimizer.step()
        optimizer.zero_grad()
        injector.reach("after the optimizer step")
        yield


def _accumulate(compiled: Any, model: _Layers, program: Program, injector: _Injector) -> None:
    count = program.micro_batches
    count += injector.differs("one more micro-batch")
    count -= injector.differs("one micro-batch less")
    window = zpasses.coalesce_grad_reduction(compiled) if program.window else None
    with window or contextlib.nullcontext():
        for micro in range(count):
            model.order = ("a", "b", "c")
            if injector.differs("reads in another order"):
                model.order = ("b", "a", "c")
            elif injector.differs("reads another layer"):
                model.order = ("a", "c", "c")
            elif injector.differs("skips a layer"):
                model.order = ("a", "b")
            injector.reach("before forward")
            x = _data(program, dist.get_rank(), injector.step, micro)
            if injector.differs("another batch size"):
                x = torch.cat([x, x])  # the mean of the loss stays what it was
            y = compiled(x)
            y.register_hook(lambda grad: injector.reach("in backward"))
            injector.reach("before backward")
            _loss(y).backward()


_SINGLE = {
    stage: f"merge-reads,gather-params,reduce-grads,{kept},defer-reduction"
    for stage, kept in {1: "cache-params", 2: "cache-params", 3: "reshard-after-forward"}.items()
}
"""Pipelines with a collective per parameter."""


def _data(program: Program, rank: int, step: int, micro: int) -> Tensor:
    seed = (rank * program.steps + step) * 16 + micro
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


def _loss(y: Tensor) -> Tensor:
    return y.square().mean()


def _micro_batches(program: Program, rank: int, step: int) -> int:
    """How many micro-batches a rank runs in a step, if the right parameters depend on it: a window
    reduces once, after however many micro-batches each rank had.
    """
    fault, count = program.fault, program.micro_batches
    if program.window and (rank, step) == (fault.rank, fault.step):
        count += fault.kind == "one more micro-batch"
        count -= fault.kind == "one micro-batch less"
    return count


def _reference(model: _Layers, program: Program) -> list[dict[str, Tensor]]:
    """Parameters of unsharded training on the data of all ranks, after 0, 1, ... steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

    def now() -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    found = [now()]
    for step in range(program.steps):
        for rank in range(program.ranks):
            for micro in range(_micro_batches(program, rank, step)):
                (_loss(model(_data(program, rank, step, micro))) / program.ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(now())
    return found


def _equals(model: _Layers, expected: dict[str, Tensor]) -> bool:
    """Compare local shards, because a gather could wait for a rank that is gone."""
    for name, param in model.named_parameters():
        local, full = param.detach(), expected[name]
        if isinstance(local, DTensor):
            full, local = own_part(full, local), local.to_local()
        if local.shape != full.shape or not torch.allclose(local, full, rtol=1e-4, atol=1e-5):
            return False
    return True
