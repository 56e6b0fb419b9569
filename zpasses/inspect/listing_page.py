"""The inspector's page about one graph: its listing. Other pages are in modules of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zpasses.dumps.nodes import Node, Snapshot
from zpasses.errors import some_of
from zpasses.inspect.find import SelectedGraph, failure_text, snapshot_of, step_title, steps_after
from zpasses.inspect.listing import MAX_ITEMS, NodeFilter, aligned, lines
from zpasses.inspect.page_parts import about_step, to_json_value
from zpasses.inspect.units import bytes_text
from zpasses.inspect.view import Code, View


def show_view(
    picked: Sequence[SelectedGraph],
    after: str | int | None = None,
    where: NodeFilter | None = None,
    most: int | None = MAX_ITEMS,
) -> View:
    """Listings of graphs: before their passes, after one of them, or (None) after the last."""
    parts: list[Code | str] = []
    data = []
    for each, step in steps_after(picked, after):
        snapshot = snapshot_of(each, step)
        found = lines(snapshot, where or NodeFilter(), most)
        some = f", {len(found):,} of them shown" if len(found) < len(snapshot.nodes) else ""
        peak = bytes_text(snapshot.peak_bytes)
        shown = f"{len(snapshot.nodes):,} nodes{some}; peak {peak}"
        head = f"# {each.title}, {step_title(step)}: {shown}"
        warning = [f"# {line}" for line in failure_text(step).splitlines()]
        parts.append(Code((head, *warning, *aligned(found))))
        if where is not None and where.params and not found:
            parts.append(_known_parameters(snapshot))
        live = dict(zip((node.id for node in snapshot.nodes), snapshot.live_bytes, strict=True))
        nodes = [_node_data(line.node, live[line.node.id]) for line in found]
        about = {**about_step(each, step), "failure": failure_text(step)}
        data.append({**about, "nodes": nodes})
    return View("", tuple(parts), data)


def _node_data(node: Node, live_bytes: int) -> dict[str, Any]:
    values = {**to_json_value(node), "inputs": list(node.inputs), "live_bytes": live_bytes}
    del values["source_index"]
    return values


def _known_parameters(snapshot: Snapshot) -> str:
    known = list(dict.fromkeys(name for node in snapshot.nodes for name in node.params))
    has = f"'s parameters are {some_of(known, 6)}" if known else " has no parameters"
    return f"No node matches all conditions. The graph{has}."
