"""The estimated schedule as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zpasses.dumps.format import Node, Snapshot
from zpasses.inspect.escape import one_line, one_line_values
from zpasses.inspect.listing import op_text
from zpasses.inspect.schedule import CollectiveSpan, schedule

__all__ = ["chrome_trace"]

_COMPUTE = 1
"""Thread id of the compute track. The tracks of process groups follow."""


def chrome_trace(graphs: Sequence[tuple[str, Snapshot]]) -> dict[str, Any]:
    """A trace with one process per graph. The graphs follow each other in time.

    Each process has a track for compute, and one for each process group. Stalls are slices of the
    compute track. Arrows lead from the start of a collective to its waits. Bytes alive are a
    counter. Times are in microseconds.

    Args:
        graphs: (title, graph) pairs.
    """
    events: list[dict[str, Any]] = []
    offset = 0.0
    for number, (title, snapshot) in enumerate(graphs, start=1):
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
                **_place(node),
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
            events += _collective_events(number, track, collective, offset, len(events))
        offset += plan.total_us
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _collective_events(
    process: int, track: int, span: CollectiveSpan, offset: float, key: int
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
        **_place(node),
        "route": collective.route,
        "decision": collective.decision,
    }
    yield _slice(
        process, track, node.name, collective.kind, offset + span.start_us, span.time_us, about
    )
    for at, stall in enumerate(span.stalls):
        about = {"awaits": node.name}
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


def _place(node: Node) -> dict[str, Any]:
    """Source line and module of a node, if they are known."""
    source = node.source
    if source is None:
        return {}
    return {
        "source": f"{source.file}:{source.line}" if source.file else "",
        "module": source.module,
    }


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
