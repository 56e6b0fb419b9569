"""Tables and JSON of the results."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import zpasses
from zpasses.tools.bench.compiling import CompileReport
from zpasses.tools.bench.device import DeviceReport
from zpasses.tools.bench.overhead import OverheadReport
from zpasses.tools.bench.schedule import ScheduleReport, ScheduleRow
from zpasses.tools.bench.train import PeerResult, TrainReport

__all__ = [
    "compile_table",
    "device_table",
    "overhead_table",
    "schedule_table",
    "train_table",
    "write_json",
]

_MIB = float(1 << 20)


_Report = TrainReport | CompileReport | OverheadReport | ScheduleReport | DeviceReport


def write_json(path: str, suite: str, report: _Report) -> None:
    """Write all results, and the versions that they were measured with."""
    about = {
        "torch": torch.__version__,
        "zpasses": zpasses.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    Path(path).write_text(
        json.dumps({"suite": suite, "versions": about, **dataclasses.asdict(report)}, indent=2)
        + "\n"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    return tabulate(rows, headers="keys", floatfmt=".1f", missingval="-", disable_numparse=False)


# --- train ----------------------------------------------------------------------------------------
def train_table(report: TrainReport) -> str:
    """One line per peer, then the bounds, and the peers that were skipped or failed."""
    config = report.config
    rows = [_train_row(result, config.baseline, config.backwards) for result in report.peers]
    lines = [
        tabulate(rows, headers="keys", missingval="-", disable_numparse=True, stralign="right")
        if rows
        else "No peer ran."
    ]
    lines += ["", *_bounds(report)]
    lines += [f"skipped {name}: {reason}" for name, reason in report.skipped.items()]
    lines += [f"FAILED {name}: {reason}" for name, reason in report.failed.items()]
    return "\n".join(lines)


def _train_row(result: PeerResult, baseline: str, backwards: int) -> dict[str, str]:
    held = {
        "in window MiB": f"{result.window_bytes / _MIB:.1f}",
        "reduced MiB": f"{result.after_bytes / _MIB:.1f}",
    }
    return {
        "peer": result.peer,
        "step ms": f"{result.step_s * 1e3:.1f}",
        f"/ {baseline}": "-" if result.ratio is None else f"{result.ratio:.2f}",
        "comm ms": "-" if result.communication_s is None else f"{result.communication_s * 1e3:.1f}",
        "waste ms": "-" if result.waste_s is None else f"{result.waste_s * 1e3:.1f}",
        "peak MiB": f"{result.peak_bytes / _MIB:.1f}",
        "peak ratio": "-" if result.peak_ratio is None else f"{result.peak_ratio:.2f}",
        "fwd+bwd MiB": f"{result.backward_peak_bytes / _MIB:.1f}",
        **(held if backwards > 1 else {}),
        "rest MiB": f"{result.resting_bytes / _MIB:.1f}",
        "collectives": f"{sum(result.collectives.values()):g}",
        "sent MiB": f"{sum(result.sent_bytes.values()) / _MIB:.1f}",
        "compile s": f"{result.compile_s:.1f}",
        "passes s": f"{result.passes_s:.2f}",
        "checks s": f"{result.checks_s:.2f}",
        "share": f"{result.passes_share:.1%}",
        "loss": f"{result.losses[-1]:.4f}",
    }


def _bounds(report: TrainReport) -> list[str]:
    lines = []
    if report.compute_s is not None:
        lines.append(f"compute without communication: {report.compute_s * 1e3:.1f} ms")
    if report.bounds:
        times = ", ".join(
            f"{kind.replace('_', '-')} {time_s * 1e3:.1f} ms"
            for kind, time_s in report.bounds["time_s"].items()
        )
        lines.append(
            f"bare collectives over the {report.bounds['bytes'] / 1e6:.1f} MB of all parameters: "
            f"{times}"
        )
        lines.append(
            "comm ms: time of the sent bytes at those speeds. waste ms: step - compute - comm; "
            "negative if they overlap."
        )
    return lines


# --- overhead -------------------------------------------------------------------------------------
def overhead_table(report: OverheadReport) -> str:
    """Microseconds per parameter and step, compared with torch.compile on the plain model."""
    rows = [
        {
            "codegen": result.codegen,
            "zero stage": result.stage,
            "plain us/step": result.plain_us,
            "zpasses us/step": result.step_us,
            "overhead us/param": f"{result.overhead_us:.2f}",
            **{f"{name} us/param": f"{value:.2f}" for name, value in result.parts_us.items()},
        }
        for result in report.results
    ]
    return f"{report.params} parameters, one rank, forward and backward\n" + _table(rows)


# --- schedule -------------------------------------------------------------------------------------
def schedule_table(report: ScheduleReport) -> str:
    """One line per step: milliseconds and GiB of each scheduler, then the ratios of the targets."""
    lines = []
    if report.rows:
        rows = [_schedule_row(row) for row in report.rows]
        lines.append(tabulate(rows, headers="keys", disable_numparse=True, stralign="right"))
        lines.append("")
        lines.append("The same, by Inductor's own estimates, in milliseconds:")
        rows = [
            _schedule_step(row)
            | {point.scheduler: f"{point.inductor_ms:.1f}" for point in row.points}
            for row in report.rows
        ]
        lines.append(tabulate(rows, headers="keys", disable_numparse=True, stralign="right"))
    for row in report.rows:
        step = ", ".join(_schedule_step(row).values())
        lines += [f"FAILED {name} ({step}): {reason}" for name, reason in row.failed.items()]
    lines += [f"FAILED {step}: {reason}" for step, reason in report.failed.items()]
    return "\n".join(lines)


def _schedule_step(row: ScheduleRow) -> dict[str, str]:
    return {
        "model": row.model,
        "ranks": str(row.ranks),
        "tokens": str(row.tokens),
        "target": row.target,
    }


def _schedule_row(row: ScheduleRow) -> dict[str, str]:
    gib = float(1 << 30)
    bound = sum(row.bound_ms)
    ratios = {}
    for point in row.points:
        if point.scheduler.startswith("zero3"):
            ratios[f"{point.scheduler} / bound"] = f"{point.total_ms / bound:.3f}"
        if point.own_bound_ms is not None:
            ratios[f"{point.scheduler} / bound"] = f"{point.total_ms / bound:.3f}"
            ratios["its own bound"] = f"{point.own_bound_ms:.1f}"
    ours = next((point for point in row.points if point.scheduler == "zero3"), None)
    peers = [
        point.total_ms
        for point in row.points
        if not point.scheduler.startswith(("zero3", "budget"))
        and ours is not None
        and point.peak_bytes >= ours.peak_bytes
    ]
    if ours is not None and peers:
        ratios["zero3 / best peer"] = f"{ours.total_ms / min(peers):.2f}"
    return {
        **_schedule_step(row),
        **{
            point.scheduler: f"{point.total_ms:.1f}, {point.peak_bytes / gib:.1f}"
            for point in row.points
        },
        "bound": f"{bound:.1f}",
        **ratios,
    }


# --- device ---------------------------------------------------------------------------------------
def device_table(report: DeviceReport) -> str:
    """One line per peer."""
    config, rows = report.config, []
    for result in report.results:
        rows.append(
            {
                "peer": result.peer,
                "step ms": f"{result.step_s * 1e3:.1f}",
                "spread": f"{min(result.rounds_s) * 1e3:.1f} to {max(result.rounds_s) * 1e3:.1f}",
                "ratio": f"{result.ratio(report.results[0]):.2f}",
                "at rest MiB": f"{result.resting_bytes / _MIB:.0f}",
                "peak MiB": "-" if result.peak_bytes is None else f"{result.peak_bytes / _MIB:.0f}",
                "first step s": f"{result.compile_s:.1f}",
            }
        )
    lines = [
        f"one rank of {config.ranks} on {report.device_name}, which communicates nothing; bf16, "
        f"{config.size.layers} layers of width {config.size.width}, {config.size.batch} x "
        f"{config.size.seq} tokens"
    ]
    lines += (
        [tabulate(rows, headers="keys", disable_numparse=True, stralign="right")] if rows else []
    )
    lines += [f"FAILED {peer}: {reason}" for peer, reason in report.failed.items()]
    return "\n".join(lines)


# --- compile --------------------------------------------------------------------------------------
def compile_table(report: CompileReport) -> str:
    """One line per peer and number of layers. Ratios compare medians with the first peer's."""
    first = {each.layers: each for each in reversed(report.results)}
    lines = [
        {
            "layers": each.layers,
            "peer": each.peer,
            "cold s, median": each.cold_median_s,
            "cold least s": min(each.cold_s),
            "cold most s": max(each.cold_s),
            "cold, ratio": f"{each.cold_median_s / first[each.layers].cold_median_s:.2f}x",
            "warm s, median": each.warm_median_s,
            "warm least s": min(each.warm_s),
            "warm most s": max(each.warm_s),
            "warm, ratio": f"{each.warm_median_s / first[each.layers].warm_median_s:.2f}x",
            "whole start s": each.start_median_s,
            "start, ratio": f"{each.start_median_s / first[each.layers].start_median_s:.2f}x",
            "step s": f"{statistics.median(each.step_s):.2f}",
            "graphs": each.graphs,
            "generated": each.generated,
            "again": each.generated_warm,
            "caches MiB": each.cache_bytes / _MIB,
        }
        for each in report.results
    ]
    return "\n".join([_table(lines), *(f"{peer}: {why}" for peer, why in report.skipped.items())])
