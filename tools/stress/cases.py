"""What the suites share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["CaseResult", "OutcomeKind", "StressConfig"]

OutcomeKind = Literal["equal", "refused", "wrong", "hang", "crash"]


@dataclass(frozen=True)
class CaseResult:
    suite: str
    kind: str
    seed: int
    outcome: OutcomeKind
    detail: str
    seconds: float


@dataclass(frozen=True)
class StressConfig:
    ranks: tuple[int, ...] = (2, 3)
    limit_s: float = 5.0
    jobs: int = 4
    scratch: Path | None = None
