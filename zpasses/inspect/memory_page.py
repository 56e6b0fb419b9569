"""The inspector's page about memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict

from zpasses.errors import some_of
from zpasses.inspect.find import (
    SelectedGraph,
    is_executed,
    node_named,
    snapshot_of,
    step_title,
    steps_after,
)
from zpasses.inspect.graph_notes import (
    NEVER_RUNS,
    capacity_warning,
    variant_text,
)
from zpasses.inspect.memory import Memory, memory, parameter_sizes, peaks
from zpasses.inspect.modules import fold_modules
from zpasses.inspect.page_parts import about_step, failure_parts, unmodelled
from zpasses.inspect.units import bytes_text, change_text
from zpasses.inspect.view import Table, Text, View, table

BARS = " ▁▂▃▄▅▆▇█"


def memory_view(
    picked: Sequence[SelectedGraph],
    after: str | int | None = None,
    at: str | None = None,
    limit: int = 12,
    by: str = "buffer",
) -> View:
    """Peaks of all steps, the memory curve of one step, and the buffers that are alive at its peak
    or at the node `at`: each buffer, or their sums by module.

    Args:
        by: "buffer" or "module".
    """
    parts: list[Table | Text | str] = []
    data = []
    for each, step in steps_after(picked, after):
        snapshot = snapshot_of(each, step)
        if not snapshot.nodes:
            continue
        moment = node_named(snapshot, at) if at is not None else None
        found = memory(snapshot, moment, parameter_sizes(each.compile))
        steps = peaks(each.graph)
        before = [steps[0].peak_bytes, *(peak.peak_bytes for peak in steps)]
        rows = []
        for was, peak in zip(before, steps, strict=False):
            after_pass = f"{peak.after or '-'}{' (FAILED)' if peak.failed else ''}"
            sizes = (bytes_text(peak.peak_bytes), change_text(was, peak.peak_bytes))
            rows.append((peak.step, after_pass, *sizes, peak.at))
        headers = ("step", "after", "peak", "change", "at node")
        curves = table(headers, rows, ("step", "peak", "change"), title=each.title)
        parts += unmodelled(each, step) or [
            curves,
            *failure_parts(step),
            "" if is_executed(each.graph.name) else NEVER_RUNS,
            variant_text(each.graph),
            capacity_warning(each.compile, each.graph.name, snapshot.peak_bytes),
            *_alive_parts(found, step_title(step), limit, by),
        ]
        about = {**about_step(each, step), "executed": is_executed(each.graph.name)}
        data.append({**about, **found.to_json(), "steps": [asdict(peak) for peak in steps]})
    return View("", tuple(parts), data)


def _alive_parts(found: Memory, title: str, limit: int, by: str) -> list[Table | Text | str]:
    peak = bytes_text(found.peak_bytes)
    where = "At the peak" if found.nbytes == found.peak_bytes else f"Of the peak's {peak}"
    curve = f"{sparkline(found.live_bytes)}  {peak}"
    alive = f"{bytes_text(found.nbytes)} are alive while {found.at.name} runs"
    message = Text((f"{title}:", curve, f"{where}, {alive}."))
    whole = max(found.nbytes, 1)
    by_kind = list(found.by_kind.items())
    most = limit or None
    rows = [(kind, bytes_text(size), f"{size / whole:.0%}") for kind, size in by_kind[:most]]
    kinds = table(("kind", "bytes", "share"), rows, ("bytes", "share"))
    if by == "module":
        return [message, kinds, *_module_parts(found, limit)]
    return [message, kinds, *_buffer_parts(found, limit)]


def _buffer_parts(found: Memory, limit: int) -> list[Table | Text | str]:
    most = limit or None
    largest = [
        (one.node, one.kind, bytes_text(one.nbytes), some_of(one.params), one.last)
        for one in found.alive
        if one.nbytes
    ]
    headers = ("allocated by", "kind", "bytes", "parameters", "last use")
    buffers = table(headers, largest[:most], ("bytes",), yields=("last use",))
    shared = list(found.by_parameter.items())
    rows = [(name, bytes_text(size)) for name, size in shared[:most]]
    by_param = table(("parameter", "bytes"), rows, ("bytes",))
    more = _more(len(largest), limit, "smaller buffers")
    parts: list[Table | Text | str] = [buffers, more]
    return [*parts, by_param, _more(len(shared), limit, "smaller parameters")] if shared else parts


def _module_parts(found: Memory, limit: int) -> list[Table | Text | str]:
    """Bytes alive by module. Equal layers are one row."""
    folded = fold_modules(found.by_module)
    whole = max(found.nbytes, 1)
    rows = []
    for each in folded[: limit or None]:
        sizes = " to ".join(dict.fromkeys(map(bytes_text, (each.least, each.most))))
        share = (bytes_text(each.total), f"{each.total / whole:.0%}")
        odd = some_of(each.odd) if len(each.odd) < len(each.members) else ""
        rows.append((each.name or "(no module)", len(each.members), *share, sizes, odd))
    headers = ("module", "times", "bytes", "share", "each", "not as the others")
    last = headers[5:]
    modules = table(headers, rows, headers[1:5], yields=last, below=last)
    return [modules, _more(len(folded), limit, "smaller modules")]


def _more(count: int, limit: int, what: str) -> str:
    return f"and {count - limit:,} {what} (--limit 0 shows all)." if limit and count > limit else ""


def sparkline(live_bytes: Sequence[int], width: int = 68) -> str:
    """A curve as a line of bars. Each bar is the maximum of its section."""
    width = min(width, len(live_bytes))
    peak = max(live_bytes, default=0)
    if not width or not peak:
        return ""
    edges = [len(live_bytes) * at // width for at in range(width + 1)]
    most = [max(live_bytes[start:end]) for start, end in itertools.pairwise(edges)]
    return "".join(BARS[-(-size * (len(BARS) - 1) // peak)] for size in most)
