"""Let gradients be reduced in a later call: cut a backward graph into variants that leave them
full.

Before                                   After: variants of one graph, chosen at each call
  g = mm(xt, gy)                           as it is:      nothing is pending, reduce now
  mine = wait(reduce_scatter(g))           given:         total = add_(pending, g);  mine = wait(reduce_scatter(total));  return mine
  return mine                              first:         return None, g
                                           next:          add_(pending, g);  return None

Contract: marks the reduced gradients that a backward graph returns and whose full gradient can be
told; `zpasses.runtime.backward_variants` cuts the variants there, whatever lies between (single,
coalesced or flat-packed reductions), and the runtime chooses at each call by the window that is
open (`zpasses.coalesce_grad_reduction`) or by `backwards_per_step`. Runs behind everything that
makes or merges reductions. What is deferred is the gradient as the model computed it, before the
cast to the dtype of reductions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zpasses.graph.patterns import tag_foreign_reductions
from zpasses.pipeline.pipeline import Level, Pass
from zpasses.runtime.grad_slots import mark_deferrable


@dataclass(frozen=True)
class DeferReduction(Pass):
    """Make the reductions of a backward graph deferrable."""

    name: ClassVar[str] = "defer-reduction"
    level: ClassVar[Level] = Level.BACKWARD

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of gradients whose reduction can be deferred."""
        tag_foreign_reductions(graph, origin=self.name)
        return mark_deferrable(graph)
