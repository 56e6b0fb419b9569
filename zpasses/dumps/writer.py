"""Writes dumps: one folder per compile. Each file is replaced atomically, so that a dump can be
read at any time.

Only `zpasses.dumps.listeners` imports this module, and only if a dump was requested.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs
from torch import fx

from zpasses.cost.time.target import Target
from zpasses.dumps import format as data
from zpasses.dumps.describe import Describer, GraphDescriber, plain_argument
from zpasses.dumps.dump_errors import DumpPathError
from zpasses.dumps.json_lines import json_line, snapshot_lines
from zpasses.dumps.nodes import Repr, Snapshot
from zpasses.dumps.runs import now, write
from zpasses.errors import AgreementError, raising_line
from zpasses.graph.verifier import CHECKS
from zpasses.pipeline import events
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.predictor import Predictor

log = logging.getLogger("zpasses")

_PREDICTED = ("forward", "backward", "inference")
_MODELLED = ("joint", *_PREDICTED, "flush")


def slug(name: str) -> str:
    """The name as a part of a file name: lower-case letters, digits, dots, dashes and
    underscores."""
    return re.sub(r"[^a-z0-9_.]+", "-", name.lower().replace("/", "_")).strip("-.")[:60] or "graph"


class CompileDump:
    """Listener that writes the dump of one compile.

    Args:
        folder: the rank's folder.
        info: fields of compile.json that are known from the start.
        target: the hardware of the memory and cost models.

    Raises:
        DumpPathError: if the folder cannot be written to.
    """

    def __init__(self, folder: Path, info: Mapping[str, Any], target: Target) -> None:
        about = {"state": "compiling", "created": now(), "target": dataclasses.asdict(target)}
        self._info = msgspec.convert({**info, **about}, data.CompileInfo)
        self._describer = Describer(target, self._info.group_labels)
        self._target = target
        self._predictor: Predictor | None = None
        self._lock = threading.RLock()
        self._events: list[bytes] = []
        self._number = 0
        self._last: dict[str, Snapshot] = {}
        """Name of a graph -> its last snapshot."""
        self._trace: tuple[str, GraphDescriber] | None = None
        self._broken = False
        self._failure: BaseException | None = None
        self._runs: dict[str, int] = {}
        self._passes: set[str] = set()
        """Names of passes that changed something."""
        try:
            self._folder = _new_compile_folder(folder, slug(self._info.name))
            self._write_info()
        except OSError as error:
            raise DumpPathError(
                f"dump: {folder} cannot be written to: {error.strerror}. Name another folder."
            ) from error

    # --- events of the compile --------------------------------------------------------------------
    def __call__(self, event: object) -> None:
        """Write an event. An OSError, such as a full disk, ends the dump and not the training."""
        with self._lock:
            if self._broken:
                return
            try:
                self._write_event(event)
            except OSError as error:
                self._broken = True
                log.warning("dump: %s is incomplete: %s", self._folder, error)

    def _write_event(self, event: object) -> None:
        match event:
            case events.LevelStarted():
                self._level_started(event)
            case events.PassRan():
                self._pass_ran(event)
            case events.PassFailed():
                self._pass_failed(event)
            case events.ObservedGraph():
                self._predict(event)
            case events.VariantBuilt():
                self._variant(event)
            case events.CollectivesCompared():
                label = self._describer.label(event.group)
                about = {key: value for key, value in vars(event).items() if key != "graph_name"}
                self._event(data.Agreement(event.graph_name, label=label, **about))
            case events.RuntimeNote(concerning, text):
                if concerning in self._passes or concerning in self._info.options:
                    self._event(data.NoteEvent(text, concerning))
            case events.Problem(where, error) if not _caused_by(error, self._failure):
                self._event(data.ErrorEvent(_failure(error, where)))
                self._fail(where, error)
            case events.CompileEnded(restarted=True):
                shutil.rmtree(self._folder, ignore_errors=True)
                self._broken = True
            case events.CompileEnded():
                self._ended()

    def _level_started(self, event: events.LevelStarted) -> None:
        name, level = self._name(event.graph_name, event.level), event.level
        trace = self._describer.graph(
            name,
            _PARENTS.get(event.graph_name),
            modelled=event.graph_name.partition(".")[0] in _MODELLED,
        )
        self._trace = (name, trace)
        self._snapshot(data.StepEvent(name, level), event.graph)
        if event.graph_name in _PREDICTED and level in (Level.FORWARD.value, Level.BACKWARD.value):
            self._predictor = Predictor(self._target)
            self._predictor(event)

    def _pass_ran(self, event: events.PassRan) -> None:
        name, _ = self._current(event.graph_name)
        record = event.record
        run = data.PassRun(
            name=record.name,
            text=record.text,
            options=_options(event.each),
            changes=record.changes,
            time_us=round(record.time_us, 1),
            check_us=round(record.check_us, 1),
            checks=tuple(CHECKS) if record.changes else ("unchanged",),
            before=data.Counts(record.nodes_before, record.collectives_before, record.bytes_before),
            after=data.Counts(record.nodes_after, record.collectives_after, record.bytes_after),
            notes=tuple(event.notes),
        )
        step = data.StepEvent(name, event.level, record.text, run=run)
        if record.changes:
            self._passes.add(record.name)
            self._snapshot(step, event.graph)
        else:
            self._event(structs.replace(step, number=self._last[name].number))
        if self._predictor is not None:
            self._predictor(event)

    def _pass_failed(self, event: events.PassFailed) -> None:
        name, _ = self._current(event.graph_name)
        text, level, error = str(event.each), event.level, event.error
        failed = data.StepEvent(name, level, text, error=_failure(error, text))
        try:
            self._snapshot(failed, event.graph)
        except Exception as second:  # a wrong graph may break its description in any way
            log.debug("dump: the graph that %s left cannot be described: %s", text, second)
            self._event(failed)
        self._fail(text, error)

    def _predict(self, event: events.ObservedGraph) -> None:
        """Predictions take time, so they are made only for a dump."""
        predictor, self._predictor = self._predictor, None  # it keeps nodes of the graph alive
        found = predictor.predicted(event.graph) if predictor is not None else None
        if found is None:
            return
        log.info("graph %s: %s", event.name, found)
        figures: dict[str, Any] = {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in dataclasses.asdict(found).items()
        }
        name = self._name(event.kind, "")
        number = self._last[name].number
        self._event(data.Prediction(graph=name, number=number, **figures))

    def _variant(self, event: events.VariantBuilt) -> None:
        number = self._runs[event.of + ".variant"] = self._runs.get(event.of + ".variant", -1) + 1
        name = f"{event.of}.variant{number}"
        self._trace = (name, self._describer.graph(name, event.of))
        given, kept, stepped = map(tuple, (event.given, event.kept, event.stepped))
        step = data.StepEvent(name, "variant", of=event.of, given=given, kept=kept, stepped=stepped)
        self._snapshot(step, event.graph, self._last.get(event.of))

    def _ended(self) -> None:
        self._trace = None  # it keeps every node of the graph alive
        self._write_info(state="done" if self._info.state == "compiling" else self._info.state)
        self._write_sources()

    # --- files ------------------------------------------------------------------------------------
    def _name(self, graph_name: str, level: str) -> str:
        """The graph's name in the dump. A graph that starts again at its first level (a flush of
        other gradients) is a new graph.
        """
        if graph_name in _REPEATED and level == _REPEATED[graph_name]:
            count = self._runs[graph_name] = self._runs.get(graph_name, 0) + 1
        else:
            count = self._runs.get(graph_name, 1)
        return graph_name if count == 1 else f"{graph_name}.{count}"

    def _current(self, graph_name: str) -> tuple[str, GraphDescriber]:
        if self._trace is None:
            raise RuntimeError(f"graph {graph_name} has no snapshot: no LevelStarted came before")
        return self._trace

    def _snapshot(
        self, step: data.StepEvent, graph: fx.Graph, base: Snapshot | None = None
    ) -> None:
        name = step.graph
        _, trace = self._current(name)
        snapshot = trace.snapshot(graph, self._number)
        base = base or self._last.get(name)
        step = structs.replace(step, number=self._number, counts=data.Counts.of(snapshot))
        starts = step.after is None and not step.of
        if starts and base is not None and base.nodes == snapshot.nodes:
            # This level starts from the graph that the one before it left.
            self._event(structs.replace(step, number=base.number))
            return
        stem = f"{self._number:03d}-{slug(name)}" + (f"-{slug(step.after)}" if step.after else "")
        write(self._folder / f"{stem}.jsonl", snapshot_lines(snapshot, step, base))
        self._number += 1
        self._last[name] = snapshot
        self._event(step)

    def _event(self, event: data.Event) -> None:
        self._events.append(json_line(event))
        write(self._folder / "events.jsonl", self._events)

    def _fail(self, where: str, error: BaseException) -> None:
        self._failure = error
        self._write_info(state="failed", error=_failure(error, where))
        self._write_sources()

    def _write_info(self, **changes: Any) -> None:
        self._info = structs.replace(self._info, **changes)
        write(self._folder / "compile.json", [json_line(self._info)])

    def _write_sources(self) -> None:
        texts = self._describer.sources.texts()
        if texts:
            write(self._folder / "sources.json", [json_line(texts)])


_PARENTS = {"forward": "joint", "backward": "joint"}
_REPEATED = {"flush": "joint"}


def _new_compile_folder(folder: Path, name: str) -> Path:
    """Create the folder with the next free number. Other processes may do the same at once."""
    taken = [
        int(each.name.partition("-")[0])
        for each in folder.iterdir()
        if each.name.partition("-")[0].isdigit()
    ]
    number = max(taken, default=-1) + 1
    while True:
        claimed = folder / f"{number:03d}-{name}"
        try:
            claimed.mkdir()
        except FileExistsError:
            number += 1
        else:
            return claimed


def _options(each: Pass) -> dict[str, Any]:
    """All options of a pass, including defaults."""
    fields = dataclasses.fields(each)  # type: ignore[arg-type]
    return {field.name: _json(getattr(each, field.name)) for field in fields if field.init}


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_json(item) for item in value]
    found = plain_argument(value)
    return found.text if isinstance(found, Repr) else found


def _failure(error: BaseException, where: str) -> data.Failure:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return data.Failure(
        type=type(error).__name__,
        message=str(error)[:20_000],
        where=where,
        traceback=text[-50_000:],
        # Ranks that disagree have no line that is to blame.
        raised="" if isinstance(error, AgreementError) else raising_line(error)[:1_000],
    )


def _caused_by(error: BaseException | None, cause: BaseException | None) -> bool:
    """Whether an error is `cause`, or was raised because of it."""
    seen: set[int] = set()
    while error is not None and cause is not None and id(error) not in seen:
        if error is cause:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
