"""Facts: what the runner and the backend know of a pass beside its rewrite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from zpasses.graph.loss_chunks import Gradients


@dataclass(frozen=True)
class Facts:
    """What a pass declares about itself, as its attribute `facts`."""

    changes_inputs: bool = False
    """The pass may add, remove, reorder or write to the graph's inputs. It is not simulated."""
    changes_outputs: bool = False
    """The pass may change the number, order or kind of the graph's outputs. It is not simulated."""
    simulatable: bool = True
    """`verify="simulate"` can check the pass: if all ranks run the graph of this rank, on inputs of
    their own, this rank computes what it should."""
    reorders_sums: bool = False
    """Floating-point sums may be added up in another order, which changes their rounding.
    `verify="simulate"` then compares with a tolerance."""
    changes_values: Callable[[fx.Graph], object] | None = None
    """Rewrites a copy of the graph before the pass to one that says which values the pass changes,
    such as arguments of the dialect that round. `verify="simulate"` and the checks of
    `zpasses.testing` compare the pass with that graph, bit for bit. None if it changes none."""
    votes: bool = False
    """The ranks vote on what the pass does to a graph."""
    uses_engines: bool = False
    """Copy engines may run collectives of the pass. The ranks vote on the route of each group when
    its collectives first run."""
    cacheable: bool = True
    """A later process may run a graph that the pass rewrote, without running the pass: it leaves
    nothing behind but the graph and the answers of its votes."""
    regathers: bool = False
    """Backward gathers parameters again instead of saving them full."""
    keeps_params: bool = False
    """Parameters that a pass has backward gather again may be kept full instead."""
    caches_params: bool = False
    """Gathered parameters stay in memory until they change, as in stages 1 and 2."""
    chunks_loss: Gradients | None = None
    """With a memory budget, the backend may compute the head and its loss in chunks of tokens, and
    their gradients there. None if it may not."""
    defers: bool = False
    """The reductions of backward become deferrable. The pass has an option `part`, which is
    `"average"` to defer only the average over replicas."""
    plans_within: str | None = None
    """The memory budget of a pass that plans a schedule, such as "10%" or "60GiB". It is the pass's
    option `memory_budget`; the option `memory_budget` of the backend replaces it."""
    without_schedule: str = ""
    """Pipeline text of what replaces a pass that plans a schedule in the stages with the option
    `prefetch`, where collectives leave their graph."""
