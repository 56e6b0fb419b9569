"""ZeRO-1 and ZeRO-2: keep gathered parameters until their shards change.

Before                                     After: two variants of one graph
  full = wait_tensor(all_gather(shard))      fresh:  full = wait_tensor(all_gather(shard));  y = mm(x, full);  return y, full
  y = mm(x, full)                            cached: y = mm(x, full_input);  return y
  return y

Contract: marks the full parameters of a forward graph; `zpasses.runtime.forward_variants` cuts the
variants there, whatever lies in front (single, bucketed or copy-engine gathers), and the runtime
chooses at each call. Parameters that stay valid while others change (frozen ones) are taken from
the kept copies alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zpasses.graph.tags import retag, tagged
from zpasses.pipeline.pipeline import Level, Pass


@dataclass(frozen=True)
class CacheParams(Pass):
    """Keep gathered parameters from one call of the graph to the next."""

    name: ClassVar[str] = "cache-params"
    level: ClassVar[Level] = Level.FORWARD

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of parameters kept."""
        full = [node for node, _ in tagged(graph, "full")]
        for node in full:
            retag(node, cached=True)
        return len(full)
