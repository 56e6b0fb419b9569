"""Requests of `zpasses measure`, `tune` and `bisect` to the training program that they run.

A command starts the program with the environment variable `ZPASSES_PROBE`, which names a folder
with a request. zpasses does in the program what the request says. When a rank is done, it writes a
report into the folder. This module does not import torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from zpasses.errors import OptionError

ENVIRONMENT_VARIABLE = "ZPASSES_PROBE"


@dataclass(frozen=True)
class MeasureRequest:
    """What `zpasses measure` records."""

    output: str
    """Folder for the traces."""
    warmup: int
    steps: int
    """Optimizer steps before the recording, and within it."""


@dataclass(frozen=True)
class TuningRequest:
    """What one run of `zpasses tune` tries."""

    options: Mapping[str, str] | None
    """Texts of options that replace the program's choice of passes and memory; None keeps it."""
    warmup: int
    steps: int
    """Optimizer steps that are not timed, and then those that are."""
    budgets: int
    """Number of memory budgets to plan, so that the next runs can try them."""


@dataclass(frozen=True)
class BisectTrial:
    """One run of `zpasses bisect`."""

    passes: int | None
    """How many passes of each pipeline to run; None runs all."""
    calls: int
    """How many calls of compiled code to record."""


Request = MeasureRequest | TuningRequest | BisectTrial
R = TypeVar("R", MeasureRequest, TuningRequest, BisectTrial)


# --- in the program -------------------------------------------------------------------------------
def is_probed() -> bool:
    """Whether a command runs this program."""
    return bool(os.environ.get(ENVIRONMENT_VARIABLE))


def requested(kind: type[R]) -> tuple[Path, R] | None:
    """Returns the folder and the request, if a command with requests of this class runs this
    program.

    Raises:
        OptionError: if the environment variable does not hold what commands set.
    """
    name = os.environ.get(ENVIRONMENT_VARIABLE)
    if not name:
        return None
    folder, path = Path(name), Path(name) / f"{kind.__name__}.json"
    if not folder.is_dir():
        raise OptionError(
            f"{ENVIRONMENT_VARIABLE}={name!r} is not what commands of zpasses set; unset it."
        )
    return (folder, kind(**json.loads(path.read_text()))) if path.exists() else None


def write_report(folder: Path, rank: int, world: int, **values: Any) -> None:
    """Write that a rank is done, with JSON-compatible values."""
    temporary = folder / f".rank{rank}"
    temporary.write_text(json.dumps({"rank": rank, "world": world, **values}))
    temporary.replace(folder / f"rank{rank}.json")


# --- in the command -------------------------------------------------------------------------------
def write_request(folder: Path, request: Request) -> dict[str, str]:
    """Write a request. Returns the environment variable for the program."""
    (folder / f"{type(request).__name__}.json").write_text(json.dumps(asdict(request)))
    return {ENVIRONMENT_VARIABLE: str(folder)}


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Returns the reports that have been written, by rank."""
    found = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    return sorted(found, key=lambda each: int(each["rank"]))


def all_reported(folder: Path) -> bool:
    """Whether all ranks have written their reports."""
    reports = read_reports(folder)
    return bool(reports) and len(reports) == reports[0]["world"]
