"""Queries and edits of FX graphs, for writing passes."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zpasses import compat
from zpasses.graph.dialect import DIALECT, UNSHARD
from zpasses.graph.row_exchange import ALL_TO_ALL_ROWS
from zpasses.graph.tags import Tag, drop_tag, tag_of

WAIT: compat.OpOverload = torch.ops._c10d_functional.wait_tensor.default
_NAMESPACES = ("_c10d_functional", "zpasses")


def copy_graph(graph: fx.Graph | fx.GraphModule) -> fx.GraphModule:
    """Copies a graph for rewriting. Attributes (subgraphs, constants) are shared."""
    if isinstance(graph, fx.GraphModule):
        return compat.clone_graph_module(graph)
    return compat.clone_graph_module(
        graph.owning_module or fx.GraphModule(torch.nn.Module(), graph), graph
    )


def calls(graph: fx.Graph, *targets: Callable[..., Any]) -> list[fx.Node]:
    """Returns the nodes that call one of `targets`, in graph order."""
    wanted = set(targets)
    return [node for node in graph.nodes if node.op == "call_function" and node.target in wanted]


def value_of(node: fx.Node) -> Any:
    """Returns the fake value that the node produces, or None if none is recorded."""
    meta = node.meta
    return meta["val"] if "val" in meta else meta.get("example_value")


def nbytes(value: object) -> int:
    """Returns the bytes of a fake tensor, or of all tensors in a list; 0 for anything else.

    A dynamic size counts as `compat.planned_size`: by the end of its range, else by its hint.
    """
    if isinstance(value, (list, tuple)):
        return sum(nbytes(item) for item in value)
    if not isinstance(value, Tensor):
        return 0
    if compat.has_static_bytes(value):
        return value.nbytes
    count = 1
    for size in value.shape:
        count *= compat.planned_size(size)
    return count * value.element_size()


def numel(value: object) -> int:
    """Returns the elements of a fake tensor; 0 for anything else."""
    return nbytes(value) // value.element_size() if isinstance(value, Tensor) else 0


def is_wait(node: fx.Node) -> bool:
    """Whether a node is a `wait_tensor` call."""
    return node.op == "call_function" and node.target is WAIT


def started_by(wait: fx.Node) -> fx.Node:
    """Returns the node whose result a wait awaits: the collective, unless it awaits an input."""
    source = wait.all_input_nodes[0]
    return source.all_input_nodes[0] if source.target is operator.getitem else source


@dataclass(frozen=True)
class Collective:
    """One call of a graph that communicates."""

    op: str
    """Name without namespace and overload: "all_gather_into_tensor", "unshard", ..."""
    group: str
    """Name of the process group."""
    shapes: tuple[tuple[int | str, ...], ...]
    """Shapes of the inputs. A dynamic size is given as its expression."""
    dtypes: tuple[str, ...]
    reduce_op: str | None
    """"sum", "avg", ...; None if the call does not reduce."""
    nbytes: int
    """Bytes of the inputs; for the dialect's `unshard`, bytes of the full parameter. An exchange
    of rows counts as many rows as its tokens can name.

    Ranks may hold different numbers of rows. `input_nbytes` returns the bytes of this rank's rows.
    """
    encoding: str = ""
    """How the values are encoded (`zpasses.graph.encoding`); "" for exact values."""


def collective_of(node: fx.Node) -> Collective | None:
    """Describes what a node communicates; None if the node does not communicate."""
    if node.op != "call_function" or not communicates(node.target):
        return None
    target: Any = node.target
    arguments = named_arguments(node, target)
    if "group_name" not in arguments:
        return None
    # Ranks may hold different numbers of rows, so `unshard` is described by its full parameter. The
    # rows that an exchange moves are those that it returns.
    given = (
        node
        if target in (UNSHARD, ALL_TO_ALL_ROWS)
        else arguments[target._schema.arguments[0].name]
    )
    inputs = [
        value_of(item)
        for item in (given if isinstance(given, (list, tuple)) else [given])
        if isinstance(item, fx.Node)
    ]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    reduce_op, tag = arguments.get("reduce_op"), tag_of(node)
    return Collective(
        op=compat.op_name(target),
        group=compat.group_name(arguments["group_name"]),
        shapes=tuple(
            tuple(size if isinstance(size, int) else str(size) for size in value.shape)
            for value in tensors
        ),
        dtypes=tuple(str(value.dtype).removeprefix("torch.") for value in tensors),
        reduce_op=reduce_op if isinstance(reduce_op, str) else None,
        nbytes=nbytes(tensors),
        encoding=arguments.get("encoding") or (tag.encoding if tag is not None else ""),
    )


@functools.lru_cache(maxsize=1 << 12)
def communicates(target: object) -> bool:
    """Whether a call starts a functional collective or one of zpasses, or is of the dialect."""
    return (
        isinstance(target, compat.OpOverload)
        and target.namespace in _NAMESPACES
        and target is not WAIT
        and any(argument.name == "group_name" for argument in target._schema.arguments)
    )


def input_nbytes(node: fx.Node, collective: Collective) -> int:
    """Returns the bytes that this rank sends into a collective: its own rows, for a gather."""
    return (
        collective.nbytes
        if node.target is not UNSHARD
        else nbytes([value_of(item) for item in node.all_input_nodes])
    )


def named_arguments(node: fx.Node, target: compat.OpOverload) -> dict[str, Any]:
    """Returns the arguments of a call by name, without those left at their defaults."""
    names = [argument.name for argument in target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def collectives(graph: fx.Graph) -> Iterator[tuple[fx.Node, Collective]]:
    """Yields the nodes that communicate, with their descriptions, in graph order."""
    for node in graph.nodes:
        found = collective_of(node)
        if found is not None:
            yield node, found


def collectives_by_group(graph: fx.Graph) -> dict[str, list[Collective]]:
    """Returns the collectives of each process group by group name, in graph order.

    Groups are sorted by name, identically on every rank.
    """
    by_group: dict[str, list[Collective]] = {}
    for _, each in collectives(graph):
        by_group.setdefault(each.group, []).append(each)
    return dict(sorted(by_group.items()))


def put_inputs_first(graph: fx.Graph) -> None:
    """Moves inputs before all other nodes. torch puts the token of ordered effects, such as the
    checks of torch.linalg, before them.
    """
    first = next(iter(graph.nodes))
    for node in graph.find_nodes(op="placeholder", sort=True):
        if first.op != "placeholder":
            first.prepend(node)


def saved_inputs(
    nodes: Iterable[fx.Node], tag_of: Callable[[fx.Node], Tag | None] = tag_of
) -> set[fx.Node]:
    """Returns the inputs of a backward graph that are freed at their last use: saved values, kept
    parameters, parts of parameters (`zpasses.graph.regathers`) and incoming gradients.

    Other inputs, such as parameters and the batch, belong to the caller. Returns an empty set for
    graphs that are no backward.

    Args:
        nodes: the nodes of the graph.
        tag_of: the tag of a node.
    """
    inputs = [node for node in nodes if node.op == "placeholder"]
    if not any(node.name.startswith("tangents") for node in inputs):
        return set()
    return {
        node
        for node in inputs
        if ((tag := tag_of(node)) is None or tag.kept or tag.role == "part")
        and not node.name.startswith("primals")
    }


def restore_order(nodes: Sequence[fx.Node]) -> None:
    """Moves all nodes of a graph back into an order that they had."""
    for before, node in itertools.pairwise(nodes):
        before.append(node)


def append_placeholder(graph: fx.Graph, name: str, like: fx.Node | None = None) -> fx.Node:
    """Adds an input after the graph's last input, with the value of a node if there is one. The
    caller sets its tag.
    """
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    if like is not None:
        node.meta = {key: like.meta[key] for key in ("val", "tensor_meta") if key in like.meta}
    return node


def returned_values(graph: fx.Graph) -> list[Any]:
    """Returns what a graph returns: nodes, and constants such as None."""
    values: Any = graph.output_node().args[0]
    return list(values) if isinstance(values, (list, tuple)) else [values]


def is_dialect(node: fx.Node) -> bool:
    """Whether a node calls an operator of the dialect (`zpasses.graph.dialect`)."""
    return node.op == "call_function" and node.target in DIALECT


def propagate(node: fx.Node) -> Any:
    """Computes the node's fake value from the fake values of its inputs, and returns it."""
    target = node.target
    assert callable(target)
    args = map_arg(node.args, value_of)
    kwargs = map_arg(node.kwargs, value_of)
    mode = compat.fake_mode_of(
        [value_of(item) for item in node.all_input_nodes]
    ) or _fake_mode_of_graph(node.graph)
    if mode is None:
        return target(*args, **kwargs)
    with mode:
        return target(*args, **kwargs)


def _fake_mode_of_graph(graph: fx.Graph) -> compat.FakeTensorMode | None:
    """Returns the fake mode for calls that take no tensor, such as `empty`."""
    first = next(
        (value_of(node) for node in graph.nodes if isinstance(value_of(node), compat.FakeTensor)),
        None,
    )
    return compat.fake_mode_of([first])


class Editor:
    """Inserts calls before a node, with their fake values and the metadata of an existing node.

    Args:
        graph: the graph to edit.
        before: new calls are inserted before this node, in the order in which they are made.
        like: the node that the new calls replace. They copy its stack trace, module stack,
            recompute mark and other provenance, but not its tag. Defaults to `before`.
    """

    def __init__(self, graph: fx.Graph, before: fx.Node, like: fx.Node | None = None) -> None:
        self._graph, self._before, self._like = graph, before, like or before

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Inserts a call of `target`, computes its fake value, and returns the new node."""
        node = self._insert(target, args, kwargs)
        node.meta["val"] = propagate(node)
        return node

    def call_subgraph(self, name: str, args: Sequence[fx.Node], values: Sequence[Any]) -> fx.Node:
        """Inserts a call of a subgraph, and returns the new node.

        Args:
            name: the attribute of the graph's module that holds the subgraph.
            args: its inputs.
            values: the fake values that it returns.
        """
        with self._graph.inserting_before(self._before):
            body = self._graph.get_attr(name)
        node = self._insert(compat.SUBGRAPH_CALL, (body, name, *args), {})
        node.meta["val"] = tuple(values)
        return node

    def _insert(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, kwargs)
        for key in _PROVENANCE:
            if key in self._like.meta:
                node.meta[key] = self._like.meta[key]
        drop_tag(node)
        return node


_PROVENANCE = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "fwd_source_fn_stack",
    "seq_nr",
    "partitioner_tag",
    "custom",
    "recompute",
    "ac_graph_id",
)


def derived_values(
    graph: fx.Graph, starts: Callable[[fx.Node], bool], without: Collection[fx.Node] = ()
) -> list[fx.Node]:
    """Returns the calls that `starts` holds for, and those that are computed only from them, in
    order. Values of random numbers and of operators with side effects are not among the latter.

    Args:
        without: nodes that are not among them, whatever they are.
    """
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node in without:
            continue
        inputs = node.all_input_nodes
        if starts(node) or (
            inputs
            and all(each in found for each in inputs)
            and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
            and not node.is_impure()
        ):
            found[node] = None
    return list(found)


def replace_node(old: fx.Node, new: fx.Node) -> None:
    """Replaces all uses of `old` by `new`, and erases `old`."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def erase_dead(graph: fx.Graph, roots: Sequence[fx.Node]) -> int:
    """Erases the unused nodes among `roots`, then every node that only erased nodes used.

    Unlike FX's own dead code elimination, it also erases collectives and waits. It never erases a
    graph input. The waits of a collective with several outputs are erased together or not at all,
    because an output that is never awaited is never freed.

    Returns:
        The number of erased nodes.
    """
    erased, queue = 0, list(roots)
    while queue:
        node = queue.pop()
        if node.users or node.op in ("placeholder", "output", "get_attr") or compat.is_erased(node):
            continue
        together = _sibling_waits(node)
        if any(wait.users for wait in together):
            continue
        for each in together or [node]:
            queue.extend(each.all_input_nodes)
            graph.erase_node(each)
            erased += 1
    return erased


def _sibling_waits(node: fx.Node) -> list[fx.Node]:
    """Returns the waits of all outputs of a multi-output collective, given one of these waits.

    Returns an empty list for any other node.
    """
    part = node.all_input_nodes[0] if is_wait(node) else None
    if part is None or part.target is not operator.getitem:
        return []
    return [wait for each in part.all_input_nodes[0].users for wait in each.users if is_wait(wait)]
