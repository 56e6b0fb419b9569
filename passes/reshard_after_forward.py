"""ZeRO-3: do not save full parameters for backward, but gather them again there.

Before: the joint graph
  full = wait_tensor(all_gather(shard))
  y = mm(x, full)
  ...
  gx = mm(gy, t(full))
After partitioning
  forward:   full = wait_tensor(all_gather(shard));  y = mm(x, full)
             saves x, shard
  backward:  full = wait_tensor(all_gather(shard));  gx = mm(gy, t(full))

Contract: marks nodes for recomputation, and the partitioner moves them. The marked nodes are the
gathers, the nodes that prepare their inputs, and every forward value that is computed only from
parameters (such as views, casts or a weight norm). Saving such a value would save a full parameter
in another form. Where a parameter has a group to gather it again from, forward saves this rank's
part of the full parameter, and the marked gather is one of these parts (zpasses.graph.regathers).
After a trial partition, the backend takes the marks off the parameters that `keep` selects
(zpasses.backend.step_trials).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from zpasses import compat
from zpasses.graph.patterns import tag_foreign_gathers
from zpasses.graph.queries import derived_values
from zpasses.graph.regathers import insert_regathers
from zpasses.graph.row_exchange import ALL_TO_ALL_ROWS
from zpasses.graph.tags import GATHER_ROLES, tag_of
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.facts import Facts


@dataclass(frozen=True)
class ReshardAfterForward(Pass):
    """Recompute all-gathers in backward instead of saving full parameters."""

    name: ClassVar[str] = "reshard-after-forward"
    level: ClassVar[Level] = Level.JOINT

    keep: Literal["fitting", "nothing"] = "fitting"
    """Which parameters stay full until backward after all: those that save most time within the
    option `memory_budget` of the backend, or, without it, within that of `schedule`; or none.
    Without `schedule`, those that do not raise the peak memory of the step, such as the head, whose
    backward follows its forward at once."""

    @property
    def facts(self) -> Facts:
        return Facts(regathers=True, keeps_params=self.keep == "fitting")

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of nodes that backward recomputes."""
        tag_foreign_gathers(graph, origin=self.name)
        only_forward = insert_regathers(graph, origin=self.name)
        marked = derived_values(graph, _is_part_of_gather, without=only_forward)
        for node in marked:
            compat.mark_recompute(node)
        return len(marked)


def _is_part_of_gather(node: fx.Node) -> bool:
    tag = tag_of(node)
    # Only lookups read exchanged rows, so backward needs none.
    is_table = node.target is not ALL_TO_ALL_ROWS
    return tag is not None and tag.role in GATHER_ROLES and is_table
