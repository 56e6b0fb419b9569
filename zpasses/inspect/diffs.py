"""The inspector's pages on what changed: by a pass, by all passes of a graph, between ranks, and
between dumps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zpasses.inspect.difference import KINDS, Change, Difference, compare
from zpasses.inspect.find import (
    NotInDumpError,
    Picked,
    snapshot_of,
    step_after,
    step_before,
    step_title,
    steps_after,
)
from zpasses.inspect.listing import call_text, note_text
from zpasses.inspect.pairing import pair
from zpasses.inspect.units import bytes_text, change_text
from zpasses.inspect.view import Marked, View

__all__ = ["between_view", "differences_view", "pass_differences"]

Named = tuple[str, Difference]


def pass_differences(picked: Sequence[Picked], pass_name: str | int | None = None) -> list[Named]:
    """What one pass changed in each graph, or (None) what all of them changed together.

    Raises:
        NotInDumpError: when the pass ran on none of the graphs.
    """
    if pass_name is None:
        ends = [
            (each, each.graph.last)
            for each in picked
            if each.graph.first.number is not None or len(picked) == 1
        ]
    else:
        ends = steps_after(picked, pass_name)
    found = []
    for each, end in ends:
        start = each.graph.first if pass_name is None else step_before(each, end)
        said = (
            f"all {sum(1 for step in each.graph.steps if step.run)} passes"
            if pass_name is None
            else step_title(end)
        )
        found.append(
            (f"{each.title}, {said}", compare(snapshot_of(each, start), snapshot_of(each, end)))
        )
    return found


def between(
    first: Sequence[Picked], second: Sequence[Picked], after: str | int | None = None
) -> tuple[list[Named], list[str]]:
    """What is different between graphs of the same compile and name; and the titles of those that
    only one side has.

    Compiles are matched in order, because two runs may number them differently.
    """
    one, other = _by_order(first), _by_order(second)
    found = []
    for key in one:
        if key in other:
            a, b = (snapshot_of(each, step_after(each, after)) for each in (one[key], other[key]))
            found.append(
                (
                    f"{one[key].title}, {step_title(step_after(one[key], after))}",
                    compare(a, b, pair(a, b)),
                )
            )
    alone = [f"only in the first: {one[key].title}" for key in one if key not in other]
    return found, alone + [
        f"only in the second: {other[key].title}" for key in other if key not in one
    ]


def _by_order(picked: Sequence[Picked]) -> dict[tuple[int, str], Picked]:
    order = {
        folder: at
        for at, folder in enumerate(dict.fromkeys(each.compile.folder for each in picked))
    }
    return {(order[each.compile.folder], each.graph.name): each for each in picked}


def between_view(
    first: Sequence[Picked],
    second: Sequence[Picked],
    after: str | int | None = None,
    limit: int = 40,
) -> View:
    """The page on `between`; its data say `same` for all graphs together.

    Raises:
        NotInDumpError: when no graph is in both.
    """
    found, alone = between(first, second, after)
    if not found:
        raise NotInDumpError(
            f"the two have no graph in common; {'; '.join(alone) or 'both are empty'}."
        )
    return differences_view(found, limit, alone)


def differences_view(found: Iterable[Named], limit: int = 40, alone: Sequence[str] = ()) -> View:
    """Differences as a page: a summary of each graph first, then its changes by kind, at most
    `limit` of each (0: all)."""
    parts: list[Marked | str] = []
    data = []
    found = list(found)
    summary = [
        ("", f"{title}: {difference.summary}{_figures(difference)}") for title, difference in found
    ]
    parts.append(Marked((*summary, *(("", each) for each in alone))))
    for title, difference in found:
        if difference:
            parts.append(Marked(((("", f"{title}:")), *_lines(difference, limit))))
        about = {"title": title, "same": not difference, "counts": difference.counts}
        data.append({**about, "changes": [change_data(change) for change in difference.changes]})
    same = not alone and all(entry["same"] for entry in data)
    return View("", tuple(parts), {"same": same, "only_one_side": list(alone), "graphs": data})


def change_data(change: Change) -> dict[str, Any]:
    """{kind, before, after, before_name, after_name, detail}; ids and names of the node, None on
    the side where it is not."""
    old, new = change.before, change.after
    ids = {"before": old.id if old else None, "after": new.id if new else None}
    names = {"before_name": old.name if old else None, "after_name": new.name if new else None}
    return {"kind": change.kind, **ids, **names, "detail": change.detail}


def _figures(difference: Difference) -> str:
    before, after = difference.before, difference.after
    said = []
    if len(before.nodes) != len(after.nodes):
        said.append(f"{len(before.nodes)} -> {len(after.nodes)} nodes")
    if before.peak_bytes != after.peak_bytes:
        by = change_text(before.peak_bytes, after.peak_bytes)
        said.append(
            f"peak {bytes_text(before.peak_bytes)} -> {bytes_text(after.peak_bytes)} ({by})"
        )
    return f"; {', '.join(said)}" if said else ""


def _lines(difference: Difference, limit: int) -> list[tuple[str, str]]:
    shown: list[tuple[str, str]] = []
    old, new = (
        {node.id: node.name for node in snapshot.nodes}
        for snapshot in (difference.before, difference.after)
    )
    for kind in KINDS:
        changes = difference.of_kind(kind)
        if kind == "moved":
            texts = [_moved_text(block) for block in _blocks(difference, changes)]
        else:
            texts = [_change_text(change, old if kind == "removed" else new) for change in changes]
        shown += [(kind, text) for text in texts[: limit or None]]
        if limit and len(texts) > limit:
            shown.append(("", f"  ... and {len(texts) - limit} more {kind} (--limit 0 shows all)"))
    return shown


def _blocks(difference: Difference, changes: Sequence[Change]) -> Iterable[list[Change]]:
    """Moved nodes that stood together and stand together again."""
    block: list[Change] = []
    for change in changes:
        if block and _step(difference, block[-1], change) != (1, 1):
            yield block
            block = []
        block.append(change)
    if block:
        yield block


def _step(difference: Difference, one: Change, other: Change) -> tuple[int, int]:
    """How far one moved node is behind another, in both graphs."""
    old, new = difference.before.position, difference.after.position
    places = [
        (old[each.before.id], new[each.after.id])
        for each in (one, other)
        if each.before and each.after
    ]
    return places[1][0] - places[0][0], places[1][1] - places[0][1]


def _moved_text(block: Sequence[Change]) -> str:
    first, last = block[0], block[-1]
    to = f" to {last.node.name} ({len(block)} nodes)" if len(block) > 1 else ""
    return f"moved {first.node.name}{to}: {first.detail}"


def _change_text(change: Change, names: dict[int, str]) -> str:
    if change.kind in ("inserted", "removed"):
        note = note_text(change.node)
        return f"{change.kind} {call_text(change.node, names)}" + (f"  # {note}" if note else "")
    return f"{change.kind} {change.node.name}: {change.detail}"
