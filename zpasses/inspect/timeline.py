"""The estimated schedule as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zpasses.dumps.nodes import Node, Snapshot, Source
from zpasses.errors import some_of
from zpasses.inspect.escape import one_line, one_line_values
from zpasses.inspect.listing import op_text
from zpasses.inspect.model_sources import sources_of
from zpasses.inspect.modules import modules_of
from zpasses.inspect.node_spans import CollectiveSpan, schedule

_COMPUTE = 1
"""Thread id of the compute track. The tracks of process groups follow."""


TracedGraph = tuple[str, Snapshot, Mapping[str, Source]]
"""Title, graph, and the line that reads each parameter."""


def chrome_trace(graphs: Sequence[TracedGraph]) -> dict[str, Any]:
    """A trace with one process per graph. The graphs follow each other in time.

    Each process has a track for compute, and one for each process group. Stalls are slices of the
    compute track. Arrows lead from the start of a collective to its waits. Bytes alive are a
    counter. Times are in microseconds.

    A slice has the source lines, modules and parameters of its node. A collective of a bucket has
    those of all its parameters.
    """
    events: list[dict[str, Any]] = []
    offset = 0.0
    for number, (title, snapshot, sources) in enumerate(graphs, start=1):
        plan = schedule(snapshot)
        tracks = {group: thread for thread, group in enumerate(plan.groups, start=_COMPUTE + 1)}
        titles = plan.group_titles
        named = dict.fromkeys(tracks.values(), "communication")
        if len(tracks) > 1 or plan.has_labels:
            for group, thread in tracks.items():
                named[thread] += f", group {titles[group]}"
        events += _named(number, "process", title, number)
        for thread, name in {_COMPUTE: "compute", **named}.items():
            events += _named(number, "thread", name, thread, tid=thread)
        live = dict(zip((node.id for node in snapshot.nodes), snapshot.live_bytes, strict=True))
        for span in plan.compute:
            node, start = span.node, offset + span.start_us
            about = {"op": node.target, "bytes": node.nbytes, "params": ", ".join(node.params)}
            about |= _place(node, sources)
            named_op = node.name, op_text(node.target)
            events.append(
                _slice(number, _COMPUTE, *named_op, start, span.end_us - span.start_us, about)
            )
            counter = {"pid": number, "ph": "C", "name": "bytes alive", "ts": start}
            events.append({**counter, "args": {"bytes": live[node.id]}})
        for collective in plan.collectives:
            track = tracks[collective.group]
            place = _place(collective.node, sources)
            events += _collective_events(number, track, collective, place, offset, len(events))
        offset += plan.total_us
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(
    process: int, what: str, name: str, place: int, **where: int
) -> Iterator[dict[str, Any]]:
    """The name of a process or thread, and its place among the others."""
    for key, args in (("name", {"name": one_line(name)}), ("sort_index", {"sort_index": place})):
        yield {"pid": process, **where, "ph": "M", "name": f"{what}_{key}", "args": args}


def _collective_events(
    process: int,
    track: int,
    span: CollectiveSpan,
    place: Mapping[str, str],
    offset: float,
    key: int,
) -> Iterator[dict[str, Any]]:
    node, collective, start = span.node, span.node.collective, offset + span.start_us
    assert collective is not None
    params = ", ".join(node.params)
    about = {
        "kind": collective.kind,
        "group": collective.title,
        "ranks": collective.ranks,
        "bytes": collective.nbytes,
        "params": params,
        "exposed_us": span.exposed_us,
        "queued_us": span.queued_us,
        **place,
        "route": collective.route,
        "decision": collective.decision,
    }
    yield _slice(process, track, node.name, collective.kind, start, span.time_us, about)
    for at, stall in enumerate(span.stalls):
        about = {"awaits": node.name, "params": params, **place}
        stalled, length = offset + stall.start_us, stall.end_us - stall.start_us
        named = f"exposed: {node.name}", "exposed"
        waiting = _slice(process, _COMPUTE, *named, stalled, length, about)
        yield {**waiting, "cname": "terrible"}
        flow = {"pid": process, "cat": "wait", "name": "wait", "id": f"{key}.{at}"}
        yield {**flow, "tid": track, "ph": "s", "ts": start}
        yield {**flow, "tid": _COMPUTE, "ph": "f", "bp": "e", "ts": stalled}


_SHOWN = 16
"""Source lines and modules of a slice."""


def _place(node: Node, sources: Mapping[str, Source]) -> dict[str, str]:
    """Source lines and modules of a node, or of its parameters; empty texts if unknown."""
    lines = dict.fromkeys(f"{each.file}:{each.line}" for each in sources_of(node, sources))
    found = {"source": tuple(lines), "module": modules_of(node)}
    return {key: some_of(texts, _SHOWN) for key, texts in found.items()}


def _slice(
    process: int,
    thread: int,
    name: str,
    category: str,
    start: float,
    length: float,
    about: dict[str, Any],
) -> dict[str, Any]:
    shown = {key: one_line_values(value) for key, value in about.items() if value not in ("", None)}
    return {
        "pid": process,
        "tid": thread,
        "ph": "X",
        "name": one_line(name),
        "cat": one_line(category),
        "ts": start,
        "dur": length,
        "args": shown,
    }
