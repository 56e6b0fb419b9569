"""Equal blocks of a captured graph: they become calls of one subgraph, which is compiled once.

A block is what one module computes in a row, such as a layer of a transformer. Blocks of equal
operators, constants and shapes differ only in the tensors that they read. AOTAutograd and Inductor
compile their subgraph once, and the code runs for every block. Parameters are gathered outside of
the subgraph, so that the passes schedule all collectives of the whole graph.
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.backend.cache.graph_text import NotCacheableError, graph_text, input_text
from zpasses.backend.capture import is_read_of_shard
from zpasses.graph.nodes import value_of
from zpasses.graph.sources import module_paths

__all__ = [
    "Outlined",
    "blocks_of",
    "has_subgraph_calls",
    "outline_blocks",
    "read_subgraph_inputs_directly",
]


@dataclass
class Outlined:
    """What became of the blocks of a graph."""

    calls: dict[str, list[str]] = field(default_factory=dict)
    """Name of each subgraph -> the modules that call it, in their order."""
    kept: dict[str, str] = field(default_factory=dict)
    """Name of each module that stays in the graph -> the reason."""


@dataclass
class _Block:
    """The nodes of one call of a module."""

    module: str
    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


def outline_blocks(gm: fx.GraphModule, patterns: str) -> Outlined:
    """Replace equal blocks of Dynamo's graph by calls of subgraphs, in place.

    Args:
        gm: the graph, whose sharded inputs are local shards.
        patterns: names of modules with wildcards, separated by commas, such as "layers.*"; "auto"
            for all numbered modules, which are those of lists.
    """
    _hoist_reads(gm)
    outlined = Outlined()
    groups: dict[str, list[tuple[_Block, fx.GraphModule]]] = {}
    for block in _blocks(gm, _matcher(patterns)):
        try:
            body = _body(gm, block)
            key = f"{input_text([value_of(each) for each in block.inputs])}\n{graph_text(body)}"
        except _NotOutlinedError as error:
            outlined.kept[block.module] = str(error)
        except NotCacheableError as error:
            outlined.kept[block.module] = f"blocks cannot be compared: {error}"
        else:
            groups.setdefault(key, []).append((block, body))
    replaced: dict[fx.Node, fx.Node] = {}
    for members in groups.values():
        if len(members) == 1:
            outlined.kept[members[0][0].module] = "no other block is equal"
            continue
        name = f"block_{len(outlined.calls)}"
        outlined.calls[name] = [block.module for block, _ in members]
        gm.add_submodule(name, members[0][1])
        for block, _ in members:
            _replace(gm, block, name, replaced)
    if outlined.calls:
        gm.graph.lint()
        gm.recompile()
    return outlined


def has_subgraph_calls(gm: fx.GraphModule) -> bool:
    """Whether the graph, or a graph that it contains, calls a subgraph."""
    graphs = (each.graph for each in gm.modules() if isinstance(each, fx.GraphModule))
    return any(compat.is_subgraph_call(node) for graph in graphs for node in graph.nodes)


class _NotOutlinedError(Exception):
    """A block that stays in the graph. The message says why."""


def _matcher(patterns: str) -> re.Pattern[str]:
    if patterns == "auto":
        return re.compile(r"(.*\.)?\d+")
    return re.compile("|".join(fnmatch.translate(each.strip()) for each in patterns.split(",")))


def _blocks(gm: fx.GraphModule, matcher: re.Pattern[str]) -> Iterator[_Block]:
    """Yields the blocks of a graph in their order."""
    calls = (node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr"))
    for at, nodes in itertools.groupby(calls, lambda node: _block_of(node, matcher)):
        if at is not None:
            inner = [node for node in nodes if not _stays_outside(node)]
            if inner:
                yield _Block(at[0], inner)


def _block_of(node: fx.Node, matcher: re.Pattern[str]) -> tuple[str, str] | None:
    """The outermost matching module that a node belongs to, and the key of its call."""
    body = _operator_body(node)
    if node.target is operator.getitem and not module_paths(node):
        return _block_of(node.all_input_nodes[0], matcher)
    if body is not None:
        inner = {_block_of(each, matcher) for each in body.graph.nodes if each.op in _CALLS}
        return inner.pop() if len(inner) == 1 else None
    for key, name in module_paths(node).items():
        if matcher.fullmatch(name):
            return name, key
    return None


_CALLS = ("call_function", "call_method", "call_module")


def _operator_body(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a higher-order operator, such as a checkpoint, runs."""
    if not isinstance(node.target, compat.HigherOrderOperator):
        return None
    given = node.args[0] if node.args else None
    if not isinstance(given, fx.Node) or given.op != "get_attr":
        return None
    body = getattr(node.graph.owning_module, str(given.target), None)
    return body if isinstance(body, fx.GraphModule) else None


def _hoist_reads(gm: fx.GraphModule) -> None:
    """Move reads of parameters out of the bodies of checkpoints, to before their calls.

    Blocks do not read parameters, and whether a full parameter is gathered again for backward is
    what passes decide.
    """
    users: dict[fx.GraphModule, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        body = _operator_body(node)
        if body is not None:
            users.setdefault(body, []).append(node)
    for body, calls in users.items():
        inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
        if all(len(call.args) == 1 + len(inputs) for call in calls):
            _hoist_reads_of(body, inputs, calls)


def _hoist_reads_of(
    body: fx.GraphModule, inputs: Sequence[fx.Node], calls: Sequence[fx.Node]
) -> None:
    copies: list[dict[fx.Node, Any]] = [
        dict(zip(inputs, call.args[1:], strict=True)) for call in calls
    ]
    for node in list(body.graph.nodes):
        if not is_read_of_shard(node) or node.all_input_nodes[0] not in copies[0]:
            continue
        for call, known in zip(calls, copies, strict=True):
            with call.graph.inserting_before(call):
                known[node] = call.graph.node_copy(node, known.__getitem__)
    for node in reversed(list(body.graph.nodes)):
        if node.op == "placeholder" or node not in copies[0]:
            continue
        if any(user not in copies[0] for user in node.users):
            with body.graph.inserting_before(next(iter(body.graph.nodes))):
                given = body.graph.placeholder(f"{node.name}_full")
            given.meta = {key: node.meta[key] for key in _BODY_META if key in node.meta}
            node.replace_all_uses_with(given)
            for call, known in zip(calls, copies, strict=True):
                call.args = (call.args[0], known[node], *call.args[1:])
        body.graph.erase_node(node)
    for node in inputs:
        if not node.users and any(is_read_of_shard(user) for user in copies[0][node].users):
            at = [each for each in body.graph.nodes if each.op == "placeholder"].index(node)
            body.graph.erase_node(node)
            for call in calls:
                call.args = (*call.args[: at + 1], *call.args[at + 2 :])
    body.recompile()


def _stays_outside(node: fx.Node) -> bool:
    """Whether a node of a block stays in the graph: reads of parameters, and sizes."""
    return is_read_of_shard(node) or not isinstance(value_of(node), (Tensor, tuple, list))


def _body(gm: fx.GraphModule, block: _Block) -> fx.GraphModule:
    """Returns the subgraph of a block, and sets its inputs and outputs.

    Raises:
        _NotOutlinedError: if the block cannot be a subgraph.
    """
    inside = set(block.nodes)
    order = {node: number for number, node in enumerate(block.nodes)}
    graph, copies, root = fx.Graph(), dict[fx.Node, fx.Node](), torch.nn.Module()
    given = dict.fromkeys(
        source for node in block.nodes for source in node.all_input_nodes if source not in inside
    )
    for source in given:
        held = getattr(gm, str(source.target), None) if source.op == "get_attr" else None
        if isinstance(held, fx.GraphModule):
            name = f"graph_{len(copies)}"
            root.add_module(name, _renamed(held))
            copies[source] = graph.get_attr(name)
            continue
        _check_value(source, "reads")
        made = graph.placeholder(f"input_{len(block.inputs)}")
        made.meta["example_value"] = value_of(source)
        copies[source] = made
        block.inputs.append(source)
    for number, node in enumerate(block.nodes):
        _check_node(node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: copies[each])
        made = graph.create_node(node.op, node.target, args, kwargs, f"node_{number}")
        made.meta = {key: node.meta[key] for key in _BODY_META if key in node.meta}
        copies[node] = made
        if any(user not in inside for user in node.users):
            _check_value(node, "returns")
            block.outputs.append(node)
    block.outputs.sort(key=lambda node: order[node])
    _check_memory(block)
    graph.output(tuple(copies[each] for each in block.outputs))
    return fx.GraphModule(root, graph)


def _renamed(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph whose names do not tell which block it is from."""
    graph, copies, root = fx.Graph(), dict[fx.Node, fx.Node](), torch.nn.Module()
    for number, node in enumerate(gm.graph.nodes):
        target = node.target
        if node.op == "get_attr":
            held = getattr(gm, str(target), None)
            if not isinstance(held, fx.GraphModule):
                raise _NotOutlinedError(f"a subgraph of it holds the value {target!r}")
            target = f"graph_{number}"
            root.add_module(target, _renamed(held))
        elif node.op == "placeholder":
            target = f"input_{number}"
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: copies[each])
        made = graph.create_node(node.op, target, args, kwargs, f"node_{number}")
        made.meta = {key: node.meta[key] for key in _BODY_META if key in node.meta}
        copies[node] = made
    return fx.GraphModule(root, graph)


def _check_value(node: fx.Node, does: str) -> None:
    value = value_of(node)
    if not isinstance(value, (Tensor, int, torch.SymInt)):
        kind = type(value).__name__
        raise _NotOutlinedError(f"it {does} {node.name}, a {kind} instead of a tensor")


def _check_node(node: fx.Node) -> None:
    """Raise if a node changes state that other blocks or later code see."""
    name = getattr(node.target, "__name__", str(node.target))
    module = getattr(node.target, "__module__", None) or ""
    if "c10d" in f"{module}{node.target}" or "torch.distributed" in module:
        raise _NotOutlinedError(f"it communicates ({name})")
    if name.startswith(("_enter_", "_exit_", "_set_grad_enabled", "set_")):
        raise _NotOutlinedError(f"it changes settings of torch ({name})")


def _check_memory(block: _Block) -> None:
    """Raise if a block writes to its inputs, or returns views of them or of each other."""
    given = {_memory(each) for each in block.inputs} - {None}
    seen = set(given)
    for node in block.outputs:
        memory = _memory(node)
        if memory is not None and memory in seen:
            raise _NotOutlinedError(f"it returns a view ({node.name}) of another tensor")
        seen.add(memory)
    for node in block.nodes:
        if _writes(node) and any(_memory(each) in given for each in node.all_input_nodes):
            raise _NotOutlinedError(f"it writes to a tensor that it is given ({node.name})")


def _writes(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place or name in _WRITERS or "out" in node.kwargs or node.kwargs.get("inplace") is True
    )


_WRITERS = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "batch_norm"})


def _memory(node: fx.Node) -> int | None:
    value = value_of(node)
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return compat.storage_id(value)
    return None


def _replace(
    gm: fx.GraphModule, block: _Block, name: str, replaced: dict[fx.Node, fx.Node]
) -> None:
    """Replace the nodes of a block by a call of its subgraph.

    Args:
        replaced: results of blocks -> what replaces them.
    """
    inputs = tuple(replaced.get(each, each) for each in block.inputs)
    with gm.graph.inserting_before(block.nodes[-1].next):
        call = compat.call_subgraph(gm.graph, name, inputs)
    call.meta = _call_meta(block)
    at = call
    for number, node in enumerate(block.outputs):
        with gm.graph.inserting_after(at):
            at = gm.graph.call_function(operator.getitem, (call, number))
        at.meta = copy.copy(node.meta)
        node.replace_all_uses_with(at)
        replaced[node] = at
    for node in reversed(block.nodes):
        gm.graph.erase_node(node)


_BODY_META = ("example_value", "stack_trace", "custom")
"""Metadata that nodes of a subgraph keep. Module paths would name one block of several."""


def _call_meta(block: _Block) -> dict[str, Any]:
    first = block.nodes[0]
    stack = dict[str, Any]()
    for key, path in module_paths(first).items():
        stack[key] = first.meta["nn_module_stack"][key]
        if path == block.module:
            break
    return {
        "example_value": tuple(value_of(each) for each in block.outputs),
        "nn_module_stack": stack,
        "stack_trace": first.meta.get("stack_trace"),
    }


def blocks_of(graph: fx.Graph) -> dict[str, fx.GraphModule]:
    """Returns the subgraphs that a graph calls, by the names that `outline_blocks` gave them.

    A block of which a graph calls several forms, such as two backwards for gradients of different
    strides, has the name "block_0.2" for the second.
    """
    found: dict[str, fx.GraphModule] = {}
    seen: Counter[str] = Counter()
    bodies = filter(None, map(compat.subgraph_of, graph.nodes))
    names = (str(node.args[1]) for node in graph.nodes if compat.is_subgraph_call(node))
    for text, body in dict(zip(names, bodies, strict=True)).items():
        match = _NAME.search(text)
        name = match.group() if match else text
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name}.{seen[name]}"] = body
    return found


_NAME = re.compile(r"block_\d+")


def read_subgraph_inputs_directly(gm: fx.GraphModule) -> None:
    """Drop results of subgraph calls that are inputs of the same call, or views of one, in place.

    torch's partitioner returns what a subgraph's backward needs from its forward, also inputs and
    views of them. A full parameter would then be saved for backward, whatever the passes decide.
    """
    users: dict[fx.GraphModule, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        body = compat.subgraph_of(node)
        if body is not None:
            users.setdefault(body, []).append(node)
    for body, calls in users.items():
        outputs: Any = body.graph.output_node().args[0]
        chains = [_views_of_input(each) for each in outputs]
        if not any(chains):
            continue
        left = [number for number, chain in enumerate(chains) if not chain]
        for call in calls:
            _read_inputs_of(call, body, chains)
            call.meta["val"] = tuple(value_of(call)[number] for number in left)
            for part in list(call.users):
                number: Any = part.args[1]
                part.args = (call, left.index(number))
        body.graph.output_node().args = (tuple(outputs[number] for number in left),)
        body.recompile()


def _read_inputs_of(
    call: fx.Node, body: fx.GraphModule, chains: Sequence[Sequence[fx.Node]]
) -> None:
    """Replace results of one call by views of what it is given.

    Args:
        chains: for each result, the nodes of the subgraph from an input to it; empty for others.
    """
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    copies: dict[fx.Node, Any] = dict(zip(inputs, call.args[2:], strict=True))
    for part in list(call.users):
        number: Any = part.args[1]
        chain = chains[number]
        if not chain:
            continue
        with call.graph.inserting_before(call):
            for node in chain:
                if node not in copies:
                    copies[node] = call.graph.node_copy(node, copies.__getitem__)
        part.replace_all_uses_with(copies[chain[-1]])
        call.graph.erase_node(part)


def _views_of_input(node: Any) -> list[fx.Node]:
    """The nodes from an input of a subgraph to a view of it; empty for other values."""
    chain = [node]
    while isinstance(node, fx.Node) and node.op == "call_function":
        if not getattr(node.target, "is_view", False) or len(node.all_input_nodes) != 1:
            return []
        node = node.all_input_nodes[0]
        chain.append(node)
    return chain[::-1] if isinstance(node, fx.Node) and node.op == "placeholder" else []
