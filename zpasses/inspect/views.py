"""The inspector's pages about one dump: overview, listing, collectives and memory. `diffs.py` has
the pages about changes.
"""

from __future__ import annotations

import functools
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from zpasses.dumps.errors import DumpError
from zpasses.dumps.format import (
    Compile,
    Counts,
    Dump,
    Failure,
    Graph,
    Node,
    Prediction,
    Ref,
    Repr,
    Snapshot,
    Step,
)
from zpasses.inspect.communication import Communication, communication
from zpasses.inspect.find import (
    SelectedGraph,
    failure_text,
    node_named,
    select_rank,
    snapshot_of,
    step_title,
    steps_after,
)
from zpasses.inspect.listing import MAX_ITEMS, NodeFilter, lines
from zpasses.inspect.memory import Memory, memory, parameter_sizes, peaks
from zpasses.inspect.units import bytes_text, change_text, time_text
from zpasses.inspect.view import Code, Table, Text, View, table, text_of

__all__ = [
    "collectives_view",
    "list_view",
    "memory_view",
    "prediction_text",
    "show_view",
    "to_json_value",
]

_NOTE_CHARS = 320

BARS = " ▁▂▃▄▅▆▇█"


def to_json_value(value: Any) -> Any:
    """A dump's data as plain values for JSON."""
    kind: Any = type(value)
    if value is None or kind in (str, int, bool):
        return value
    if kind is float:
        return value if math.isfinite(value) else str(value)  # JSON has no infinity and no NaN
    if kind is tuple or kind is list:
        return [to_json_value(item) for item in value]
    if kind is Ref:
        return {"node": value.node}
    if kind is Repr:
        return {"repr": value.text}
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if is_dataclass(value):
        return {name: to_json_value(getattr(value, name)) for name in _shown_fields(kind)}
    return str(value)


class _NodeValues:
    """Nodes as plain values. Graphs share most of their nodes, and so do their values."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Node, dict[str, Any]]] = {}

    def __call__(self, node: Node) -> dict[str, Any]:
        if id(node) not in self._known:
            # The node is kept, so that its id() is not reused.
            self._known[id(node)] = (node, to_json_value(node))
        return self._known[id(node)][1]


@functools.cache
def _shown_fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.repr)


# --- list -----------------------------------------------------------------------------------------
def list_view(dump: Dump, rank: int | None = None) -> View:
    """Compiles, graphs and passes of one rank."""
    rank = select_rank(dump, rank)
    meta, parts, data = dump.meta, [], []
    for each in dump.ranks[rank].compiles:
        parts += _compile_parts(each)
        data.append(_compile_data(each))
    ranks = ", ".join(map(str, sorted(dump.ranks)))
    title = (
        f"{dump.path}: zpasses {meta.get('zpasses', '?')}, torch {meta.get('torch', '?')}, "
        f"world size {meta.get('world', '?')}"
    )
    message = (
        f"Rank {rank}; the dump has ranks {ranks}."
        if len(dump.ranks) > 1
        else f"Rank {rank}, the only one in the dump."
    )
    return View(
        title,
        (message, *parts),
        {
            "path": str(dump.path),
            **to_json_value(meta),
            "rank": rank,
            "ranks": sorted(dump.ranks),
            "compiles": data,
        },
    )


def _compile_parts(each: Compile) -> list[Table | Text | str]:
    info = each.info
    head = (
        f"Compile {info.name} ({each.folder}): {info.state}, codegen {info.codegen or '?'}, "
        f"target {info.target.get('name', '?')}"
    )
    rows = []
    for graph in each.graphs.values():
        for step in graph.steps:
            rows.append(_step_row(graph, step))
    columns = (
        "graph",
        "step",
        "after",
        "rewrites",
        "nodes",
        "collectives",
        "input bytes",
        "pass",
        "checks",
        "notes",
    )
    shown: list[Table | Text | str] = [Text((head, f"pipeline: {info.pipeline or '(none)'}"))]
    if rows:
        shown.append(
            table(
                columns,
                rows,
                right=("step", "rewrites", "nodes", "collectives", "input bytes", "pass", "checks"),
            )
        )
    else:
        shown.append("This compile wrote no graphs.")
    if any(graph.prediction for graph in each.graphs.values()):
        shown.append(_predictions(each))
    shown += [text_of(f"at runtime: {note}") for note in each.notes]
    if each.error is not None:
        shown.append(
            text_of(
                f"FAILED in {each.error.where or '?'}: {each.error.type}: {each.error.message}"
                f"{_raised(each.error)}"
            )
        )
    return shown


def _raised(error: Failure) -> str:
    """The line that raised an error, unless the message has it."""
    return f"\nraised at {error.raised}" if error.raised not in error.message else ""


def _predictions(each: Compile) -> Table:
    rows = [
        (
            graph.name,
            time_text(found.total_us),
            time_text(found.waited_us),
            time_text(found.possible_us),
            time_text(found.bound_us),
            bytes_text(found.peak_bytes),
            bytes_text(found.limit_bytes),
        )
        for graph in each.graphs.values()
        if (found := graph.prediction) is not None
    ]
    columns = ("graph", "achieved", "of it waiting", "possible", "bound", "peak", "budget")
    return table(columns, rows, right=columns[1:], title="Predicted time")


def prediction_text(found: Prediction) -> str:
    """One sentence about a prediction."""
    return (
        f"Achieved {time_text(found.total_us)}, possible within the budget "
        f"({bytes_text(found.limit_bytes)}) {time_text(found.possible_us)}, bound "
        f"{time_text(found.bound_us)}."
    )


def _prediction_of(each: SelectedGraph, step: Step) -> Prediction | None:
    """The prediction, if it is about the graph at this step."""
    found = each.graph.prediction
    return found if found is not None and found.number == step.number else None


def _step_row(graph: Graph, step: Step) -> tuple[Any, ...]:
    counts = _counts(graph, step)
    figures = (
        (counts["nodes"], counts["collectives"], bytes_text(counts["nbytes"]))
        if counts
        else ("", "", "")
    )
    run = step.run
    times = (run.changes, time_text(run.time_us), time_text(run.check_us)) if run else ("", "", "")
    message = f"FAILED: {step.error.type}" if step.error else "; ".join(run.notes) if run else ""
    return (
        graph.name if step.index == 0 else "",
        step.index,
        step.after or "-",
        times[0],
        *figures,
        *times[1:],
        _wrapped(message),
    )


def _wrapped(message: str) -> tuple[str, ...]:
    """The start of a message as lines of a cell. `--json` prints all of it."""
    # The time of textwrap grows with the square of a word's length.
    return tuple(textwrap.wrap(_cut(message, _NOTE_CHARS), 64))


def _counts(graph: Graph, step: Step) -> dict[str, int] | None:
    """Figures of a step. They come from the dump's events if possible, so that no graph is read."""
    if step.counts is not None:
        return asdict(step.counts)
    following = graph.steps[step.index + 1].run if step.index + 1 < len(graph.steps) else None
    if following is not None:
        return asdict(following.before)
    try:
        return asdict(Counts.of(step.snapshot)) if step.snapshot is not None else None
    except DumpError:
        # The pages of this graph report the error. The overview lists the rest.
        return None


def _compile_data(each: Compile) -> dict[str, Any]:
    graphs = []
    for graph in each.graphs.values():
        steps = [
            {
                "index": step.index,
                "level": step.level,
                "after": step.after,
                "counts": _counts(graph, step),
            }
            for step in graph.steps
        ]
        for step, entry in zip(graph.steps, steps, strict=True):
            entry |= {"run": to_json_value(step.run), "error": to_json_value(step.error)}
        about = {
            "name": graph.name,
            "of": graph.of,
            "given": list(graph.given),
            "kept": list(graph.kept),
        }
        about["prediction"] = to_json_value(graph.prediction)
        graphs.append({**about, "agreements": to_json_value(graph.agreements), "steps": steps})
    return {
        "folder": each.folder,
        **to_json_value(each.info),
        "error": to_json_value(each.error),
        "notes": list(each.notes),
        "graphs": graphs,
    }


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


# --- show -----------------------------------------------------------------------------------------
def show_view(
    picked: Sequence[SelectedGraph],
    after: str | int | None = None,
    where: NodeFilter | None = None,
    most: int | None = MAX_ITEMS,
) -> View:
    """Listings of graphs: before their passes, after one of them, or (None) after the last."""
    parts: list[Code | str] = []
    data = []
    values_of = _NodeValues()
    for each, step in steps_after(picked, after):
        snapshot = snapshot_of(each, step)
        found = lines(snapshot, where or NodeFilter(), most)
        width = min(max((len(line.code) for line in found if line.note), default=0), 88)
        some = f", {len(found)} of them shown" if len(found) < len(snapshot.nodes) else ""
        peak = bytes_text(snapshot.peak_bytes)
        head = f"# {each.title}, {step_title(step)}: {len(snapshot.nodes)} nodes{some}; peak {peak}"
        warning = [f"# {line}" for line in failure_text(step).splitlines()]
        parts.append(Code((head, *warning, *(line.text(width) for line in found))))
        if where is not None and where.params and not found:
            parts.append(_known_parameters(snapshot))
        about = {
            "rank": each.rank,
            "compile": each.compile.name,
            "graph": each.graph.name,
            "step": step.index,
            "after": step.after,
            "failure": failure_text(step),
        }
        live = dict(zip((node.id for node in snapshot.nodes), snapshot.live_bytes, strict=True))
        data.append(
            {
                **about,
                "nodes": [
                    {**values_of(line.node), "live_bytes": live[line.node.id]} for line in found
                ],
            }
        )
    return View("", tuple(parts), data)


def _known_parameters(snapshot: Snapshot) -> str:
    known = list(dict.fromkeys(name for node in snapshot.nodes for name in node.params))
    more = f", ... and {len(known) - 6} more" if len(known) > 6 else ""
    return (
        f"No node matches all conditions. The graph's parameters are {', '.join(known[:6])}{more}."
        if known
        else "No node matches all conditions. The graph has no parameters."
    )


def _unmodelled(each: SelectedGraph, step: Step) -> list[str]:
    """The message for a graph that the memory and cost models do not cover, if it is one."""
    message = (
        f"{each.title} is the graph that Dynamo captured. The memory and cost models start at the "
        "joint graph."
    )
    return [message] if step.level == "captured" else []


def _failed(step: Step) -> list[Text]:
    """The warning about a step whose pass failed, if it did."""
    return [text_of(failure_text(step))] if step.error is not None else []


# --- collectives ----------------------------------------------------------------------------------
_FIGURES = (
    "ranks",
    "bytes",
    "distance",
    "compute between",
    "time",
    "exposed",
    "queueing",
)


def collectives_view(picked: Sequence[SelectedGraph], after: str | int | None = None) -> View:
    """Tables of collectives, with totals."""
    parts: list[Table | Text | str] = []
    data = []
    for each, step in steps_after(picked, after):
        found = communication(snapshot_of(each, step))
        about = {
            "rank": each.rank,
            "compile": each.compile.name,
            "graph": each.graph.name,
            "step": step.index,
            "after": step.after,
        }
        prediction = _prediction_of(each, step)
        data.append({**about, **found.to_json(), "prediction": to_json_value(prediction)})
        parts += _unmodelled(each, step) or [
            *_failed(step),
            _collectives_table(f"{each.title}, {step_title(step)}", found),
            _totals(found),
            *([prediction_text(prediction)] if prediction is not None else []),
        ]
    return View("", tuple(parts), data)


def _collectives_table(title: str, found: Communication) -> Table:
    rows = [
        (
            row.node,
            _cut(row.kind.replace("_into_tensor", "").replace("_tensor", ""), 28),
            row.group,
            row.ranks,
            _params(row.params),
            bytes_text(row.nbytes),
            row.distance,
            time_text(row.compute_us),
            time_text(row.time_us),
            time_text(row.exposed_us),
            time_text(row.queued_us),
            row.route,
            _cut(row.decision, 40),
        )
        for row in found.rows
    ]
    headers = (
        "node",
        "kind",
        "group",
        "ranks",
        "parameters",
        "bytes",
        *_FIGURES[2:],
        "route",
        "decision",
    )
    empty = {
        at
        for at, header in enumerate(headers)
        if header in ("route", "decision", "queueing")
        and not any(row[at] not in ("", "0") for row in rows)
    }
    kept = [at for at in range(len(headers)) if at not in empty]
    return table(
        [headers[at] for at in kept],
        [[row[at] for at in kept] for row in rows],
        right=_FIGURES,
        title=title,
    )


def _params(params: Sequence[str]) -> str:
    return (
        f"{_cut(params[0], 40)} and {len(params) - 1} more"
        if len(params) > 1
        else _cut(params[0], 40)
        if params
        else ""
    )


def _totals(found: Communication) -> str:
    plan = found.schedule
    queued = sum(row.queued_us for row in found.rows)
    behind = f" ({time_text(queued)} of it queueing behind earlier collectives)" if queued else ""
    return (
        f"{_count(len(found.rows), 'collective')}, {bytes_text(found.nbytes)} of input. "
        f"Communication {time_text(plan.communication_us)}, "
        f"compute {time_text(plan.compute_us)}; exposed {time_text(plan.exposed_us)}{behind}, "
        f"hidden {plan.hidden:.0%}. Times are estimates for the target."
    )


# --- memory ---------------------------------------------------------------------------------------
def memory_view(
    picked: Sequence[SelectedGraph],
    after: str | int | None = None,
    at: str | None = None,
    limit: int = 12,
) -> View:
    """Peaks of all steps, the memory curve of one step, and the buffers that are alive at its peak
    or at the node `at`.
    """
    parts: list[Table | Text | str] = []
    data = []
    for each, step in steps_after(picked, after):
        snapshot = snapshot_of(each, step)
        if not snapshot.nodes:
            continue
        found = memory(
            snapshot,
            node_named(snapshot, at) if at is not None else None,
            parameter_sizes(each.compile),
        )
        steps = peaks(each.graph)
        before = [steps[0].peak_bytes, *(peak.peak_bytes for peak in steps)]
        rows = [
            (
                peak.step,
                f"{peak.after or '-'}{' (FAILED)' if peak.failed else ''}",
                bytes_text(peak.peak_bytes),
                change_text(was, peak.peak_bytes),
                peak.at,
            )
            for was, peak in zip(before, steps, strict=False)
        ]
        curves = table(
            ("step", "after", "peak", "change", "at node"),
            rows,
            ("step", "peak", "change"),
            title=each.title,
        )
        parts += _unmodelled(each, step) or [
            curves,
            *_failed(step),
            *_alive_parts(found, step_title(step), limit),
        ]
        about = {
            "rank": each.rank,
            "compile": each.compile.name,
            "graph": each.graph.name,
            "step": step.index,
            "after": step.after,
        }
        data.append({**about, **found.to_json(), "steps": [asdict(peak) for peak in steps]})
    return View("", tuple(parts), data)


def _alive_parts(found: Memory, title: str, limit: int) -> list[Table | Text | str]:
    where = (
        "At the peak"
        if found.nbytes == found.peak_bytes
        else f"Of the peak's {bytes_text(found.peak_bytes)}"
    )
    curve = f"{sparkline(found.live_bytes)}  {bytes_text(found.peak_bytes)}"
    alive = f"{bytes_text(found.nbytes)} are alive while {found.at.name} runs"
    message = Text((f"{title}:", curve, f"{where}, {alive}."))
    whole = max(found.nbytes, 1)
    by_kind = list(found.by_kind.items())
    most = limit or None
    kinds = table(
        ("kind", "bytes", "share"),
        [(kind, bytes_text(size), f"{size / whole:.0%}") for kind, size in by_kind[:most]],
        ("bytes", "share"),
    )
    largest = [
        (one.node, one.kind, bytes_text(one.nbytes), _params(one.params), one.last)
        for one in found.alive
        if one.nbytes
    ]
    more = (
        f"and {len(largest) - limit} smaller buffers (--limit 0 shows all)."
        if limit and len(largest) > limit
        else ""
    )
    buffers = table(
        ("allocated by", "kind", "bytes", "parameters", "last use"),
        largest[:most],
        ("bytes",),
    )
    shared = list(found.by_parameter.items())
    by_param = table(
        ("parameter", "bytes"),
        [(name, bytes_text(size)) for name, size in shared[:most]],
        ("bytes",),
    )
    return [message, kinds, buffers, more, *([by_param] if shared else [])]


def sparkline(live_bytes: Sequence[int], width: int = 72) -> str:
    """A curve as a line of bars. Each bar is the maximum of its section."""
    width = min(width, len(live_bytes))
    peak = max(live_bytes, default=0)
    if not width or not peak:
        return ""
    edges = [len(live_bytes) * at // width for at in range(width + 1)]
    most = [max(live_bytes[start:end]) for start, end in itertools.pairwise(edges)]
    return "".join(BARS[-(-size * (len(BARS) - 1) // peak)] for size in most)
