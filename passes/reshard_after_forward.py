"""ZeRO-3: never save a full parameter for backward; gather it again there.

Before (joint graph)                      After, once partitioned
  full = wait_tensor(all_gather(shard))     forward:  full = wait_tensor(all_gather(shard));  y = mm(x, full);  saves x, shard
  y = mm(x, full)                           backward: full = wait_tensor(all_gather(shard));  gx = mm(gy, t(full))
  ...
  gx = mm(gy, t(full))

Contract: marks; the partitioner moves. Marked are the gathers, what prepares them, and every
forward value that is computed from parameters alone (views, casts, a weight norm), because saving
such a value would save a full parameter under another name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zpasses import compat
from zpasses.graph.patterns import tag_foreign_gathers
from zpasses.graph.tags import GATHER_ROLES, tag_of
from zpasses.pipeline.pipeline import Level, Pass


@dataclass(frozen=True)
class ReshardAfterForward(Pass):
    """Recompute gathers in backward instead of saving full parameters."""

    name: ClassVar[str] = "reshard-after-forward"
    level: ClassVar[Level] = Level.JOINT

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of nodes that backward recomputes."""
        tag_foreign_gathers(graph, origin=self.name)
        marked: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op == "call_function" and (
                _is_part_of_gather(node) or _depends_on_parameters_alone(node, marked)
            ):
                compat.mark_recompute(node)
                marked.add(node)
        return len(marked)


def _is_part_of_gather(node: fx.Node) -> bool:
    tag = tag_of(node)
    return tag is not None and tag.role in GATHER_ROLES


def _depends_on_parameters_alone(node: fx.Node, marked: set[fx.Node]) -> bool:
    inputs = node.all_input_nodes
    if not inputs or not all(item in marked for item in inputs):
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded not in tags and not node.is_impure()
