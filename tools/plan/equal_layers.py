"""Partitions of a joint graph that save the same values in each of its equal layers.

torch's partitioner chooses what to save for the whole graph, so it treats two equal layers
differently where memory is short. What it chooses for one of them is taken for all, and what a
layer hands to the next one is saved, so that backward recomputes each layer by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from torch import Tensor, fx

from zpasses import compat
from zpasses.backend.partition_marks import mark, marks_of
from zpasses.backend.partition_plan import Graphs
from zpasses.backend.step_trials import StepTrials
from zpasses.graph.queries import value_of
from zpasses.graph.tags import tag_of
from zpasses.tools.plan.repeated_layers import layer_starts

_FRACTIONS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05)
"""Of all activations, from which what a layer saves is taken."""
_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Of the bytes of a layer, as far as backward can compute them again, that it does."""


class EqualPartitions:
    """Partitions of the same step on several meshes. What their layers save is found once, for the
    first joint graph of those that differ only in what they communicate.
    """

    def __init__(self) -> None:
        self._marks: dict[object, list[Mapping[str, bool]]] = {}

    def of(self, trials: StepTrials) -> Iterator[Graphs]:
        """Yields the graphs of each partition that saves the same values in each layer."""
        computed = _computed(trials.gm.graph)
        if computed not in self._marks:
            self._marks[computed] = list(_equal_marks(trials))
        for marks in self._marks[computed]:
            gm = compat.clone_graph_module(trials.leaner_gm())
            mark(gm.graph, marks)
            yield trials.partition(gm, 1.0)


def _computed(joint: fx.Graph) -> tuple[object, ...]:
    """Returns what a joint graph computes, without what it communicates for its parameters."""
    return tuple(
        (
            node.name,
            str(node.target),
            tuple(each.name for each in node.all_input_nodes if tag_of(each) is None),
            _size(value_of(node)),
            compat.recompute_policy(node),
        )
        for node in joint.nodes
        if node.op == "call_function" and tag_of(node) is None
    )


def _size(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return tuple(map(_size, value))
    return (str(value.shape), str(value.dtype)) if isinstance(value, Tensor) else str(value)


def _equal_marks(trials: StepTrials) -> Iterator[Mapping[str, bool]]:
    """Yields the marks of each partition that saves the same values in each layer.

    What is communicated has none: on another mesh, its names may be those of other nodes. So full
    parameters are saved or gathered again as the graph itself says.
    """
    joint = trials.gm.graph
    communicated = {node.name for node in joint.nodes if tag_of(node) is not None}
    layers = _layers(joint)
    handed = _handed_on(layers)
    seen: set[frozenset[str]] = set()
    fractions = map(trials.trial_graphs, _FRACTIONS)
    for graphs in itertools.chain(fractions, _cheapest_again(trials, layers, handed)):
        saved = {node.name for node in graphs[1].graph.find_nodes(op="placeholder")}
        for example in layers[1:-1]:
            twins: dict[str, str] = {}
            for layer in layers:
                twins |= _twins(layer, example)
            chosen = handed.union(name for name, twin in twins.items() if twin in saved)
            if chosen not in seen:
                seen.add(chosen)
                marks = marks_of(joint, graphs, twins) | dict.fromkeys(handed, True)
                yield {name: each for name, each in marks.items() if name not in communicated}


def _cheapest_again(
    trials: StepTrials, layers: Sequence[Sequence[fx.Node]], handed: frozenset[str]
) -> Iterator[Graphs]:
    """Yields trials in which backward computes again what is cheapest per byte of each layer."""
    example = layers[len(layers) // 2]
    own = {node.name for node in example} - handed
    ranked = [each for each in trials.recomputable() if each.name in own]
    twins = [(name, twin) for layer in layers for name, twin in _twins(layer, example).items()]
    for share in _SHARES:
        left = share * sum(each.nbytes for each in ranked)
        taken = set[str]()
        for each in ranked:
            if each.nbytes <= left:
                taken.add(each.name)
                left -= each.nbytes
        if taken:
            yield trials.trial_graphs(1.0, frozenset(n for n, twin in twins if twin in taken))


def _layers(joint: fx.Graph) -> list[list[fx.Node]]:
    """Returns the nodes of the forward of each layer, from its first read of a parameter on."""
    nodes = [node for node in joint.nodes if node.op == "call_function"]
    params = (tag.params if (tag := tag_of(node)) is not None else () for node in nodes)
    starts = sorted(layer_starts(enumerate(params)).values())
    if len(starts) > 1:
        starts.append(2 * starts[-1] - starts[-2])
    return [nodes[start:end] for start, end in itertools.pairwise(starts)]


def _twins(layer: Sequence[fx.Node], example: Sequence[fx.Node]) -> Mapping[str, str]:
    """Returns for the nodes of a layer those of an equal layer, by name. One of the two may compute
    what all layers share.
    """
    matcher = SequenceMatcher(a=_targets(layer), b=_targets(example), autojunk=False)
    return {
        layer[block.a + at].name: example[block.b + at].name
        for block in matcher.get_matching_blocks()
        for at in range(block.size)
    }


def _targets(layer: Sequence[fx.Node]) -> list[str]:
    return [str(node.target) for node in layer]


def _handed_on(layers: Sequence[Sequence[fx.Node]]) -> frozenset[str]:
    """Returns the names of the values that a layer hands to the next one, but for what can be
    computed from others of them; those of the last layer are the same.
    """
    found: set[str] = set()
    for layer, following in itertools.pairwise(layers):
        handed = {node for node in layer if not set(following).isdisjoint(node.users)}
        own = set(layer)
        found.update(node.name for node in handed if not _follows(node, handed - {node}, own))
    last = _twins(layers[-1], layers[-2]) if len(layers) > 1 else {}
    return frozenset(found.union(name for name, twin in last.items() if twin in found))


def _follows(node: fx.Node, given: set[fx.Node], own: set[fx.Node]) -> bool:
    """Whether a node can be computed from given nodes by nodes of its own layer."""
    return bool(node.all_input_nodes) and all(
        each in given or (each in own and _follows(each, given, own))
        for each in node.all_input_nodes
    )
