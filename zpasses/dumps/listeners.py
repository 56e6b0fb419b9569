"""Chooses who listens to a compile: a dump, torch's structured trace, both, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import fx

from zpasses import compat
from zpasses.cost.time.target import Target
from zpasses.graph.groups import group_labels
from zpasses.graph.printer import listing
from zpasses.pipeline import events


class TraceArtifacts:
    """Listener that writes every graph to torch's structured trace (TORCH_TRACE, tlparse) as an
    artifact of the compile.
    """

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, event: object) -> None:
        match event:
            case events.LevelStarted(name, level, graph):
                self._trace(f"{name}_before_{level}_passes", graph)
            case events.PassRan(name, each=each, record=record, graph=graph) if record.changes:
                self._trace(f"{name}_after_{each.name}", graph)
            case events.PassFailed(name, each=each, error=error, graph=graph):
                text = f"# {type(error).__name__}: {error}\n".replace("\n", "\n# ")[:-2]
                self._trace(f"{name}_after_failed_{each.name}", graph, text)
            case events.VariantBuilt(of, graph=graph):
                self._trace(f"{of}_variant", graph)

    def _trace(self, name: str, graph: fx.Graph, head: str = "") -> None:
        compat.trace_artifact(f"zpasses_{self._number:02d}_{name}", lambda: head + listing(graph))
        self._number += 1


def events_for(
    dump: str | None,
    ranks: frozenset[int] | None,
    target: Target,
    describe: Callable[[], Mapping[str, Any]],
) -> events.Events:
    """The events of one compile of this process, with their listeners.

    Args:
        dump: folder of the dump; None writes no dump.
        ranks: ranks that write a dump; None is all.
        describe: returns the fields of compile.json, and, as "mesh_dimensions", those of
            `zpasses.graph.groups.mesh_dimensions` that are known. It is called only if this rank
            writes a dump.

    Raises:
        DumpError: if the path is no folder, cannot be written to, or contains something else.
    """
    watching: list[events.Listener] = []
    if dump is not None:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        from zpasses.dumps.runs import create_rank_folder
        from zpasses.dumps.writer import CompileDump

        if ranks is None or rank in ranks:
            folder = create_rank_folder(dump, rank, world)
            described = dict(describe())
            known = described.pop("mesh_dimensions", {})
            groups: dict[str, Any] = {"groups": {}, "group_labels": {}}
            if dist.is_initialized():
                groups["groups"] = {
                    name: compat.group_ranks(name) for name in compat.group_backends()
                }
                groups["group_labels"] = group_labels(known)
            info = {"rank": rank, "world": world, **groups, **described}
            watching.append(CompileDump(folder, info, target))
    if compat.is_structured_trace_on():
        watching.append(TraceArtifacts())
    return events.Events(watching)
