"""The data of report.html as JSON. Each state of a node is stored once, and every step refers to
runs of node states.

`model.js` reads this data. Differences and schedules are computed here, by the code of the command
line. The page computes memory curves from the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zpasses.dumps.format import Compile, Dump, Failure, PassRun, Step
from zpasses.dumps.nodes import Buffer, Node, Snapshot, Source, Tag
from zpasses.inspect.difference import Difference, compare
from zpasses.inspect.escape import one_line, one_line_values, printable
from zpasses.inspect.find import SelectedGraph, select_graphs, select_rank
from zpasses.inspect.graph_notes import capacity_warning, variant_text
from zpasses.inspect.listing import call_text, note_text, op_text, value_text
from zpasses.inspect.measured import Measured, MeasuredGraph
from zpasses.inspect.measured_page import joined_lines, module_times
from zpasses.inspect.model_sources import parameter_sources
from zpasses.inspect.node_spans import Schedule, schedule
from zpasses.inspect.page_parts import to_json_value
from zpasses.inspect.rank_agreement import rank_agreements

FORMAT = 7
"""Version of the page's data. A page reads only reports of the same version."""


def payload(
    dump: Dump,
    rank: int | None,
    compile_name: str | None,
    others: Sequence[tuple[Dump, int | None]] = (),
    measured: Measured | None = None,
) -> dict[str, Any]:
    """All data that the page shows of one rank.

    Args:
        measured: what a trace says about the graphs of this rank.
        others: further dumps, or ranks of a dump, whose compiles follow.
    """
    rank = select_rank(dump, rank)
    names = _names([dump.path, *(other.path for other, _ in others)])
    compiles = _compiles(dump, names[dump.path], rank, compile_name, measured)
    for other, of_rank in others:
        chosen = select_rank(other, of_rank)
        compiles += _compiles(other, names[other.path], chosen, compile_name)
    agreement = one_line_values([each.to_json() for each in rank_agreements(dump)])
    about = {
        "title": f"zpasses report: {dump.path.name}",
        "path": str(dump.path),
        "meta": dump.meta,
    }
    ranks = {"rank": rank, "ranks": sorted(dump.ranks), "agreement": agreement}
    return {"format": FORMAT, **one_line_values(about), **ranks, "compiles": compiles}


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    """Path of each dump -> as many of its last parts as tell it from the others."""
    names = {path: path.name for path in paths}
    for count in range(2, 1 + max(len(path.parts) for path in paths)):
        if len(set(names.values())) == len(names):
            break
        names = {path: "/".join(path.parts[-count:]) for path in paths}
    return names


def _compiles(
    dump: Dump, name: str, rank: int, compile_name: str | None, measured: Measured | None = None
) -> list[dict[str, Any]]:
    picked = select_graphs(dump, rank=rank, compile_name=compile_name)
    chosen = dict.fromkeys(each.compile.folder for each in picked)
    compiles = [
        each
        for each in dump.ranks[rank].compiles
        if each.folder in chosen or (compile_name is None and each.error is not None)
    ]
    texts = {"dump": name, "path": str(dump.path), "torch": str(dump.meta.get("torch", ""))}
    about = {**one_line_values(texts), "rank": rank}
    return [{**about, **_compile(each, rank, measured)} for each in compiles]


def _compile(each: Compile, rank: int, measured: Measured | None) -> dict[str, Any]:
    pool = _NodePool()
    graphs = [
        _graph(SelectedGraph(rank, each, graph), pool, measured) for graph in each.graphs.values()
    ]
    info = each.info
    sources = parameter_sources(each)
    fields = ("name", "world", "state", "codegen", "pipeline", "target", "options")
    about = {field: getattr(info, field) for field in fields}
    about["groups"] = {info.group_title(name): ranks for name, ranks in info.groups.items()}
    parameters = {}
    for name, param in info.parameters.items():
        sizes, shape = [param.nbytes, param.shard_bytes], _plain(param.shape)
        place = _place(sources.get(name), pool)
        parameters[one_line(name)] = [*sizes, shape, one_line(param.dtype), place]
    return {
        **one_line_values({**about, "folder": each.folder}),
        "joined": None if measured is None else [one_line(line) for line in joined_lines(measured)],
        "parameters": parameters,
        "error": _failure(each.error),
        "notes": [printable(note) for note in each.notes],
        "sources": {
            one_line(file): [one_line(line.replace("\t", "    ")) for line in text.split("\n")]
            for file, text in each.sources.items()
            if file in pool.files
        },
        "strings": pool.strings,
        "shared": pool.shared,
        "nodes": pool.rows,
        "graphs": graphs,
    }


def _place(source: Source | None, pool: _NodePool) -> list[Any] | None:
    if source is None:
        return None
    pool.files.add(source.file)
    return [one_line(source.file), source.line, one_line(source.text), one_line(source.module)]


def _plain(value: Any) -> Any:
    return one_line_values(to_json_value(value))


def _failure(error: Failure | None) -> dict[str, str] | None:
    """An error, whose message and traceback may have several lines."""
    if error is None:
        return None
    blocks = {"message": printable(error.message), "traceback": printable(error.traceback)}
    return {**_plain(error), **blocks}


def _run(run: PassRun | None) -> dict[str, Any] | None:
    if run is None:
        return None
    return {**_plain(run), "notes": [printable(note) for note in run.notes]}


def _graph(picked: SelectedGraph, pool: _NodePool, measured: Measured | None) -> dict[str, Any]:
    graph = picked.graph
    seen: dict[int, int] = {}
    steps = []
    before: Snapshot | None = None
    for step in graph.steps:
        steps.append({**_step(step, seen, before, pool), "warning": _warning(picked, step)})
        before = step.snapshot or before
    ran = measured.of(picked) if measured is not None else None
    if ran is not None and graph.last.number is not None:
        steps[seen[graph.last.number]]["measured"] = _measured(ran)
    texts = {"name": graph.name, "of": graph.of, "about": variant_text(graph)}
    about = {"agreements": graph.agreements, "prediction": graph.prediction}
    return {**_plain({**texts, **about}), "error": _failure(graph.error), "steps": steps}


def _step(
    step: Step, seen: dict[int, int], before: Snapshot | None, pool: _NodePool
) -> dict[str, Any]:
    """One step of a graph.

    Args:
        seen: number of each snapshot of earlier steps -> index of the first; this step's is added.
        before: the last snapshot of earlier steps.
    """
    about = one_line_values({"index": step.index, "level": step.level, "after": step.after})
    about |= {"run": _run(step.run), "error": _failure(step.error)}
    if step.snapshot is None or step.number is None:
        return {**about, "number": None}
    if step.number in seen:
        return {**about, "number": step.number, "same": seen[step.number]}
    seen[step.number] = step.index
    snapshot = step.snapshot
    peak = snapshot.live_bytes.index(snapshot.peak_bytes) if snapshot.nodes else 0
    return {
        **about,
        "number": step.number,
        "order": _runs(pool.row(node, snapshot) for node in snapshot.nodes),
        "peak": [snapshot.peak_bytes, snapshot.nodes[peak].id if snapshot.nodes else None],
        "schedule": _schedule(snapshot),
        "diff": None if before is None else _difference(compare(before, snapshot)),
    }


def _warning(picked: SelectedGraph, step: Step) -> str:
    """What stands above the memory of a step."""
    if step.snapshot is None:
        return ""
    name, peak_bytes = picked.graph.name, step.snapshot.peak_bytes
    text = capacity_warning(picked.compile, name, peak_bytes)
    return one_line(text.removeprefix("WARNING: "))


def _measured(found: MeasuredGraph) -> dict[str, Any]:
    """Measured figures of a graph, each with the predicted one."""
    plan, rise = found.plan, found.rise_bytes
    times = {
        key: [_us(each.time_us), _us(each.exposed_us)] for key, each in found.collectives.items()
    }
    return {
        "runs": found.runs,
        "total": [_us(found.total_us), _us(plan.total_us)],
        "compute": [_us(found.compute_us), _us(found.predicted_compute_us)],
        "communication": [_us(found.collectives_us), _us(plan.communication_us)],
        "exposed": [_us(found.exposed_us), _us(plan.exposed_us)],
        "rise": None if rise is None else [rise, found.predicted_rise_bytes],
        "collectives": times,
        "operators": {key: _us(time) for key, time in found.operators.items()},
        "modules": [
            [one_line(row.name), row.layers, *map(_us, row.times)] for row in module_times(found)
        ],
    }


def _runs(rows: Iterable[int]) -> list[list[int]]:
    """3, 4, 5, 9 -> [[3, 3], [9, 1]]: first item and length of each run of consecutive numbers."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and runs[-1][0] + runs[-1][1] == row:
            runs[-1][1] += 1
        else:
            runs.append([row, 1])
    return runs


def _difference(difference: Difference) -> dict[str, list[list[Any]]]:
    """Kind -> [id, detail] of each change."""
    return {
        kind: [[change.node.id, one_line(change.detail)] for change in difference.of_kind(kind)]
        for kind in difference.counts
    }


def _schedule(snapshot: Snapshot) -> dict[str, Any]:
    plan = schedule(snapshot)
    collectives = []
    for span in plan.collectives:
        stalls = [[each.at.id, _us(each.start_us), _us(each.end_us)] for each in span.stalls]
        place = [span.node.id, _us(span.start_us), _us(span.end_us), span.wait.id, span.distance]
        collectives.append([*place, _us(span.compute_us), stalls])
    totals = ("total", "compute", "communication", "exposed")
    return {
        "collectives": collectives,
        "launches": plan.launches,
        "odd_spans": _odd_spans(plan),
        **{name: _us(getattr(plan, f"{name}_us")) for name in totals},
    }


def _odd_spans(plan: Schedule) -> list[list[float]]:
    """[number of the kernel, time after the kernel before it, its time] of the kernels that do not
    follow each other directly, or do not take the time of their node. Most kernels do.
    """
    found, now = list[list[float]](), 0.0
    for at, span in enumerate(plan.compute):
        gap, length = span.start_us - now, span.end_us - span.start_us
        cost = _us(span.node.cost_us)
        if abs(gap) < _ROUNDING_US and abs(length - cost) < _ROUNDING_US:
            now += cost
            continue
        found.append([at, _us(gap), _us(length)])
        now += _us(gap) + _us(length)
    return found


_ROUNDING_US = 0.002


def _us(value: float) -> float:
    return round(value, 3)


def _flags(tag: Tag) -> str:
    return ", ".join(name for name in ("cached", "kept", "deferrable") if getattr(tag, name))


def _code(node: Node, names: dict[int, str]) -> str:
    """A node as code, without its name if the code begins with it. The page puts it there again."""
    code = call_text(node, names)
    return code if node.op == "output" else code.removeprefix(node.name)


class _NodePool:
    """The distinct node states of a compile. Most nodes stay the same from pass to pass."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.strings: list[str] = []
        self.shared: list[tuple[Any, ...]] = []
        """Tags, places in the source, and collectives. Many nodes have equal ones."""
        self.files: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._of_shared: dict[tuple[Any, ...], int] = {}
        self._states: dict[int, tuple[Node, int]] = {}
        self._names: tuple[Snapshot | None, dict[int, str]] = (None, {})

    def row(self, node: Node, snapshot: Snapshot) -> int:
        """Number of the node's state."""
        known = self._states.get(id(node))
        if known is not None:
            return known[1]
        if self._names[0] is not snapshot:
            self._names = (snapshot, {each.id: each.name for each in snapshot.nodes})
        # The node is kept, so that its id() is not reused.
        self._states[id(node)] = node, len(self.rows)
        self.rows.append(self._state(node, self._names[1]))
        return len(self.rows) - 1

    def _state(self, node: Node, names: dict[int, str]) -> list[Any]:
        source, tag, collective = node.source, node.tag, node.collective
        tagged = placed = communicates = None
        if tag is not None:
            flags = _flags(tag)
            tagged = self._share(tag.role, tag.bucket, tag.origin, flags, tag.nbytes, tag.note)
        if source is not None:
            self.files.add(source.file)
            placed = self._share(source.file, source.line, source.text, source.module)
        if collective is not None:
            about = (collective.kind, collective.title, collective.ranks, collective.nbytes)
            rest = (collective.full_bytes, collective.route, collective.decision)
            communicates = self._share(*about, *rest)
        texts = (node.name, node.op, op_text(node.target), _code(node, names), note_text(node))
        return [
            node.id,
            *map(self._text, (*texts, value_text(node.vals))),
            *(node.nbytes, self._texts(node.params), tagged, placed, _us(node.cost_us)),
            *(list(node.inputs), [self._buffer(each) for each in node.buffers], communicates),
            None if node.mark is None else self._text(node.mark.text),
        ]

    def _buffer(self, each: Buffer) -> list[Any]:
        kind, params = self._text(each.kind), self._texts(each.params)
        return [each.nbytes, each.first, each.last, kind, params]

    def _share(self, *values: Any) -> int:
        """Number of a row of values in `shared`, whose texts are numbers, too."""
        row = tuple(self._text(each) if isinstance(each, str) else each for each in values)
        number = self._of_shared.setdefault(row, len(self.shared))
        if number == len(self.shared):
            self.shared.append(row)
        return number

    def _texts(self, texts: Sequence[str]) -> list[int]:
        return [self._text(text) for text in texts]

    def _text(self, text: str) -> int:
        """Number of a text in `strings`."""
        number = self._numbers.setdefault(text, len(self.strings))
        if number == len(self.strings):
            self.strings.append(one_line(text))
        return number
