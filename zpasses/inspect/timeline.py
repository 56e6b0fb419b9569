"""The estimated schedule as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zpasses.dumps.format import Node, Snapshot, Source
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
        plan, title = schedule(snapshot), one_line(title)
        base = {"pid": number}
        events.append({**base, "ph": "M", "name": "process_name", "args": {"name": title}})
        events.append(
            {**base, "ph": "M", "name": "process_sort_index", "args": {"sort_index": number}}
        )
        tracks = {group: thread for thread, group in enumerate(plan.groups, start=_COMPUTE + 1)}
        titles = plan.group_titles
        named = {
            thread: f"communication, group {one_line(titles[group])}"
            if len(tracks) > 1 or plan.has_labels
            else "communication"
            for group, thread in tracks.items()
        }
        for thread, name in {_COMPUTE: "compute", **named}.items():
            events.append(
                {**base, "tid": thread, "ph": "M", "name": "thread_name", "args": {"name": name}}
            )
            events.append(
                {
                    **base,
                    "tid": thread,
                    "ph": "M",
                    "name": "thread_sort_index",
                    "args": {"sort_index": thread},
                }
            )
        live = dict(zip((node.id for node in snapshot.nodes), snapshot.live_bytes, strict=True))
        for span in plan.compute:
            node = span.node
            about = {
                "op": node.target,
                "bytes": node.nbytes,
                "params": ", ".join(node.params),
                **_place(node, sources),
            }
            start, length = offset + span.start_us, span.end_us - span.start_us
            events.append(
                _slice(number, _COMPUTE, node.name, op_text(node.target), start, length, about)
            )
            events.append(
                {
                    **base,
                    "ph": "C",
                    "name": "bytes alive",
                    "ts": start,
                    "args": {"bytes": live[node.id]},
                }
            )
        for collective in plan.collectives:
            track = tracks[collective.group]
            place = _place(collective.node, sources)
            events += _collective_events(number, track, collective, place, offset, len(events))
        offset += plan.total_us
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _collective_events(
    process: int,
    track: int,
    span: CollectiveSpan,
    place: Mapping[str, str],
    offset: float,
    key: int,
) -> Iterator[dict[str, Any]]:
    node, collective = span.node, span.node.collective
    assert collective is not None
    about = {
        "kind": collective.kind,
        "group": collective.title,
        "ranks": collective.ranks,
        "bytes": collective.nbytes,
        "params": ", ".join(node.params),
        "exposed_us": span.exposed_us,
        "queued_us": span.queued_us,
        **place,
        "route": collective.route,
        "decision": collective.decision,
    }
    yield _slice(
        process, track, node.name, collective.kind, offset + span.start_us, span.time_us, about
    )
    for at, stall in enumerate(span.stalls):
        about = {"awaits": node.name, "params": ", ".join(node.params), **place}
        length = stall.end_us - stall.start_us
        yield {
            **_slice(
                process,
                _COMPUTE,
                f"exposed: {node.name}",
                "exposed",
                offset + stall.start_us,
                length,
                about,
            ),
            "cname": "terrible",
        }
        flow = {"pid": process, "cat": "wait", "name": "wait", "id": f"{key}.{at}"}
        yield {**flow, "tid": track, "ph": "s", "ts": offset + span.start_us}
        yield {**flow, "tid": _COMPUTE, "ph": "f", "bp": "e", "ts": offset + stall.start_us}


_SHOWN = 16
"""Source lines and modules of a slice."""


def _place(node: Node, sources: Mapping[str, Source]) -> dict[str, str]:
    """Source lines and modules of a node, or of its parameters; empty texts if unknown."""
    lines = dict.fromkeys(f"{each.file}:{each.line}" for each in sources_of(node, sources))
    return {"source": _some(tuple(lines)), "module": _some(modules_of(node))}


def _some(texts: Sequence[str]) -> str:
    shown = ", ".join(texts[:_SHOWN])
    return f"{shown} and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else shown


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
