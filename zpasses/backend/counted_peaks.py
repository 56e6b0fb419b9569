"""What Inductor's code of a step takes beyond its plan, before code is made.

Plans count memory on graphs, for any target and in little time. Within a budget, Inductor lowers
the graphs of the chosen plan once more, and what its kernels take is counted. If they take more
than the plan, the planner counts the difference, too.
"""

from __future__ import annotations

import itertools
import logging
import operator
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import fx

from zpasses import compat
from zpasses.cost.memory.code_memory import added_by_code, mark_added_by_code
from zpasses.cost.memory.liveness import bytes_within, liveness
from zpasses.graph.cached_params import held_bytes, held_node, is_held
from zpasses.graph.encoding import expand_encodings
from zpasses.graph.queries import is_wait, returned_values
from zpasses.graph.tags import tag_of
from zpasses.runtime.forward_variants import pin_shards
from zpasses.runtime.gloo import replace_gloo_collectives

log = logging.getLogger("zpasses")

Added = tuple[dict[str, int], dict[str, int]]
"""Of forward and of backward: name of a node -> bytes that live in addition while it runs."""
CountAdded = Callable[[tuple[fx.GraphModule, fx.GraphModule], int], Added | None]
"""As `bytes_added`, without the options of Inductor."""


class CountedPlans:
    """What the code of plans was found to add, of all plans with one number of chunks."""

    def __init__(self) -> None:
        self._added: dict[Hashable, Added] = {}
        self._likely: Added = {}, {}
        self._counted: set[Hashable] = set()

    def has(self, choice: Hashable) -> bool:
        """Whether `add` has been called for a choice."""
        return choice in self._counted

    def add(self, choice: Hashable, partition: Hashable, added: Added) -> None:
        """Keeps what the code of a choice adds, for all choices with the same partition. Others are
        taken to add as much at the nodes that they have, too.
        """
        self._counted.add(choice)
        self._added[partition] = added
        for likely, found in zip(self._likely, added, strict=True):
            for name, size in found.items():
                likely[name] = max(size, likely.get(name, 0))

    def mark(self, graphs: tuple[fx.GraphModule, fx.GraphModule], partition: Hashable) -> None:
        """Has the nodes of the graphs of a partition need what its code adds."""
        for gm, sizes in zip(graphs, self._added.get(partition, self._likely), strict=True):
            mark_added_by_code(gm.graph, sizes)


def bytes_added(
    graphs: tuple[fx.GraphModule, fx.GraphModule], model_outputs: int, patches: Mapping[str, Any]
) -> Added | None:
    """Returns what the code of a forward and of its backward takes beyond what liveness counts.

    Args:
        graphs: forward and backward, which stay as they are.
        model_outputs: how many outputs of forward are those of the model.
        patches: options of Inductor.

    Returns:
        None if it is not counted: if a graph calls subgraphs, has sizes that change or encoded
        tensors, or if Inductor does not lower it.
    """
    # What decodes is counted as it stands, and has other kernels in code.
    if any(expand_encodings(gm) is not gm for gm in graphs):
        return None
    try:
        forward, backward = map(_as_run, graphs)
        code = compat.code_of_step(forward, backward, model_outputs, patches, bytes_within)
    except Exception as error:  # the compile shows it, if it fails there, too
        log.info("what the code of a plan takes is not counted: %s", error)
        return None
    if code is None:
        return None
    ahead, back = (_added_per_node(gm.graph, each) for gm, each in zip(graphs, code, strict=True))
    return ahead, back


def _added_per_node(graph: fx.Graph, code: compat.StepCode) -> dict[str, int]:
    """Returns what the code of a graph takes beyond its nodes.

    A schedule decides which kernels may be fused, and that changes how much lives at a node. So
    what lives there both with and without fusion counts.
    """
    memory = liveness(graph)
    changes = [0] * (len(memory.nodes) + 1)
    for buffer in memory.buffers:
        if not _is_moved(buffer.node) or buffer.last == len(memory.nodes) - 1:
            changes[buffer.first] += buffer.nbytes
            changes[buffer.last + 1] -= buffer.nbytes
    counted = itertools.accumulate(changes[:-1])
    held = held_bytes(graph)
    unfused = _per_node(memory.nodes, code.unfused)
    fused = _per_node(memory.nodes, _alike_between_operators(code.fused))
    added = {}
    for node, live, one, other in zip(memory.nodes, counted, unfused, fused, strict=True):
        more = min(one, other) + held - (live - added_by_code(node))
        if more > 0 and not _is_moved(node):
            added[node.name] = more
    return added


def _per_node(nodes: Sequence[fx.Node], steps: Sequence[compat.CodeStep]) -> list[int]:
    """Returns the most bytes that live in code while it computes each node. A step that runs out of
    the order of the graph, such as a fused kernel that is named after a later node, or one that
    fills memory, counts where the next step runs that is in order. Steps that passes move, such as
    waits, only say what lives between two others.
    """
    place: dict[str, int] = {}
    moved: set[str] = set()
    for at, node in enumerate(nodes):
        is_part = node.target is operator.getitem  # which a kernel is named after, too
        maker = node.all_input_nodes[0] if is_part else node
        place[node.name] = place[maker.name] if is_part else at
        if _is_moved(maker):
            moved.add(node.name)
    staying = [step for step in steps if step.call not in moved]
    places = iter(_in_order([place.get(step.call) for step in staying]))
    found = [0] * len(nodes)
    before, live_before = -1, 0
    for step in steps:
        if step.call in moved:
            live_before = min(live_before, step.live_bytes)
            continue
        at = next(places)
        for between in range(before + 1, at):
            found[between] = min(live_before, step.live_bytes)
        found[at] = max(found[at], step.live_bytes)
        before, live_before = at, step.live_bytes
    for after in range(before + 1, len(nodes)):
        found[after] = live_before
    return found


def _in_order(places: Sequence[int | None]) -> list[int]:
    """Returns places in an order that never falls. Most stay, and the others, and those that are
    not known, become the next one that stays, or else the last one.
    """
    ends: list[int] = []
    """Length of an order -> its last place, the lowest of all orders of this length so far."""
    reached: list[int] = []
    """Length of the longest order that ends at each place; 0 if it is not known."""
    for place in places:
        length = 0 if place is None else bisect_right(ends, place) + 1
        reached.append(length)
        if place is not None:
            ends[length - 1 : length] = [place]
    following, length = ends[-1] if ends else 0, len(ends)
    found: list[int] = []
    for place, longest in zip(reversed(places), reversed(reached), strict=True):
        if place is not None and longest == length and (place <= following or length == len(ends)):
            following = place
            length -= 1
        found.append(following)
    return found[::-1]


def _alike_between_operators(steps: Sequence[compat.CodeStep]) -> list[compat.CodeStep]:
    """Returns steps in which kernels take what the largest of those next to them takes: which of
    them computes a node is not known once they are fused.
    """
    found: list[compat.CodeStep] = []
    for is_kernel, group in itertools.groupby(steps, key=lambda step: step.is_kernel):
        each = list(group)
        most = max(step.live_bytes for step in each)
        found += [step._replace(live_bytes=most) for step in each] if is_kernel else each
    return found


def _is_moved(node: fx.Node) -> bool:
    """Whether passes move a node: of a collective, or of a copy from or to the host."""
    return is_wait(node) or getattr(node.target, "namespace", None) in compat.MOVED_NAMESPACES


def _as_run(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph that returns what outlives it, as its variants do."""
    gm = compat.clone_graph_module(gm)
    held = dict.fromkeys(node for node in gm.graph.nodes if node.op != "output" and is_held(node))
    for node in gm.graph.nodes:
        tag = tag_of(node)
        if tag is not None and tag.cached:
            held[held_node(node)] = None
    if held:
        output = gm.graph.output_node()
        values = returned_values(gm.graph)
        output.args = ((*values, *(node for node in held if node not in values)),)
    pin_shards(gm.graph)
    return replace_gloo_collectives(gm)
