"""ZeRO-1 and ZeRO-2: cache gathered parameters until their shards change.

Before
  full = wait_tensor(all_gather(shard))
  y = mm(x, full)
  return y
After: two variants of one graph
  fresh:   full = wait_tensor(all_gather(shard))
           y = mm(x, full);  return y, full
  cached:  y = mm(x, full_input);  return y

Contract: marks the full parameters of a forward graph. `zpasses.runtime.forward_variants` cuts the
graph there into variants, whatever kind of gather produces the parameter (single, bucketed or
copy-engine). The runtime chooses a variant at each call. If only some parameters change, the others
(such as frozen ones) keep coming from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zpasses.graph.tags import retag, tagged
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.facts import Facts


@dataclass(frozen=True)
class CacheParams(Pass):
    """Cache gathered parameters from one call of the graph to the next."""

    name: ClassVar[str] = "cache-params"
    level: ClassVar[Level] = Level.FORWARD
    facts: ClassVar[Facts] = Facts(caches_params=True)

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of parameters marked for caching."""
        full = [node for node, _ in tagged(graph, "full")]
        for node in full:
            retag(node, cached=True)
        return len(full)
