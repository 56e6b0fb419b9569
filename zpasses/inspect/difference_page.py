"""Pages about changes: of one pass, of all passes of a graph, between ranks, and between dumps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zpasses.errors import some_of
from zpasses.inspect.comparison import Comparison, Figures
from zpasses.inspect.difference import KINDS, Change, Difference, compare
from zpasses.inspect.find import (
    MAIN,
    NotInDumpError,
    SelectedGraph,
    failure_text,
    snapshot_of,
    step_after,
    step_before,
    step_title,
    steps_after,
)
from zpasses.inspect.listing import call_text, note_text
from zpasses.inspect.pairing import pair_nodes
from zpasses.inspect.units import bytes_text, change_text, count_text, time_text
from zpasses.inspect.view import ChangeLines, Table, Text, View, table, text_of


@dataclass(frozen=True)
class TitledDifference:
    """A difference, and what it is about."""

    title: str
    difference: Difference
    failure: str = ""
    """A warning if the second graph is the one that a failed pass left."""
    compile: str = ""
    graph: str = ""
    """Names of the compile and of the graph."""
    of: str = ""
    """The graph that this one is a variant of; empty for other graphs."""


def pass_differences(
    picked: Sequence[SelectedGraph], pass_name: str | int | None = None
) -> list[TitledDifference]:
    """The changes by one pass in each graph, or by all passes together (None).

    Raises:
        NotInDumpError: if the pass ran on none of the graphs.
    """
    if pass_name is None:
        written = [each for each in picked if each.graph.first.number is not None]
        ran = [each for each in written if len(each.graph.steps) > 1]
        ends = [(each, each.graph.last) for each in ran or written or picked]
    else:
        ends = steps_after(picked, pass_name)
    found = []
    for each, end in ends:
        start = each.graph.first if pass_name is None else step_before(each, end)
        count = sum(1 for step in each.graph.steps if step.run)
        passes = "its only pass" if count == 1 else f"all {count} passes"
        all_passes = passes if count else "before its first pass"
        scope = all_passes if pass_name is None else step_title(end)
        difference = compare(snapshot_of(each, start), snapshot_of(each, end))
        failure = failure_text(end) if pass_name is not None else _failed_after(each)
        about = (failure, each.compile.name, each.graph.name)
        found.append(TitledDifference(f"{each.title}, {scope}", difference, *about))
    return found


def _failed_after(picked: SelectedGraph) -> str:
    """A warning that a pass failed after the last good step; empty if none did."""
    step = next((step for step in picked.graph.steps if step.error is not None), None)
    if step is None:
        return ""
    return (
        f"{step.after} failed, and its changes are not shown; --pass "
        f"{(step.after or '').partition('{')[0]} shows them."
    )


def differences_between(
    first: Sequence[SelectedGraph], second: Sequence[SelectedGraph], after: str | int | None = None
) -> tuple[list[TitledDifference], list[str]]:
    """The differences between graphs of the same compile and name, and the titles of graphs that
    are only on one side.

    Compiles are matched by order, because two runs may number them differently.
    """
    one, other = _by_order(first), _by_order(second)
    found = []
    for key, each in one.items():
        if key in other:
            steps = [step_after(picked, after) for picked in (each, other[key])]
            a, b = map(snapshot_of, (each, other[key]), steps)
            title = f"{each.title}, {' against '.join(dict.fromkeys(map(step_title, steps)))}"
            about = ("", each.compile.name, each.graph.name, each.graph.of)
            found.append(TitledDifference(title, compare(a, b, pair_nodes(a, b)), *about))
    only_one_side = [f"only in the first: {one[key].title}" for key in one if key not in other]
    return found, only_one_side + [
        f"only in the second: {other[key].title}" for key in other if key not in one
    ]


def _by_order(picked: Sequence[SelectedGraph]) -> dict[tuple[int, str], SelectedGraph]:
    folders = dict.fromkeys(each.compile.folder for each in picked)
    order = {folder: at for at, folder in enumerate(folders)}
    return {(order[each.compile.folder], each.graph.name): each for each in picked}


def comparison_view(
    first: Sequence[SelectedGraph],
    second: Sequence[SelectedGraph],
    after: str | int | None = None,
    limit: int = 40,
    sides: tuple[str, str] = ("first", "second"),
) -> View:
    """The page of `differences_between`. Its data has `same`, which is True if all graphs are
    equal.

    Args:
        sides: what the columns of the two are called.

    Raises:
        NotInDumpError: if the two sides have no graph in common.
    """
    found, only_one_side = differences_between(first, second, after)
    if not found:
        raise NotInDumpError(
            f"the two sides have no graph in common; "
            f"{'; '.join(only_one_side) or 'both are empty'}."
        )
    return differences_view(found, limit, only_one_side, sides)


def differences_view(
    found: Iterable[TitledDifference],
    limit: int = 40,
    only_one_side: Sequence[str] = (),
    sides: tuple[str, str] = ("before", "after"),
) -> View:
    """A page of differences: a summary of each graph, then its changes by kind. It shows at most
    `limit` changes of each kind; 0 shows all.
    """
    parts: list[ChangeLines | Table | Text | str] = []
    data = []
    found = list(found)
    repeated = _repeated(found)
    summary = []
    for each in found:
        said = f"as {each.of}" if id(each) in repeated else each.difference.summary
        summary.append(("", f"{each.title}: {said}"))
    counts = ChangeLines((*summary, *(("", each) for each in only_one_side)))
    new = [each for each in found if id(each) not in repeated]
    figures, peaks = _summary_parts(new, limit, sides)
    parts += [*figures, counts, *peaks]
    for each in found:
        title, difference = each.title, each.difference
        if each.failure:
            parts.append(text_of(f"{title}: {each.failure}"))
        if difference and id(each) not in repeated:
            parts.append(ChangeLines(((("", f"{title}:")), *_lines(difference, limit))))
        about = {
            "title": title,
            "same": not difference and not each.failure,
            "failure": each.failure,
            "counts": difference.counts,
            "changed_nodes": difference.changed_nodes,
            **({"figures": Comparison(difference).to_json()} if _is_modelled(difference) else {}),
        }
        data.append({**about, "changes": [change_data(change) for change in difference.changes]})
    same = not only_one_side and all(entry["same"] for entry in data)
    about = {"same": same, "only_one_side": list(only_one_side), "graphs": data}
    return View("", tuple(parts), about)


def _repeated(found: Sequence[TitledDifference]) -> set[int]:
    """`id` of each variant that differs as the graph that it was made from. Its changes say nothing
    more.
    """
    of_graphs = {(each.compile, each.graph): each.difference for each in found}
    return {
        id(each)
        for each in found
        if each.of
        and (graph := of_graphs.get((each.compile, each.of))) is not None
        and _texts(each.difference) == _texts(graph)
    }


def _texts(difference: Difference) -> list[tuple[str, str, str]]:
    return [(change.kind, change.node.name, change.detail) for change in difference.changes]


def change_data(change: Change) -> dict[str, Any]:
    """{kind, before, after, before_name, after_name, detail}: ids and names of the node, None on
    the side where it does not exist.
    """
    old, new = change.before, change.after
    ids = {"before": old.id if old else None, "after": new.id if new else None}
    names = {"before_name": old.name if old else None, "after_name": new.name if new else None}
    return {"kind": change.kind, **ids, **names, "detail": change.detail}


def _is_modelled(difference: Difference) -> bool:
    """Whether the models cover both graphs. They give no time to what Dynamo captured."""
    return any(node.cost_us for node in (*difference.before.nodes, *difference.after.nodes))


Parts = list[ChangeLines | Table | Text | str]


def _summary_parts(
    found: Sequence[TitledDifference], limit: int, sides: tuple[str, str]
) -> tuple[Parts, Parts]:
    """Figures of both graphs of each difference, and the buffers that make the peaks differ."""
    compared = [
        (each, Comparison(each.difference)) for each in found if _is_modelled(each.difference)
    ]
    modelled = [(each, one) for each, one in compared if one.before != one.after]
    rows = _step_rows(compared) if modelled else []
    for each, one in sorted(modelled, key=lambda pair: _interest(pair[0].graph)):
        rows += _figure_rows(each.title, one.before, one.after)
    figures: Parts = []
    if rows:
        headers = ("graph", "figure", *sides, "change")
        figures.append(table(headers, rows, headers[2:]))
    peaks: Parts = []
    for each, one in modelled:
        if one.before.peak_bytes != one.after.peak_bytes:
            peaks += _peak_parts(each.title, one, min(limit or 8, 8))
    return figures, peaks


_SIDES = ("before", "after")


def _interest(graph: str) -> int:
    """Graphs that run come first, and the joint graph, which is split before it runs, last."""
    return 0 if graph in MAIN else 2 if graph == "joint" else 1


def _step_rows(compared: Sequence[tuple[TitledDifference, Comparison]]) -> list[Row]:
    """Figures of a whole step: of all graphs that run, for each compile that has several."""
    rows: list[Row] = []
    for name in dict.fromkeys(each.compile for each, _ in compared):
        of_compile = [pair for pair in compared if pair[0].compile == name]
        run = [(each.graph, one) for each, one in of_compile if each.graph in MAIN]
        if len(run) > 1:
            graphs = " + ".join(graph for graph, _ in run)
            before, after = (_sum_of([getattr(one, side) for _, one in run]) for side in _SIDES)
            rows += _figure_rows(f"{name} {graphs}", before, after)
    return rows


def _sum_of(graphs: Sequence[Figures]) -> Figures:
    """The figures of graphs that run one after another."""
    return Figures(
        sum(each.nodes for each in graphs),
        sum(each.collectives for each in graphs),
        sum(each.time_us for each in graphs),
        sum(each.exposed_us for each in graphs),
        max(each.peak_bytes for each in graphs),
    )


Row = tuple[str, ...]
_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("time", "time_us", time_text),
    ("exposed", "exposed_us", time_text),
    ("peak", "peak_bytes", bytes_text),
    ("collectives", "collectives", count_text),
    ("nodes", "nodes", count_text),
)


def _figure_rows(title: str, before: Figures, after: Figures) -> list[Row]:
    rows: list[Row] = []
    for name, field, text in _FIGURES:
        was, now = getattr(before, field), getattr(after, field)
        rows.append(("" if rows else title, name, text(was), text(now), change_text(was, now)))
    return rows


def _peak_parts(title: str, one: Comparison, most: int) -> Parts:
    kinds = ", ".join(
        f"{kind} {bytes_text(was)} -> {bytes_text(now)}" for kind, (was, now) in one.by_kind.items()
    )
    rows = [
        (sign, each.node, each.kind, bytes_text(each.nbytes), some_of(each.params))
        for sign, held in (("new", one.new), ("gone", one.gone))
        for each in held[:most]
    ]
    lines = [f"{title}, what is alive at the peaks: {kinds or 'the same kinds'}"]
    for sign, held in (("new", one.new), ("gone", one.gone)):
        if len(held) > most:
            size = bytes_text(sum(each.nbytes for each in held[most:]))
            what = "buffer" if len(held) - most == 1 else "buffers"
            lines.append(f"and {len(held) - most:,} more {sign} {what}, {size} together")
    buffers = table(("at peak", "allocated by", "kind", "bytes", "parameters"), rows, ("bytes",))
    return [lines[0], *([buffers] if rows else []), *lines[1:]]


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
            shown.append(
                ("", f"  ... and {len(texts) - limit:,} more {kind} (--limit 0 shows all)")
            )
    return shown


def _blocks(difference: Difference, changes: Sequence[Change]) -> Iterable[list[Change]]:
    """Groups of moved nodes that are adjacent in both graphs."""
    block: list[Change] = []
    for change in changes:
        if block and _step(difference, block[-1], change) != (1, 1):
            yield block
            block = []
        block.append(change)
    if block:
        yield block


def _step(difference: Difference, one: Change, other: Change) -> tuple[int, int]:
    """Distance from one moved node to another, in both graphs."""
    old, new = difference.before.position, difference.after.position
    places = [
        (old[each.before.id], new[each.after.id])
        for each in (one, other)
        if each.before and each.after
    ]
    return places[1][0] - places[0][0], places[1][1] - places[0][1]


def _moved_text(block: Sequence[Change]) -> str:
    first, last = block[0], block[-1]
    to = f" to {last.node.name} ({len(block):,} nodes)" if len(block) > 1 else ""
    return f"moved {first.node.name}{to}: {first.detail}"


def _change_text(change: Change, names: dict[int, str]) -> str:
    if change.kind in ("inserted", "removed"):
        note = note_text(change.node)
        return f"{change.kind} {call_text(change.node, names)}" + (f"  # {note}" if note else "")
    return f"{change.kind} {change.node.name}: {change.detail}"
