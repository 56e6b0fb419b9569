"""Dumps that follow the format, and whose reading costs as much as possible.

At scale 1 each is about as large as the limits allow. Below, commands must end within their bounds
of time and memory; above, the dump must be refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["HEAVY", "write_heavy"]

_MIB = 1 << 20


def write_heavy(folder: Path, name: str, scale: float = 1.0) -> None:
    """Write the dump `HEAVY[name]` into a new folder."""
    dump = _HeavyDump(folder)
    HEAVY[name](dump, scale)
    dump.close()


class _HeavyDump:
    """Writes a dump of one compile."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "rank0" / "000-0_0"
        self.folder.mkdir(parents=True)
        self.info: dict[str, Any] = {"name": "0/0", "rank": 0, "world": 2, "state": "done"}
        self.events: list[str] = []
        self._snapshots = 0
        header = {"format": "zpasses-dump", "version": 2, "world": 2}
        (root / "zpasses-dump.json").write_text(_line(header))

    def snapshot(self, nodes: Sequence[Any], count: int | None = None, **header: Any) -> int:
        """Write a snapshot of these nodes. `count` is the number of nodes with those of the base.
        Returns its number.
        """
        number = self._snapshots
        self._snapshots += 1
        live = [0] * (len(nodes) if count is None else count)
        first = {"snapshot": number, "base": None, "written": len(nodes), "live_bytes": live}
        with (self.folder / f"{number:03d}-x.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(_line(each) for each in ({**first, **header}, *nodes))
        return number

    def step(self, number: int | None, graph: str = "forward", **fields: Any) -> None:
        counts = {"nodes": 1, "collectives": 0, "bytes": 0}
        event = {"event": "snapshot", "graph": graph, "level": "joint", "snapshot": number}
        self.events.append(_line({**event, "counts": counts, "after": None, **fields}))

    def close(self) -> None:
        if not self._snapshots:
            self.step(self.snapshot([_node(0)]), "tiny")
        (self.folder / "compile.json").write_text(_line(self.info), encoding="utf-8")
        with (self.folder / "events.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(self.events)


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n"


def _node(id: int, **fields: Any) -> dict[str, Any]:
    return {"id": id, "name": f"n{id}", "op": "call_function", "target": "t", **fields}


def _run(note: str) -> dict[str, Any]:
    counts = {"nodes": 1, "collectives": 0, "bytes": 0}
    times = {"changes": 0, "time_us": 1, "check_us": 1, "checks": []}
    run = {"name": "p", "text": "p", "notes": [note], "before": counts, "after": counts, **times}
    return {"pass": run}


# --- one large text -------------------------------------------------------------------------------
def _long_event(dump: _HeavyDump, scale: float) -> None:
    dump.events.append(_line({"event": "note", "text": "x" * int(4 * _MIB * scale - 100)}))


def _long_events(dump: _HeavyDump, scale: float) -> None:
    dump.events += [_line({"event": "note", "text": "<" * (4 * _MIB - 100)})] * int(13 * scale)


def _wide_characters(dump: _HeavyDump, scale: float) -> None:
    text = "\U0001f600" + "x" * (3 * _MIB)
    dump.events += [_line({"event": "note", "text": text})] * int(4 * scale)


def _control_characters(dump: _HeavyDump, scale: float) -> None:
    dump.events += [_line({"event": "note", "text": "\x01" * 600_000})] * int(14 * scale)


def _pass_notes(dump: _HeavyDump, scale: float) -> None:
    for _ in range(int(12_000 * scale)):
        dump.step(None, **_run("a " * 1500))


def _long_word(dump: _HeavyDump, scale: float) -> None:
    for _ in range(int(9 * scale)):
        dump.step(None, **_run("!" * (3 * _MIB)))


def _wide_cell(dump: _HeavyDump, scale: float) -> None:
    dump.step(None, after="w" * _MIB)
    for at in range(int(19_000 * scale)):
        dump.step(None, f"g{at}")


def _source_lines(dump: _HeavyDump, scale: float) -> None:
    node = _node(0, source=0)
    dump.step(dump.snapshot([node], sources=[{"file": "f", "line": 1}]))
    texts = {"f": "ab\n" * int(1_300_000 * scale)}
    (dump.folder / "sources.json").write_text(json.dumps(texts))


# --- many values ----------------------------------------------------------------------------------
def _repeated(inner: str, in_line: int, lines: float) -> list[str]:
    return [f'{{"event":"x","j":[{",".join([inner] * in_line)}]}}\n'] * int(lines)


def _empty_lists(dump: _HeavyDump, scale: float) -> None:
    dump.events += _repeated("[]", 100_000, 33 * scale)


def _lists_in_notes(dump: _HeavyDump, scale: float) -> None:
    row = f'{{"event":"note","text":[{",".join(["[]"] * 1000)}]}}\n'
    dump.events += [row] * int(15_000 * scale)


def _objects(dump: _HeavyDump, scale: float) -> None:
    dump.events += _repeated('{"a":1}', 100_000, 10 * scale)


def _texts(dump: _HeavyDump, scale: float) -> None:
    dump.events += _repeated('"\u0101b"', 100_000, 35 * scale)


def _large_numbers(dump: _HeavyDump, scale: float) -> None:
    dump.events += _repeated("9" * 4200, 900, 14 * scale)


def _options(dump: _HeavyDump, scale: float) -> None:
    dump.info["options"] = {"a": [{"b": {"c": 1}}] * int(230_000 * scale)}


def _option_names(dump: _HeavyDump, scale: float) -> None:
    dump.info["options"] = {f"k{at}": at for at in range(int(225_000 * scale))}


# --- many events and files ------------------------------------------------------------------------
def _steps(dump: _HeavyDump, scale: float) -> None:
    number = dump.snapshot([_node(0)])
    for _ in range(int(19_999 * scale)):
        dump.step(number)


def _graphs(dump: _HeavyDump, scale: float) -> None:
    number = dump.snapshot([_node(0)])
    for at in range(int(19_999 * scale)):
        dump.step(number, f"g{at}")


def _notes(dump: _HeavyDump, scale: float) -> None:
    dump.events += [_line({"event": "note", "text": "x"})] * int(19_999 * scale)


def _agreements(dump: _HeavyDump, scale: float) -> None:
    dump.step(None)
    event = {"event": "agreement", "graph": "forward", "group": "g", "digest": "d"}
    dump.events += [_line({**event, "collectives": 1, "result": "agreed"})] * int(19_000 * scale)


def _compiles(dump: _HeavyDump, scale: float) -> None:
    for at in range(1, int(9_000 * scale)):
        folder = dump.root / "rank0" / f"{at:05d}-x"
        folder.mkdir()
        (folder / "compile.json").write_text(_line(dump.info))


def _ranks(dump: _HeavyDump, scale: float) -> None:
    for at in range(1, int(8_000 * scale)):
        folder = dump.root / f"rank{at}" / "000-x"
        folder.mkdir(parents=True)
        (folder / "compile.json").write_text(_line(dump.info))


# --- large graphs ---------------------------------------------------------------------------------
def _nodes(dump: _HeavyDump, scale: float) -> None:
    dump.step(dump.snapshot([_node(at) for at in range(int(60_000 * scale))]))


def _rich_nodes(dump: _HeavyDump, scale: float) -> None:
    def node(at: int) -> dict[str, Any]:
        return _node(
            at,
            val=[{"shape": [2], "dtype": "float32", "bytes": 8}],
            cost_us=1,
            buffers=[{"bytes": 1, "last": at, "kind": "a"}],
            collective={"kind": "g", "group": f"g{at}", "ranks": 2, "bytes": 1, "full_bytes": 2},
        )

    dump.step(dump.snapshot([node(at) for at in range(int(21_000 * scale))]))


def _hub(dump: _HeavyDump, scale: float) -> None:
    nodes = [_node(at, args=[{"node": 0}], target=f"t{at}") for at in range(1, int(55_000 * scale))]
    dump.step(dump.snapshot([_node(0), *nodes]))


def _awaited(dump: _HeavyDump, scale: float) -> None:
    count = int(25_000 * scale)
    nodes = [
        _node(
            at,
            cost_us=2,
            stream="communication",
            collective={
                "kind": "g", "group": "g", "ranks": 2, "bytes": 1, "full_bytes": 2, "waits": [count]
            },
        )
        for at in range(count)
    ]  # fmt: skip
    dump.step(dump.snapshot([*nodes, _node(count)]))


def _long_names(dump: _HeavyDump, scale: float) -> None:
    nodes = [_node(at, args=[{"node": 0}] * 30) for at in range(1, int(8_000 * scale))]
    number = dump.snapshot([{**_node(0), "name": "x" * 256}, *nodes])
    dump.step(number)


def _quotes(dump: _HeavyDump, scale: float) -> None:
    target = '"' * 2000 + "\\" * 2000
    nodes = [{**_node(at), "target": target} for at in range(int(6_000 * scale))]
    dump.step(dump.snapshot(nodes))


# --- many snapshots -------------------------------------------------------------------------------
def _empty_deltas(dump: _HeavyDump, scale: float) -> None:
    dump.step(dump.snapshot([_node(at) for at in range(20_000)]))
    for base in range(int(7 * scale)):
        dump.step(dump.snapshot([], 20_000, base=base))


def _small_deltas(dump: _HeavyDump, scale: float) -> None:
    dump.step(dump.snapshot([_node(at) for at in range(200)]))
    for base in range(int(600 * scale)):
        dump.step(dump.snapshot([], 200, base=base))


def _reordered(dump: _HeavyDump, scale: float) -> None:
    draw, order = random.Random(0), list(range(5000))
    dump.step(dump.snapshot([_node(at) for at in order]))
    for base in range(int(23 * scale)):
        draw.shuffle(order)
        dump.step(dump.snapshot([], 5000, base=base, order=order))


def _buffers(dump: _HeavyDump, scale: float) -> None:
    node = _node(0, buffers=[{"bytes": 1, "last": 0, "kind": "a"}] * 70_000)
    dump.step(dump.snapshot([node]))
    for base in range(int(6 * scale)):
        dump.step(dump.snapshot([], 1, base=base))


def _buffer_kinds(dump: _HeavyDump, scale: float) -> None:
    buffers = [
        {"bytes": 1, "last": 0, "kind": f"a{at}", "params": [f"p{at}"]} for at in range(30_000)
    ]
    dump.step(dump.snapshot([_node(0, buffers=buffers)]))
    for base in range(int(13 * scale)):
        dump.step(dump.snapshot([], 1, base=base))


def _shared_snapshot(dump: _HeavyDump, scale: float) -> None:
    number = dump.snapshot([_node(at) for at in range(1000)])
    for at in range(int(170 * scale)):
        dump.step(number, f"g{at}")


def _shared_references(dump: _HeavyDump, scale: float) -> None:
    number = dump.snapshot([_node(at, args=[{"node": 0}] * 20) for at in range(1000)])
    for at in range(int(65 * scale)):
        dump.step(number, f"g{at}")


HEAVY: Mapping[str, Callable[[_HeavyDump, float], None]] = {
    "one long event": _long_event,
    "long events": _long_events,
    "wide characters": _wide_characters,
    "control characters": _control_characters,
    "notes of passes": _pass_notes,
    "long word": _long_word,
    "wide cell": _wide_cell,
    "lines of source": _source_lines,
    "empty lists": _empty_lists,
    "lists in notes": _lists_in_notes,
    "objects": _objects,
    "texts": _texts,
    "large numbers": _large_numbers,
    "options": _options,
    "names of options": _option_names,
    "steps": _steps,
    "graphs": _graphs,
    "notes": _notes,
    "agreements": _agreements,
    "compiles": _compiles,
    "ranks": _ranks,
    "nodes": _nodes,
    "rich nodes": _rich_nodes,
    "hub": _hub,
    "awaited collectives": _awaited,
    "long names": _long_names,
    "quotes": _quotes,
    "empty deltas": _empty_deltas,
    "small deltas": _small_deltas,
    "reordered": _reordered,
    "buffers": _buffers,
    "kinds of buffers": _buffer_kinds,
    "shared snapshot": _shared_snapshot,
    "shared references": _shared_references,
}
"""Name -> (dump, scale) -> None."""
