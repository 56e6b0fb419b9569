"""What is stored of one compiled graph, and how it is written and read.

An entry is complete, and written, when the forward graph and the backward graph are compiled. Code
of variants that are compiled later is added to it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import torch
from torch import fx

from zpasses import compat
from zpasses.backend.cache.store import CacheFiles
from zpasses.backend.graph_facts import BackwardFacts, ForwardFacts, VariantFacts
from zpasses.ranks.agree import Answers
from zpasses.runtime.backward_variants import BackwardVariant
from zpasses.runtime.forward_variants import ForwardVariant, OutputStrides

log = logging.getLogger("zpasses")


@functools.cache
def _warn_of_missing(name: str) -> None:
    log.warning(
        "The compile cache stores nothing with torch %s: %s. Every start compiles all graphs.",
        torch.__version__,
        name,
    )


Variant = ForwardVariant | BackwardVariant


@dataclass(frozen=True)
class StoredVariant:
    """Code of one variant of a graph."""

    code: bytes
    """From `compat.pack_code`."""
    facts: VariantFacts


@dataclass
class Entry:
    """One compiled graph."""

    token: str
    """Name of the folder of its other files."""
    name: str
    """Dynamo's id of the compile that made it, which `events` name."""
    result: bytes | None = None
    """From `compat.inductor_compile_packed`."""
    forward: ForwardFacts | None = None
    backward: BackwardFacts | None = None
    memory_budget: str | None = None
    """Memory budget of the passes on the backward graph, and on the reductions of a window."""
    free_bytes: int | None = None
    """What `memory_budget="auto"` found to be free."""
    static_inputs: dict[str, list[int]] = field(default_factory=dict)
    """Kind of graph -> positions of the inputs whose memory stays the same from call to call."""
    output_strides: OutputStrides = ()
    """Strides of the outputs of the forward graph, which its variants keep."""
    answers: Answers = field(default_factory=dict)
    """What the votes of the passes came to."""

    def answers_of(self, group: str) -> Answers:
        """What the votes of one process group came to."""
        return {key: each for key, each in self.answers.items() if key[0] == group}

    def fingerprint(self, group: str) -> str:
        """Equal on all ranks of a process group that compiled the graph together."""
        assert self.forward is not None
        parts: list[Any] = [
            sorted((asked, each) for (_, asked), each in self.answers_of(group).items()),
            self.forward.kind,
        ]
        for facts in (self.forward, self.backward):
            sequence = facts.sequences.get(group) if facts is not None else None
            parts.append(sequence.lines if sequence is not None else None)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


class GraphArtifacts:
    """The stored form of one graph: while it is compiled, and after it was loaded."""

    def __init__(self, files: CacheFiles, entry: Entry, *, loaded: bool) -> None:
        self.entry = entry
        self.loaded = loaded
        """Whether the entry was read, and not made in this process."""
        self._files, self._complete = files, loaded
        self._needs_backward = True
        self._pending: dict[str, bytes] = {}
        """Files to write when the entry is complete."""
        self._templates: dict[str, bytes] = {}
        self._given_up = False

    @classmethod
    def new(cls, key: str, compile_name: str) -> GraphArtifacts:
        """Artifacts of a graph that is about to be compiled."""
        return cls(CacheFiles.of(key), Entry(uuid4().hex, compile_name), loaded=False)

    @classmethod
    def read(cls, key: str) -> GraphArtifacts | str:
        """Returns the artifacts of a graph that was compiled before, or why there are none."""
        files = CacheFiles.of(key)
        data = files.read("entry")
        if data is None:
            return "it has no entry"
        try:
            entry = pickle.loads(data)
        except Exception as error:
            return f"its entry cannot be read ({type(error).__name__}: {error})"
        if not isinstance(entry, Entry) or entry.forward is None or entry.result is None:
            return "its entry is not complete"
        found = cls(files, entry, loaded=True)
        kinds = [entry.forward.kind] + (["backward"] if entry.backward is not None else [])
        for kind in kinds:
            template = files.read(f"{entry.token}/{kind}")
            if template is None:
                return f"its {kind} graph is missing"
            found._templates[kind] = template
        return found

    # --- reading ----------------------------------------------------------------------------------
    def template(self, kind: str, mode: compat.FakeTensorMode) -> fx.GraphModule:
        """Returns a rewritten graph, of which variants can be compiled."""
        return compat.unpack_graph(self._templates[kind], mode)

    def variant(self, kind: str, variant: Variant | None) -> StoredVariant | None:
        """Returns the stored code of a variant (None: of the graph itself), if there is any."""
        if not self.loaded:
            return None
        data = self._files.read(self._variant_name(kind, variant))
        if data is None:
            return None
        try:
            found = pickle.loads(data)
        except Exception as error:
            log.warning("compile cache: a variant cannot be read (%s)", error)
            return None
        return found if isinstance(found, StoredVariant) else None

    # --- writing ----------------------------------------------------------------------------------
    def set_forward(self, facts: ForwardFacts, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.entry.forward, self._needs_backward = facts, facts.kind == "forward"
        self._add_graph(facts.kind, gm, inputs)

    def set_backward(self, facts: BackwardFacts, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.entry.backward = facts
        self._add_graph("backward", gm, inputs)

    def add_code(
        self, kind: str, variant: Variant | None, code: object, facts: VariantFacts
    ) -> None:
        """Stores what Inductor generated for a variant (None: for the graph itself)."""
        data = compat.pack_code(code)
        if data is None:
            self.give_up("Inductor's code of it cannot be stored")
            return
        self._add(self._variant_name(kind, variant), pickle.dumps(StoredVariant(data, facts)))

    def write_if_complete(self) -> None:
        """Writes the entry once all its parts are there."""
        entry = self.entry
        if self._complete or self._given_up or entry.result is None or entry.forward is None:
            return
        if self._needs_backward and entry.backward is None:
            return
        written = all(self._files.write(name, data) for name, data in self._pending.items())
        self._pending.clear()
        if written and self._files.write("entry", pickle.dumps(entry)):
            self._complete = True
            self._files.remove_others(entry.token)
            log.info("graph %s: stored in the compile cache", entry.name)
        else:
            self._given_up = True

    def give_up(self, reason: str) -> None:
        """Stores nothing of this graph."""
        if not self._given_up:
            log.info("graph %s: not stored in the compile cache: %s", self.entry.name, reason)
        self._given_up = True
        self._pending.clear()

    def _add_graph(self, kind: str, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        if self._given_up or self.loaded:
            return
        try:
            data = compat.pack_graph(gm, inputs)
        except ImportError as error:
            _warn_of_missing(str(error))
            self.give_up(str(error))
            return
        except Exception as error:  # whatever a value in the graph's metadata raises
            self.give_up(f"its {kind} graph cannot be stored ({type(error).__name__}: {error})")
            return
        self._add(f"{self.entry.token}/{kind}", data)

    def _add(self, name: str, data: bytes) -> None:
        if self._given_up:
            return
        if self._complete:
            self._files.write(name, data)
        else:
            self._pending[name] = data

    def _variant_name(self, kind: str, variant: Variant | None) -> str:
        text = repr(variant)
        if variant is not None:  # sets have no order
            text = repr(
                [
                    (name, sorted(value) if isinstance(value, frozenset) else value)
                    for name, value in vars(variant).items()
                ]
            )
        return f"{self.entry.token}/{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
