"""The inspector's page about ranks that wait for each other."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zpasses.dumps.format import Dump
from zpasses.errors import some_of
from zpasses.inspect.flight_recorder import LastCollective, RankState
from zpasses.inspect.hang import GroupHang, NodeFinder, Place, RankHang, find_hangs
from zpasses.inspect.model_sources import parameter_sources, source_text, sources_of
from zpasses.inspect.modules import modules_of, modules_text
from zpasses.inspect.view import Table, Text, View, table

_NO_FILES = (
    "`zpasses hang` reads the files of torch's flight recorder, one per rank. Set "
    "TORCH_FR_BUFFER_SIZE=2000 and TORCH_FR_DUMP_TEMP_FILE=PREFIX before the run. When a "
    "collective of NCCL or RCCL times out, each rank writes PREFIX and its number.",
    "gloo writes no such files. With gloo, a rank that waits longer than agreement_timeout_s "
    "raises an error, which names the missing ranks and what they did last. `py-spy dump --pid "
    "PID` shows where a process waits.",
)
_RANKS = 64
"""Rows of a table of ranks."""


def hang_view(dump: Dump, states: Mapping[int, RankState]) -> View:
    """Which collective each rank waits in, and which rank is missing.

    Args:
        dump: the dump of the run.
        states: rank -> what its file of the flight recorder says. If it is empty, the page says
            where such files come from.
    """
    finder = NodeFinder(dump)
    hangs = find_hangs(dump, states, finder)
    last = _last_collectives(states, finder)
    parts: list[Table | Text | str] = []
    for each in hangs:
        parts += _group_parts(each)
    data = {
        "ranks": sorted(states),
        "groups": [_group_data(each) for each in hangs],
        "last_collectives": [_last_data(each) for each in last],
    }
    return View("", tuple(parts or (_nothing(last) if states else _NO_FILES)), data)


@dataclass(frozen=True)
class _Last:
    """The last collective that a rank started in a process group."""

    rank: int
    group: str
    collective: LastCollective
    places: tuple[Place, ...]


def _last_collectives(states: Mapping[int, RankState], finder: NodeFinder) -> list[_Last]:
    return [
        _Last(rank, name, last, finder.places(rank, name, last, of_group.history))
        for rank, state in states.items()
        for name, of_group in state.groups.items()
        if (last := of_group.started) is not None
    ]


def _nothing(last: Sequence[_Last]) -> list[Table | Text | str]:
    ranks = sorted({each.rank for each in last})[:_RANKS]
    rows = []
    for each in last:
        if each.rank in ranks:
            began = (_collective(each.collective), *_about(each.places), _clock(each.collective))
            rows.append((str(each.rank), each.group, *began))
    headers = ("rank", "group", "last collective", *_ABOUT, "at (UTC)")
    yields = ("at (UTC)", *_ABOUT[:0:-1])
    shown = table(headers, rows, yields=yields, below=_ABOUT[1:]) if rows else ""
    return ["No rank waits in a collective.", shown]


def _group_parts(hang: GroupHang) -> list[Table | Text | str]:
    order = {"waits": 0, "missing": 1, "unknown": 2}
    ranks = sorted(hang.ranks, key=lambda each: (order.get(each.state, 3), each.rank))
    rows = [_row(each) for each in ranks[:_RANKS]]
    left = len(ranks) - len(rows)
    headers = ("rank", "", "collective", *_ABOUT, "at (UTC)")
    yields = ("at (UTC)", "pass", "module", "source", "parameters")
    shown = table(headers, rows, yields=yields, below=("source", "parameters", "pass", "module"))
    more = f"and {left:,} more ranks (--json has all)." if left else ""
    return [Text(tuple(_summary(hang))), shown, more]


def _summary(hang: GroupHang) -> list[str]:
    lines = [
        f"Group {hang.group}{f' (mesh dimension {hang.label})' if hang.label else ''}: "
        f"{_ranks(hang.of_state('waits'))} in collective {hang.number:,} of the group."
    ]
    if missing := hang.of_state("missing"):
        has = "has" if len(missing) == 1 else "have"
        lines.append(f"Missing: {_ranks(missing, '')} {has} not started it.")
    if unknown := hang.of_state("unknown"):
        lines.append(
            f"Unknown: no file says what {_ranks(unknown, '')} did. It may be missing, too: give "
            "its file of the flight recorder."
        )
    if hang.mismatch:
        lines.append(f"The ranks run different collectives: {hang.mismatch}.")
    elif not missing and not hang.of_state("unknown"):
        lines.append(
            "All ranks have started it, and it does not end: look at the network, or at the "
            "processes themselves."
        )
    return lines


def _ranks(ranks: Sequence[int], verb: str = "wait") -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    if not verb:
        return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
    return f"rank {shown} {verb}s" if len(ranks) == 1 else f"ranks {shown} {verb}"


def _row(each: RankHang) -> tuple[object, ...]:
    last = each.collective
    about = _about(each.places)
    number = f"{last.number:,}: {_collective(last)}" if last is not None else ""
    what = each.state if each.state != "missing" else "missing; last started"
    return (str(each.rank), what, number, *about, _clock(last))


_ABOUT = ("node", "parameters", "module", "source", "pass")
"""The columns of `_about`."""


def _about(places: Sequence[Place]) -> tuple[str, ...]:
    """Node, parameters, module, source and pass."""
    if not places:
        return ("", "", "", "", "")
    first = places[0]
    node, many = first.node, len(places) - 1
    return (
        f"{first.graph.title} {node.name}" + (f", or one of {many} others" if many else ""),
        some_of(node.params),
        modules_text(modules_of(node)),
        source_text(sources_of(node, parameter_sources(first.graph.compile))),
        first.inserted_by,
    )


def _collective(last: LastCollective | None) -> str:
    if last is None:
        return ""
    return f"{last.kind}, {last.elements:,} elements" if last.elements is not None else last.kind


def _clock(last: LastCollective | None) -> str:
    return _time(last.at_s) if last is not None and last.at_s is not None else ""


def _time(at_s: float) -> str:
    try:
        at = datetime.datetime.fromtimestamp(at_s, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return ""
    return at.strftime("%H:%M:%S.%f")[:-3]


def _group_data(hang: GroupHang) -> dict[str, Any]:
    about = {name: getattr(hang, name) for name in ("group", "label", "number", "mismatch")}
    states = {name: hang.of_state(name) for name in ("missing", "unknown")}
    ranks = [_rank_data(each) for each in hang.ranks]
    return {**about, "waiting": hang.of_state("waits"), **states, "ranks": ranks}


def _rank_data(each: RankHang) -> dict[str, Any]:
    about = {"rank": each.rank, "state": each.state}
    return {**about, **_place_data(each.collective, each.places)}


def _last_data(each: _Last) -> dict[str, Any]:
    about = {"rank": each.rank, "group": each.group}
    return {**about, **_place_data(each.collective, each.places)}


def _place_data(last: LastCollective | None, places: Sequence[Place]) -> dict[str, Any]:
    """A collective, and the nodes that it may be."""
    nodes = []
    for place in places:
        sources = sources_of(place.node, parameter_sources(place.graph.compile))
        graph, node = place.graph, place.node
        lines = dict.fromkeys(f"{each.file}:{each.line}" for each in sources)
        about = {"compile": graph.compile.name, "graph": graph.graph.name, "node": node.name}
        lists = {"params": node.params, "modules": modules_of(node), "sources": lines}
        found = {name: list(texts) for name, texts in lists.items()}
        nodes.append({**about, **found, "pass": place.inserted_by})
    return {"collective": None if last is None else asdict(last), "nodes": nodes}
