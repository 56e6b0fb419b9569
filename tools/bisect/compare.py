"""What two runs of one program returned, as they wrote it down themselves, compared. Loads no
torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Journal", "first_difference", "read_journals"]

_NOTHING = 1e-3
"""A tensor this small beside the largest of its call is compared with that: it may be zero but for
rounding."""


@dataclass(frozen=True)
class Journal:
    """What one rank wrote down."""

    pipelines: Mapping[str, tuple[str, ...]]
    """Compile -> its passes in the order in which they run, as text."""
    calls: Sequence[Mapping[str, Any]]


def read_journals(folder: Path) -> dict[str, Journal]:
    """Rank -> its journal. A line that a dying process wrote in part is passed over."""
    found = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        records = []
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
        pipelines = {
            record["compile"]: tuple(record["pipeline"])
            for record in records
            if "compile" in record
        }
        found[path.stem] = Journal(pipelines, [record for record in records if "call" in record])
    return found


def first_difference(
    reference: Mapping[str, Journal], trial: Mapping[str, Journal], tolerance: float
) -> str | None:
    """Where a trial first returned something else, in words; None if nowhere.

    Args:
        tolerance: how far values may lie apart, relative to the norm of their tensor.
    """
    for rank, expected in reference.items():
        actual = trial.get(rank)
        if actual is None:
            return f"{rank} returned nothing"
        for number, (ours, theirs) in enumerate(zip(actual.calls, expected.calls, strict=False)):
            where = f"{rank}, call {number + 1} ({theirs['call']})"
            if ours["call"] != theirs["call"]:
                return (
                    f"{rank}, call {number + 1}: is of {ours['call']}, and was of {theirs['call']}"
                )
            found = _difference(ours["values"], theirs["values"], tolerance)
            if found:
                return f"{where}, {found}"
        if len(actual.calls) != len(expected.calls):
            return (
                f"{rank} made {len(actual.calls)} compiled calls, and {len(expected.calls)} before"
            )
    return None


def _difference(ours: Sequence[Any], theirs: Sequence[Any], tolerance: float) -> str | None:
    if len(ours) != len(theirs):
        return f"returned {len(ours)} values, and {len(theirs)} before"
    largest = max((each["norm"] for each in theirs if each is not None), default=0.0)
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            continue  # a gradient that waits for its reduction in one of them
        if (a["shape"], a["dtype"]) != (b["shape"], b["dtype"]):
            return f"value {place} is {a['dtype']}{a['shape']}, and was {b['dtype']}{b['shape']}"
        if a["not_finite"] != b["not_finite"]:
            return (
                f"value {place} has {a['not_finite']} infinities or NaNs, and had {b['not_finite']}"
            )
        scale = max(a["norm"], b["norm"], _NOTHING * largest)
        apart = max(abs(a[key] - b[key]) for key in ("norm", "weighted"))
        if apart > tolerance * scale:
            return f"value {place} ({b['dtype']}{b['shape']}) differs by {apart / scale:.2g} of its norm, more than {tolerance:g}"
    return None
