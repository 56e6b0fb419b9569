"""Suite `faults`: one rank of a training run on real gloo ranks meets a fault.

Every other rank must end with the right numbers, or with an error that names the rank and comes
within the time limit of the votes and a slack.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from zpasses.testing.ranks import Outcome as RankOutcome
from zpasses.testing.ranks import run_in_fresh_ranks
from zpasses.tools.stress.cases import CaseResult, Outcome, StressConfig
from zpasses.tools.stress.fault_program import (
    COMPILE_PLACES,
    ENDINGS,
    PLACES,
    Fault,
    Program,
    RankResult,
    train,
)

__all__ = ["draw", "run"]

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
