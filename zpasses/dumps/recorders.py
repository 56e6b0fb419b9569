"""Chooses the recorders of a compile: a dump, torch's structured trace, both, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import fx

from zpasses import compat
from zpasses.cost.target import Target
from zpasses.graph.groups import group_labels
from zpasses.graph.printer import listing
from zpasses.pipeline.pipeline import Pass, PassRecord
from zpasses.pipeline.recorder import Recorder, Recorders, enable_runtime_notes

__all__ = ["TraceArtifacts", "recorders_for"]


class TraceArtifacts(Recorder):
    """Writes every graph to torch's structured trace (TORCH_TRACE, tlparse) as an artifact of the
    compile.
    """

    def __init__(self) -> None:
        self._number = 0

    def before(self, graph_name: str, level: str, graph: fx.Graph) -> None:
        self._trace(f"{graph_name}_before_{level}_passes", graph)

    def after(
        self,
        graph_name: str,
        level: str,
        each: Pass,
        record: PassRecord,
        graph: fx.Graph,
        notes: Sequence[str],
    ) -> None:
        if record.changes:
            self._trace(f"{graph_name}_after_{each.name}", graph)

    def failed(
        self,
        graph_name: str,
        level: str,
        each: Pass,
        error: BaseException,
        graph: fx.Graph,
        notes: Sequence[str],
    ) -> None:
        self._trace(
            f"{graph_name}_after_failed_{each.name}",
            graph,
            f"# {type(error).__name__}: {error}\n".replace("\n", "\n# ")[:-2],
        )

    def variant(
        self, graph_name: str, of: str, given: Sequence[str], kept: Sequence[str], graph: fx.Graph
    ) -> None:
        self._trace(f"{graph_name}_variant", graph)

    def _trace(self, name: str, graph: fx.Graph, head: str = "") -> None:
        compat.trace_artifact(f"zpasses_{self._number:02d}_{name}", lambda: head + listing(graph))
        self._number += 1


def recorders_for(
    dump: str | None,
    ranks: frozenset[int] | None,
    target: Target,
    describe: Callable[[], Mapping[str, Any]],
) -> Recorders:
    """The recorders of one compile of this process.

    Args:
        dump: folder of the dump; None writes no dump.
        ranks: ranks that write a dump; None is all.
        describe: returns the fields of compile.json, and, as "mesh_dimensions", those of
            `zpasses.graph.groups.mesh_dimensions` that are known. It is called only if this rank
            writes a dump.

    Raises:
        DumpError: if the path is no folder, cannot be written to, or contains something else.
    """
    watching: list[Recorder] = []
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
    enable_runtime_notes(watching)
    return Recorders(watching)
