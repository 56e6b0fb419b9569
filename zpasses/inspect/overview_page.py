"""The inspector's page about compiles, graphs and passes of one rank."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from zpasses.dumps.format import (
    Compile,
    CompileInfo,
    Dump,
    Failure,
    Graph,
    Prediction,
    Step,
)
from zpasses.inspect.find import select_rank
from zpasses.inspect.graph_notes import capacity_warning, variant_text
from zpasses.inspect.page_parts import to_json_value
from zpasses.inspect.rank_agreement import RankAgreement, rank_agreements, ranks_text
from zpasses.inspect.units import bytes_text, count, cut, time_text
from zpasses.inspect.view import Table, Text, View, table, table_of, text_of

_NOTE_CHARS = 320
_FIGURES = ("step", "rewrites", "nodes", "collectives", "input bytes", "pass", "checks")


def list_view(dump: Dump, rank: int | None = None) -> View:
    """Compiles, graphs and passes of one rank."""
    rank = select_rank(dump, rank)
    meta, data = dump.meta, []
    parts: list[Table | Text | str] = []
    agreements = rank_agreements(dump)
    parts.extend(_agreement_parts(agreements))
    for each in dump.ranks[rank].compiles:
        parts += _compile_parts(each)
        data.append(_compile_data(each))
    ranks = ", ".join(map(str, sorted(dump.ranks)))
    title = (
        f"{dump.path}: zpasses {meta.get('zpasses', '?')}, torch {meta.get('torch', '?')}, "
        f"world size {meta.get('world', '?')}"
    )
    rest = f"; the dump has ranks {ranks}" if len(dump.ranks) > 1 else ", the only one in the dump"
    about = {"path": str(dump.path), **to_json_value(meta), "rank": rank}
    about |= {"ranks": sorted(dump.ranks), "agreement": [each.to_json() for each in agreements]}
    return View(title, (f"Rank {rank}{rest}.", *parts), {**about, "compiles": data})


def _agreement_parts(found: list[RankAgreement]) -> list[Text]:
    """Which ranks run the same collectives, graph by graph."""
    if not found:
        return []
    if all(each.agree for each in found):
        names = ", ".join(dict.fromkeys(each.graph for each in found))
        return [Text((f"All ranks run the same collectives: {names}.",))]
    lines = []
    for each in found:
        sets = "; ".join(ranks_text(ranks) for ranks in each.alike)
        missing = f"; missing on rank {ranks_text(each.missing)}" if each.missing else ""
        state = "agrees" if each.agree else "DIFFERS"
        lines.append(f"{each.compile} {each.graph} {state}: ranks {sets}{missing}")
        parts = re.sub(r" (?=Only on rank |Shown by: )", "\n", each.difference)
        lines += [f"    {part}" for part in parts.splitlines()]
    return [Text(tuple(lines))]


def _compile_parts(each: Compile) -> list[Table | Text | str]:
    info = each.info
    head = (
        f"Compile {info.name} ({each.folder}): {info.state}, codegen {info.codegen or '?'}, "
        f"target {info.target.get('name', '?')}"
    )
    rows = [_step_row(graph, step) for graph in each.graphs.values() for step in graph.steps]
    lines = [head, f"pipeline: {info.pipeline or '(none)'}"]
    if info.group_labels:
        lines.append(f"groups: {_groups_text(info)}")
    if info.recompile_reason:
        lines.append(f"compiled again: {' '.join(info.recompile_reason.split())}")
    shown: list[Table | Text | str] = [Text(tuple(lines))]
    if rows:
        yields, notes = ("notes", "checks", "pass", "input bytes"), ("notes",)
        shown.append(table_of(rows, right=_FIGURES, yields=yields, below=notes, whole=notes))
    else:
        shown.append("This compile wrote no graphs.")
    if any(graph.prediction for graph in each.graphs.values()):
        shown.append(_predictions(each))
    shown += [
        note
        for graph in each.graphs.values()
        if (note := variant_text(graph) or _capacity_text(each, graph))
    ]
    shown += [text_of(f"at runtime: {note}") for note in each.notes]
    if each.error is not None:
        said = f"FAILED in {each.error.where or '?'}: {each.error.type}: {each.error.message}"
        shown.append(text_of(f"{said}{_raised(each.error)}"))
    return shown


def _capacity_text(each: Compile, graph: Graph) -> str:
    found = graph.prediction
    return capacity_warning(each, graph.name, found.peak_bytes) if found is not None else ""


def _raised(error: Failure) -> str:
    """The line that raised an error, unless the message has it."""
    return f"\nraised at {error.raised}" if error.raised not in error.message else ""


def _predictions(each: Compile) -> Table:
    graphs = each.graphs.values()
    found = [(each.name, each.prediction) for each in graphs if each.prediction is not None]
    longest = max(max(each.total_us, each.possible_us) for _, each in found)
    columns = ("graph", "achieved", "exposed", "possible", "bound", "peak", "budget")
    bar = "bound█ possible▓ achieved░"
    rows = []
    for name, of in found:
        times = (of.total_us, of.exposed_us, of.possible_us, of.bound_us)
        figures = (*map(time_text, times), bytes_text(of.peak_bytes), bytes_text(of.limit_bytes))
        rows.append((name, *figures, prediction_bar(of, longest)))
    about = {"right": columns[1:], "yields": (bar,), "whole": (bar,)}
    return table((*columns, bar), rows, title="Predicted time", **about)


_BAR = 24
"""Characters of the bar of the slowest graph."""


def prediction_bar(found: Prediction, longest_us: float) -> str:
    """A bar of the time that no schedule beats, of what the budget adds to it, and of what a better
    schedule would save.

    Args:
        longest_us: time of a bar of full length.
    """
    scale = _BAR / max(longest_us, 1e-9)
    ends = [round(us * scale) for us in (found.bound_us, found.possible_us, found.total_us)]
    bound = ends[0]
    possible = max(ends[1], bound)
    return "█" * bound + "▓" * (possible - bound) + "░" * max(ends[2] - possible, 0)


def _step_row(graph: Graph, step: Step) -> dict[str, object]:
    """Column -> value."""
    counts, figures = step.counts, tuple[object, ...](("", "", ""))
    if counts is not None:
        figures = (counts.nodes, counts.collectives, bytes_text(counts.nbytes))
    elif step.error and step.index and (given := graph.steps[step.index - 1].counts):
        # The pass left no graph. What it was given is known.
        figures = (f"{given.nodes:,} before", f"{given.collectives:,} before", "")
    run = step.run
    times = (run.changes, time_text(run.time_us), time_text(run.check_us)) if run else ("", "", "")
    if step.error is not None:
        place = f", raised at {step.error.raised}" if step.error.raised else ""
        message = f"FAILED: {step.error.type}{place}"
    else:
        message = "; ".join(run.notes) if run else ""
    return {
        "graph": graph.name if step.index == 0 else "",
        "step": step.index,
        "after": step.after or "-",
        "rewrites": times[0],
        **dict(zip(("nodes", "collectives", "input bytes"), figures, strict=True)),
        "pass": times[1],
        "checks": times[2],
        "notes": _wrapped(message),
    }


def _wrapped(message: str) -> tuple[str, ...]:
    """The start of a message as lines of a cell. `--json` prints all of it."""
    # The time of textwrap grows with the square of a word's length.
    return tuple(textwrap.wrap(cut(message, _NOTE_CHARS), 64))


def _groups_text(info: CompileInfo) -> str:
    """Mesh dimensions with the ranks of their groups: "dp (4 ranks: 0, 2, 4, 6)"."""
    texts = []
    for name, label in info.group_labels.items():
        ranks = info.groups.get(name, ())
        shown = ", ".join(map(str, ranks[:_RANKS])) + (", ..." if len(ranks) > _RANKS else "")
        texts.append(f"{label} ({count(len(ranks), 'rank')}: {shown})")
    return ", ".join(texts)


_RANKS = 8
"""Ranks of a group that `list` shows."""


def _compile_data(each: Compile) -> dict[str, Any]:
    graphs = []
    for graph in each.graphs.values():
        steps = []
        for step in graph.steps:
            about = {"index": step.index, "level": step.level, "after": step.after}
            about |= {"counts": to_json_value(step.counts), "run": to_json_value(step.run)}
            steps.append({**about, "error": to_json_value(step.error)})
        about = {"name": graph.name, "of": graph.of, "prediction": to_json_value(graph.prediction)}
        about |= {"given": list(graph.given), "kept": list(graph.kept)}
        about |= {"stepped": list(graph.stepped)}
        graphs.append({**about, "agreements": to_json_value(graph.agreements), "steps": steps})
    about = {"folder": each.folder, **to_json_value(each.info)}
    return {**about, "notes": list(each.notes), "graphs": graphs}


def prediction_text(found: Prediction) -> str:
    """One sentence about a prediction."""
    return (
        f"Achieved {time_text(found.total_us)}, possible within the budget "
        f"({bytes_text(found.limit_bytes)}) {time_text(found.possible_us)}, bound "
        f"{time_text(found.bound_us)}."
    )
