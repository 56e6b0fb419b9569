"""Compares what two runs of one program returned, from the journals that the runs wrote. It does
not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NEGLIGIBLE = 1e-3
"""A tensor whose norm is smaller than this fraction of the largest norm of its call is compared
relative to that fraction, because it may be zero except for rounding.
"""


@dataclass(frozen=True)
class Journal:
    """What one rank recorded."""

    pipelines: Mapping[str, tuple[str, ...]]
    """Compile -> its passes as text, in execution order."""
    calls: Sequence[Mapping[str, Any]]
    """Records of the compiled calls, in order."""


def read_journals(folder: Path) -> dict[str, Journal]:
    """Rank -> its journal. Incomplete lines of a rank that died are skipped."""
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
    """A description of the first value in which a trial differs from the reference; None if there
    is none.

    Args:
        tolerance: largest difference, relative to the norm of the tensor.
    """
    for rank, expected in reference.items():
        actual = trial.get(rank)
        if actual is None:
            return f"{rank} returned nothing"
        for number, (ours, theirs) in enumerate(zip(actual.calls, expected.calls, strict=False)):
            where = f"{rank}, call {number + 1} ({theirs['call']})"
            if ours["call"] != theirs["call"]:
                return f"{rank}, call {number + 1}: is {ours['call']}; expected {theirs['call']}"
            found = _difference(ours["values"], theirs["values"], tolerance)
            if found:
                return f"{where}, {found}"
        if len(actual.calls) != len(expected.calls):
            return f"{rank} made {len(actual.calls)} compiled calls; expected {len(expected.calls)}"
    return None


def _difference(ours: Sequence[Any], theirs: Sequence[Any], tolerance: float) -> str | None:
    if len(ours) != len(theirs):
        return f"returned {len(ours)} values; expected {len(theirs)}"
    largest = max((each["norm"] for each in theirs if each is not None), default=0.0)
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            continue  # a gradient that is still pending in one of the runs
        if (a["shape"], a["dtype"]) != (b["shape"], b["dtype"]):
            return f"value {place} is {a['dtype']}{a['shape']}; expected {b['dtype']}{b['shape']}"
        if a["not_finite"] != b["not_finite"]:
            return (
                f"value {place} has {a['not_finite']} infinities or NaNs; expected "
                f"{b['not_finite']}"
            )
        scale = max(a["norm"], b["norm"], _NEGLIGIBLE * largest)
        apart = max(abs(a[key] - b[key]) for key in ("norm", "weighted"))
        if apart > tolerance * scale:
            return (
                f"value {place} ({b['dtype']}{b['shape']}) differs by {apart / scale:.2g} of its "
                f"norm, more than {tolerance:g}"
            )
    return None
