"""What the suites share: their configuration, the result of one case, and how shards compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

Outcome = Literal["equal", "refused", "wrong", "hang", "crash"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
BAD: tuple[Outcome, ...] = ("wrong", "hang", "crash")
"""Outcomes that are bugs."""


@dataclass(frozen=True)
class StressConfig:
    """What all cases of a run have in common."""

    scratch: Path
    """Folder for the files of cases. It exists, and is deleted after the run."""
    ranks: tuple[int, ...] = (2, 3)
    """Numbers of real ranks to draw from, for suites that start processes."""
    case_limit_s: float = 120.0
    """Seconds after which a case counts as hanging."""
    vote_limit_s: float = 5.0
    """The option agreement_timeout_s of training in the suite faults."""
    jobs: int = 4
    """Cases of the suite faults at a time."""
    codegen: Literal["eager", "inductor"] = "eager"
    """The option codegen of the suite programs: eager or inductor."""


@dataclass(frozen=True)
class CaseResult:
    """The outcome of one case."""

    suite: str
    kind: str
    """What was tried, for the table at the end: "truncated file", "joint graph"."""
    seed: int
    """The case is determined by its suite and this number."""
    outcome: Outcome
    """"equal": the result was right. "refused": an error of zpasses said what is wrong. "wrong":
    another result without an error. "hang": it exceeded its limit. "crash": any other exception,
    or a signal.
    """
    detail: str
    """What was drawn and what happened, in one or a few lines."""
    seconds: float
    reason: str = ""
    """The kind of a refusal, without names and numbers. The kinds are listed at the end, for a
    reader to judge whether they say what to do."""

    @property
    def is_bad(self) -> bool:
        return self.outcome in BAD


Suite = Callable[[Iterable[int], StressConfig], Iterator[CaseResult]]
"""(seeds, configuration) -> the result of one case or more for each seed, in order. A suite draws a
seed only when it starts that case, so that a time limit ends the run.
"""


def own_part(full: Tensor, like: DTensor) -> Tensor:
    """The part of a full tensor that this rank holds, if it is sharded as `like` is."""
    local = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return local.to_local()
