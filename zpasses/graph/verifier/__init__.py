"""The verifier checks what must hold after every pass.

The runner records a `PreviousGraph` before a pass. Afterwards it compares every node with it, which
is cheap, and checks in detail only the nodes that the pass changed and what their values reach.
Faults that the graph had before the pass are not reported. docs/writing-passes.md lists what the
verifier finds, and what only a simulation finds (`zpasses.testing.simulate`,
`options={"verify": "simulate"}`).
"""

from __future__ import annotations

from torch import fx

from zpasses.errors import PassError
from zpasses.graph.verifier.collectives import check_collectives
from zpasses.graph.verifier.interface import check_inputs, check_output_exists, check_outputs
from zpasses.graph.verifier.parameters import affected_by, check_params
from zpasses.graph.verifier.shared_memory import check_initialised, check_memory
from zpasses.graph.verifier.values import check_values
from zpasses.graph.verifier.versions import CurrentGraph, PreviousGraph

CHECKS = (
    "lint",
    "inputs",
    "values",
    "collectives",
    "outputs",
    "memory",
    "initialised",
    "parameters",
)
"""What `check` looks at, for dumps."""


def check(
    graph: fx.Graph,
    before: PreviousGraph,
    pass_name: str,
    *,
    changes_inputs: bool = False,
    changes_outputs: bool = False,
) -> None:
    """Raise PassError, naming the pass and the node, unless the graph is right where it changed.

    Args:
        changes_inputs: whether the pass may add, remove and write to graph inputs.
        changes_outputs: whether the pass may change what the graph returns.
    """
    check_output_exists(graph, before, pass_name)
    try:
        graph.lint()
    except Exception as error:
        raise PassError(f"pass {pass_name!r} left a malformed graph: {error}") from error
    now = CurrentGraph(graph)
    changed = before.changed(graph)
    if not changes_inputs:
        check_inputs(now, before, pass_name)
    check_values(changed, before, pass_name)
    check_collectives(changed, now, before, pass_name)
    if not changes_outputs:
        check_outputs(now, before, pass_name)
    check_memory(now, before, pass_name, may_write_inputs=changes_inputs)
    affected = affected_by([*changed, *before.retagged(graph)])
    check_initialised(affected, now, before, pass_name)
    check_params(affected, now, before, pass_name, changes_outputs=changes_outputs)


def check_unchanged(graph: fx.Graph, before: PreviousGraph, pass_name: str) -> None:
    """Raise PassError if a pass that reported no change made one, which nothing would have
    checked.
    """
    changed, erased, moved = before.changed(graph), before.erased(graph), before.moved(graph)
    if changed:
        first = next((node for node in changed if not before.same_call(node)), changed[0])
        what = f"changed {first.format_node()}"
    elif erased:
        what = f"erased {erased[0].name}"
    elif moved is not None:
        what = f"moved {moved.format_node()}"
    else:
        return
    raise PassError(
        f"pass {pass_name!r} returned 0 changes, but {what}. Return how much was changed."
    )
