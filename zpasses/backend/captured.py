"""Preparation of the graph that Dynamo captured for AOTAutograd.

In Dynamo's graph a sharded parameter is a DTensor input, which `to_local` and the dialect read.
This module replaces such inputs by plain local shards, so that AOTAutograd traces ordinary tensors.
At run time, one autograd function converts all parameters of a call
(zpasses.runtime.param_conversion). The module also tags the dialect's ops with the parameters that
they belong to.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.backend.gathered_values import (
    check_no_writes,
    is_decode,
    is_unshard,
    returned_params,
)
from zpasses.errors import ShardingError, some_of
from zpasses.graph.aliases import elements_of
from zpasses.graph.dialect import AVERAGE_GRAD, REDUCE_GRAD, TO_HOST, UNSHARD
from zpasses.graph.groups import mesh_dimensions
from zpasses.graph.queries import collective_of, is_dialect, named_arguments, nbytes
from zpasses.graph.tags import Tag, add_tag, mark_of_model, tag_of
from zpasses.ranks.vote import has_other_ranks
from zpasses.runtime.layout import layout_of, rows_of
from zpasses.runtime.param_value import param_value_of
from zpasses.runtime.windows import grad_state_of
from zpasses.sharding.guard import GatheredCopy
from zpasses.sharding.module import is_ignored
from zpasses.sharding.param_spec import trained_on_host
from zpasses.sharding.replaced_params import sharded_form

log = logging.getLogger("zpasses")


@dataclass(frozen=True)
class Capture:
    """A captured graph whose sharded inputs are local shards."""

    gm: fx.GraphModule
    inputs: list[Any]
    """Example inputs, with shards in place of DTensors; empty once the graph is compiled."""
    shards: dict[int, str]
    """Position of each sharded input -> name of the parameter."""
    groups: tuple[str, ...]
    """Names of the process groups over which the dialect's ops communicate."""
    returned: Mapping[int, str] = field(default_factory=dict)
    """Position of each output that is a gathered parameter, or a view of one -> what it is."""
    share: float = 0.0
    """Part of the bytes of the trained parameters that were sharded together with the graph's own,
    that the graph reads; 0 if it is not known."""
    frozen: tuple[str, ...] = ()
    """Names of the parameters that need no gradient."""
    is_hybrid: bool = False
    """Whether a parameter has replicas, or would have on more ranks."""
    has_one_mesh: bool = True
    """Whether all parameters are sharded over one mesh."""
    is_fake: bool = False
    """Whether the model is on fake tensors, so that calls need no code."""
    models: tuple[str, ...] = ()
    """Which models the parameters are of: numbers of calls of `zpasses.shard` on their groups."""


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Capture:
    """Replace the DTensor inputs that only the dialect reads by local shards, in place.

    Raises:
        ShardingError: if the model writes to a gathered copy, because the write would be lost.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    inputs = list(example_inputs)
    mode = (
        compat.fake_mode_of([node.meta.get("example_value") for node in placeholders])
        or compat.ambient_fake_mode()
    )
    positions = [
        i
        for i, value in enumerate(inputs)
        if isinstance(value, DTensor) and _only_read_locally(gm, placeholders[i])
    ]
    names = _unique_names([placeholders[i] for i in positions])
    is_fake = any(isinstance(compat.local_part(each), compat.FakeTensor) for each in inputs)
    for i in positions:
        dtensor = inputs[i]
        local = rows_of(dtensor).detach().requires_grad_(dtensor.requires_grad)
        inputs[i] = compat.as_fake(local, mode)
        placeholders[i].meta["example_value"] = inputs[i]
    for i in positions:
        _take_rows_first(gm, placeholders[i], layout_of(example_inputs[i]).dim)
    if positions:
        _read_shards_directly(gm)
    given = {  # by frames that are not compiled, and by other graphs
        node: value._label
        for node, value in zip(placeholders, example_inputs, strict=True)
        if isinstance(value, GatheredCopy)
    }
    for node, label in given.items():
        check_no_writes(node, label)
    groups = _check_and_tag_reads(
        gm, dict(zip((placeholders[i] for i in positions), names, strict=True))
    )
    _check_unsharded(
        placeholders, example_inputs, averages=bool(groups), communicates=_communicates(gm)
    )
    gm.recompile()
    params = [example_inputs[i] for i in positions]
    frozen = [name for name, each in zip(names, params, strict=True) if not each.requires_grad]
    shards = dict(zip(positions, names, strict=True))
    layouts = [layout_of(each) for each in params]
    hybrid = any(each.hybrid_mesh is not None for each in layouts)
    one_mesh = len({each.sharding_groups for each in layouts}) < 2
    models = {param_value_of(each).identity.partition(":")[0] for each in params}
    return Capture(
        gm,
        inputs,
        shards,
        groups,
        returned_params(gm.graph, given),
        _share(params),
        tuple(frozen),
        hybrid,
        one_mesh,
        is_fake,
        tuple(sorted(models)),
    )


def _share(params: Sequence[DTensor]) -> float:
    """Return the part of the trained parameters of a model that these are, by bytes.

    Returns 0 for inputs that are no parameters of a sharded model.
    """
    windows = {
        grad_state_of(param).step_window for param in params if isinstance(param, nn.Parameter)
    }
    together = {
        id(param): param
        for window in windows
        if window is not None
        for param in window.params
        if isinstance(param, DTensor) and param.requires_grad
    }
    read = {id(param) for param in params}
    total = sum(map(_full_bytes, together.values()))
    return sum(_full_bytes(param) for key, param in together.items() if key in read) / max(1, total)


def _full_bytes(param: DTensor) -> int:
    return layout_of(param).gathered_shape(param.shape).numel() * param.element_size()


def describe_inputs(captured: Capture, example_inputs: Sequence[Any]) -> dict[str, Any]:
    """Describe the inputs of a captured graph, and the sharded parameters among them, as plain
    values for dumps.

    Args:
        example_inputs: Dynamo's example inputs, with DTensors in place of shards.
    """
    placeholders = [node for node in captured.gm.graph.nodes if node.op == "placeholder"]
    inputs, parameters, meshes = [], {}, {}
    for i, (node, value) in enumerate(zip(placeholders, captured.inputs, strict=True)):
        record: dict[str, Any] = {"name": node.name, "param": captured.shards.get(i)}
        if isinstance(value, torch.Tensor):
            record |= {
                "shape": _plain_shape(value),
                "dtype": str(value.dtype).removeprefix("torch."),
            }
        inputs.append(record)
        full = example_inputs[i]
        if i in captured.shards and isinstance(full, DTensor):
            layout = layout_of(full)
            meshes[layout.group_names] = layout.whole_mesh
            gathered = layout.gathered_shape(full.shape)
            replicated = len(layout.sharding_groups) > 1
            parameters[captured.shards[i]] = {
                "name": captured.shards[i],
                "shape": list(gathered),
                "dtype": record["dtype"],
                "nbytes": gathered.numel() * full.element_size(),
                "shard_bytes": nbytes(value),
                "rows": layout.rows(full.shape),
                "group": layout.sharding_groups[0],
                **({"replicate_group": layout.sharding_groups[1]} if replicated else {}),
            }
    return {
        "inputs": inputs,
        "parameters": parameters,
        "mesh_dimensions": mesh_dimensions(meshes.values()),
    }


def _plain_shape(value: torch.Tensor) -> list[int | str]:
    return [size if isinstance(size, int) else str(size) for size in value.shape]


def _only_read_locally(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether every use of a node is `to_local()`, including uses in subgraphs that take it."""
    for user in node.users:
        if compat.is_to_local(user):
            continue
        inner = list(_subgraph_inputs(gm, user, node))
        if not inner or not all(
            _only_read_locally(owner, placeholder) for owner, placeholder in inner
        ):
            return False
    return True


def _local_reads(gm: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """Yield the uses of a node that are `to_local()`, including those in subgraphs."""
    for user in node.users:
        if compat.is_to_local(user):
            yield user
        for owner, placeholder in _subgraph_inputs(gm, user, node):
            yield from _local_reads(owner, placeholder)


def _take_rows_first(gm: fx.GraphModule, param: fx.Node, dim: int) -> None:
    """Drop the exchange of dimensions after the reads of a parameter's shard, because the graph
    gets the shard with the cut dimension first.

    Raises:
        ShardingError: if the model reads the shard itself.
    """
    for read in _local_reads(gm, param) if dim else ():
        for user in list(read.users):
            exchanges = user.op == "call_method" and user.target == "movedim"
            if not exchanges or tuple(user.args[1:]) != (dim, 0):
                raise ShardingError(
                    f"the model reads the local shard of parameter {compat.parameter_name(param)} "
                    f"in compiled code ({user.format_node()}). The parameter is cut along "
                    f"dimension {dim} (shard_placement_fn), and its shard is only read to gather "
                    f"it. Read the shard outside of the compiled code.\n{user.stack_trace or ''}"
                )
            user.replace_all_uses_with(read)
            read.graph.erase_node(user)


def _subgraph_inputs(
    gm: fx.GraphModule, call: fx.Node, value: fx.Node
) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    """Yield the subgraph inputs to which a higher-order call (such as a checkpoint) passes `value`.

    Yields nothing if the correspondence of operands and inputs is not known.
    """
    if not (
        isinstance(call.target, compat.HigherOrderOperator)
        and call.args
        and isinstance(call.args[0], fx.Node)
    ):
        return
    body = getattr(gm, str(call.args[0].target), None) if call.args[0].op == "get_attr" else None
    if not isinstance(body, fx.GraphModule):
        return
    operands = [arg for arg in call.args[1:] if isinstance(arg, fx.Node)]
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    if len(operands) == len(placeholders):
        yield from (
            (body, inner)
            for operand, inner in zip(operands, placeholders, strict=True)
            if operand is value
        )


def local_shard(value: Any) -> Any:
    """Returns the shard of a DTensor, and other values as they are.

    Captured graphs call it in place of `to_local`, since their inputs are shards.
    """
    return value.to_local() if isinstance(value, DTensor) else value


def _read_shards_directly(gm: fx.GraphModule) -> None:
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            if compat.is_to_local(node):
                node.op, node.target = "call_function", local_shard
        module.recompile()


def _unique_names(placeholders: Sequence[fx.Node]) -> list[str]:
    """Return parameter names relative to the compiled module, or the graph's names where two
    parameters would have the same name.
    """
    names = [compat.parameter_name(node) for node in placeholders]
    uses = Counter(names)
    return [
        name if uses[name] == 1 else node.name
        for name, node in zip(names, placeholders, strict=True)
    ]


def _check_and_tag_reads(gm: fx.GraphModule, names: dict[fx.Node, str]) -> tuple[str, ...]:
    groups: dict[str, None] = {}
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if is_unshard(node):
                groups.update((name, None) for name in node.args[4:] if isinstance(name, str))
                source = node.all_input_nodes[0].all_input_nodes
                name = names.get(source[0]) if source else None
                label = f"parameter {name or node.name}"
                check_no_writes(node, label)
                for reader in filter(is_decode, node.users):
                    check_no_writes(reader, label)
                arguments = named_arguments(node, UNSHARD)
                stays = arguments.get("device") and not arguments.get("grad_to_host")
                if name is not None and stays and source[0].meta["example_value"].requires_grad:
                    raise ShardingError(trained_on_host(name))
                if name is not None:
                    add_tag(node, Tag("gather", (name,), origin="capture"))
    return tuple(groups)


def _check_unsharded(
    placeholders: Sequence[fx.Node],
    inputs: Sequence[Any],
    *,
    averages: bool,
    communicates: bool,
) -> None:
    """Check that trained parameters are sharded. Warn about those that the user left out.

    Args:
        averages: whether the graph reads parameters that zpasses sharded.
        communicates: whether it communicates at all. The graphs of other libraries do.

    Raises:
        ShardingError: if several ranks would train a parameter independently, or the graph reads
            one from before `shard`.
    """
    for node, value in zip(placeholders, inputs, strict=True):
        if isinstance(value, nn.Parameter) and sharded_form(value) is not None:
            _refuse_replaced(compat.placeholder_source(node), value)
    left = [
        (compat.parameter_name(node), value)
        for node, value in zip(placeholders, inputs, strict=True)
        if isinstance(value, nn.Parameter)
        and value.requires_grad
        and not isinstance(value, DTensor)
        and "." in compat.placeholder_source(node)  # not an argument of a function
    ]
    named = [each for each in left if not is_ignored(each[1])]
    if averages and named and _trains_on_several_ranks():
        raise ShardingError(
            f"parameters {_listed(named)} are trained but not sharded: their gradients would not "
            "be averaged over ranks. If they were added after zpasses.shard, as adapters are, call "
            "zpasses.shard(model, mesh=...) again and build the optimizer after that. To average "
            "them yourself, pass them as its ignored_params."
        )
    if averages and left:
        log.warning(
            "parameters %s are trained but not sharded, because they are ignored_params: average "
            "their gradients over ranks yourself.",
            _listed(left),
        )
    elif named and not communicates and _trains_on_several_ranks():
        raise ShardingError(
            f"nothing in this compiled module is sharded, but it trains {_listed(named)} on "
            f"{dist.get_world_size()} ranks: their gradients would not be averaged. Call "
            "zpasses.shard(model, mesh=...) before torch.compile, list parameters to leave "
            "unsharded as its ignored_params, or compile with backend='inductor' to train ranks "
            "independently."
        )


def _refuse_replaced(source: str, value: nn.Parameter) -> None:
    """Raise ShardingError for a parameter from before `shard`, unless a module still holds it, such
    as one that was tied to the sharded model.
    """
    if "_parameters[" not in source:
        raise ShardingError(
            f"compiled code reads a parameter of shape {list(value.shape)}, from {source}, that is "
            "no longer in the model, because zpasses.shard replaced it by a DTensor: what was kept "
            "from before, in a list, an object or a closure, has its old value, and gets no "
            "gradient. Read it as an attribute of its module, such as self.weight."
        )


def _listed(named: Sequence[tuple[str, Any]]) -> str:
    return some_of([name for name, _ in named], 5)


def _communicates(gm: fx.GraphModule) -> bool:
    """Whether Dynamo's graph, or a subgraph of it, calls anything of torch.distributed."""
    graphs = [each.graph for each in gm.modules() if isinstance(each, fx.GraphModule)]
    calls = (node.target for graph in graphs for node in graph.nodes if node.op == "call_function")
    signs = ("c10d", "torch.distributed", "dtensor", "DTensor")
    return any(
        sign in f"{getattr(call, '__module__', '')}.{call}" for call in calls for sign in signs
    )


def _trains_on_several_ranks() -> bool:
    several = dist.is_initialized() and any(map(has_other_ranks, compat.group_names()))
    return several and torch.is_grad_enabled()


def tag_joint(graph: fx.Graph, shards: dict[int, str]) -> None:
    """Tag the dialect's ops of a joint graph, and the inputs that hold shards, with their
    parameters. Mark the collectives of the model itself.

    Tags that AOTAutograd's re-tracing has preserved are used as they are. For the other ops
    (checkpointed regions, gradients), AOTAutograd's descriptors of inputs and outputs give the
    parameter.

    Args:
        shards: position of each sharded input of the captured graph -> name of the parameter.
    """
    inputs = _described_inputs(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is UNSHARD:
            shard = elements_of(node.all_input_nodes[0])
            name = shards.get(inputs.get(shard, -1))
            known = tag_of(node)
            params = (name,) if name else known.params if known else (node.name,)
            add_tag(node, Tag("gather", params, nbytes(node.meta["val"]), origin="capture"))
            if name is not None:
                add_tag(shard, Tag("shard", (name,), origin="capture"))
    for i, node in _described_gradients(graph):
        name = shards.get(i)
        if name is not None:
            _tag_reductions(node, name)
    if shards:
        for node in graph.nodes:
            if collective_of(node) is not None and not is_dialect(node):
                mark_of_model(node)


def _described_inputs(graph: fx.Graph) -> dict[fx.Node, int]:
    indices = {
        node: compat.aot_input_index(node.meta.get("desc"))
        for node in graph.nodes
        if node.op == "placeholder"
    }
    return {node: index for node, index in indices.items() if index is not None}


def _described_gradients(graph: fx.Graph) -> Iterator[tuple[int, fx.Node]]:
    output = graph.output_node()
    for node, desc in zip(output.args[0], output.meta.get("desc", ()), strict=False):  # type: ignore[arg-type]
        index = compat.aot_gradient_index(desc)
        if isinstance(node, fx.Node) and index is not None:
            yield index, node


def _tag_reductions(node: fx.Node, name: str) -> None:
    """Tag the reductions that a gradient is the sum of."""
    queue = [node]
    while queue:
        node = queue.pop()
        if node.target is TO_HOST:
            add_tag(node, Tag("shard_grad", (name,), origin="capture"))
            queue += node.all_input_nodes
        elif node.target in (REDUCE_GRAD, AVERAGE_GRAD):
            source = node.all_input_nodes[0]
            add_tag(node, Tag("reduce", (name,), nbytes(source.meta["val"]), origin="capture"))
            queue += [source] if node.target is AVERAGE_GRAD else []
        elif node.target is torch.ops.aten.add.Tensor:
            queue.extend(node.all_input_nodes)
