"""Allow gradients to be reduced in a later call: cut a backward graph into variants that return
full gradients.

Before
  g = mm(xt, gy)
  reduced = wait(reduce_scatter(g))
  return reduced
After: variants of one graph, chosen at each call
  as it is:  unchanged; nothing is pending, so reduce now
  given:     total = add_(pending, g);  reduced = wait(reduce_scatter(total))
             return reduced
  first:     return None, g
  next:      add_(pending, g);  return None

Contract: marks the reduced gradients that a backward graph returns and whose full gradient can be
identified. `zpasses.runtime.backward_variants` cuts the graph there into variants, whatever nodes
lie between the full and the reduced gradient (a single, coalesced or flat-packed reduction). The
runtime chooses a variant at each call by the open window (`zpasses.coalesce_grad_reduction`) or by
`backwards_per_step`. Runs after every pass that inserts or merges reductions. The deferred gradient
is the one that the model computed, before the cast to the reduction dtype. With `part=average`,
gradients are reduced within their replica in every backward, and only the average over replicas is
deferred. Pending gradients are then as small as shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from zpasses.graph.patterns import tag_foreign_reductions
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.facts import Facts
from zpasses.runtime.grad_slots import mark_deferrable


@dataclass(frozen=True)
class DeferReduction(Pass):
    """Make the reductions of a backward graph deferrable."""

    name: ClassVar[str] = "defer-reduction"
    level: ClassVar[Level] = Level.BACKWARD
    facts: ClassVar[Facts] = Facts(defers=True)

    part: Literal["all", "average"] = "all"
    """`average` defers only the average over the replicas of hybrid sharding. Gradients without
    replicas are deferred as by `all`."""

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of gradients whose reduction can be deferred."""
        tag_foreign_reductions(graph, origin=self.name)
        return mark_deferrable(graph, only_average=self.part == "average")
