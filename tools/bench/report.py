"""Tables and JSON of the results."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import zpasses

MIB = float(1 << 20)


def write_json(path: str, suite: str, report: Any) -> None:
    """Write all results of a suite, and the versions that they were measured with.

    Args:
        report: a dataclass.
    """
    about = {
        "torch": torch.__version__,
        "zpasses": zpasses.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    results = {"suite": suite, "versions": about, **dataclasses.asdict(report)}
    Path(path).write_text(json.dumps(results, indent=2) + "\n")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per row. A float has one decimal, and None is shown as "-"."""
    shown = [{name: _cell(value) for name, value in row.items()} for row in rows]
    return tabulate(shown, headers="keys", missingval="-", disable_numparse=True, stralign="right")


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def two_decimals(value: float | None) -> str | None:
    """A ratio, or None if there is none."""
    return None if value is None else f"{value:.2f}"


def report_text(report: Any, *parts: str | Sequence[Mapping[str, Any]]) -> str:
    """The output of a suite: lines and tables, then what was skipped and what failed."""
    lines = [part if isinstance(part, str) else table(part) for part in parts]
    for word, field in (("skipped", "skipped"), ("FAILED", "failed")):
        found: Mapping[str, str] = getattr(report, field, {})
        lines += [f"{word} {name}: {reason}" for name, reason in found.items()]
    return "\n".join(lines)
