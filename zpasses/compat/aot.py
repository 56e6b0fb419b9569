"""AOTAutograd: recompute marks, the partitioner, and metadata of a joint graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._prims.rng_prims import run_and_save_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

from zpasses.compat.dtensor import storage_id
from zpasses.compat.fake import fake_mode_of, size_hint
from zpasses.compat.fx_graph import (
    clone_graph_module,
    lazy_module,
    lazy_recompiles,
    no_recompiles,
    operator_call,
    pytree,
    subgraph_of,
)
from zpasses.compat.inductor import kept_strides


def aot_input_index(desc: object) -> int | None:
    """Returns the position, among the captured graph's inputs, of the plain input that an
    AOTAutograd description refers to.

    The input may be unwrapped from a DTensor. Returns None for other descriptions.
    """
    base = getattr(desc, "base", desc)
    return getattr(base, "idx", None) if type(base).__name__ == "PlainAOTInput" else None


def aot_gradient_index(desc: object) -> int | None:
    """Returns the position of the captured graph's input whose gradient the described output is.

    Returns None for other outputs.
    """
    return aot_input_index(getattr(getattr(desc, "base", desc), "grad_of", None))


_LAST_REGION = 1 << 30


def mark_recompute(node: fx.Node) -> None:
    """Makes the partitioner recompute this value in backward instead of saving it, with what
    returns it, if it is a part of that.

    The region number is higher than every checkpoint's, because the partitioner saves a recomputed
    value that a *later* region reads.
    """
    if node.target is operator.getitem:
        mark_recompute(node.all_input_nodes[0])
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _LAST_REGION


def mark_saved(node: fx.Node) -> None:
    """Makes the partitioner save this value for backward instead of recomputing it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.meta["ac_graph_id"] = 0


def unmark_recompute(node: fx.Node) -> None:
    """Leaves it to the partitioner again whether this value is recomputed."""
    node.meta.pop("recompute", None)
    node.meta.pop("ac_graph_id", None)


def is_marked_recompute(node: fx.Node) -> bool:
    """Whether `mark_recompute` was called on this node."""
    return (
        node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE
        and node.meta.get("ac_graph_id") == _LAST_REGION
    )


def recompute_policy(node: fx.Node) -> tuple[str, int] | None:
    """Returns the recompute policy and the region that a checkpoint or `mark_recompute` set on a
    value.

    The policy is "must_recompute", "prefer_save", and so on. Returns None if the partitioner may
    decide.
    """
    policy = node.meta.get("recompute")
    if not isinstance(policy, CheckpointPolicy):
        return None
    region = node.meta.get("ac_graph_id")
    return policy.name.lower(), region if isinstance(region, int) else 0


_DISTINCT = "zpasses distinct "


def eliminate_common_subexpressions(gm: fx.GraphModule, distinct: Sequence[fx.Node]) -> None:
    """Runs the partitioner's common subexpression elimination, but never merges the nodes in
    `distinct`.

    Args:
        gm: the joint graph, which is replaced in place.
        distinct: calls, which have one more argument during the elimination.
    """
    for i, node in enumerate(distinct):
        node.args = (*node.args, f"{_DISTINCT}{i}")
    gm.graph = fx_graph_cse(gm.graph)
    for node in gm.graph.nodes:
        if node.args and isinstance(node.args[-1], str) and node.args[-1].startswith(_DISTINCT):
            node.args = node.args[:-1]


_SCRIPT_OBJECT_SIZE = "unsafe_treat_script_objects_as_zero_size"


def _hold_no_tensors(graph: fx.Graph) -> bool:
    """Whether all inputs of a graph that are no values describe devices, such as meshes."""
    names = (
        getattr(node.meta.get("val"), "script_class_name", None)
        for node in graph.find_nodes(op="placeholder")
    )
    described = ("torch.distributed.", "__torch__.torch.classes.c10d.")
    return all(name is None or name.startswith(described) for name in names)


def partition(
    gm: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    recompute_elementwise: bool = False,
    activation_budget: float = 1.0,
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Runs the min-cut partitioner on a joint graph whose common subexpressions are already merged.

    Args:
        gm: the joint graph.
        joint_inputs: its inputs.
        recompute_elementwise: also recompute a pointwise result that a matmul reads, although it
            must then be written to memory a second time.
        activation_budget: fraction of the activations to save, of those that the partitioner saves
            by default; it recomputes the rest. 1.0 leaves torch's own setting.
        kwargs: passed on to torch's partitioner.

    Returns:
        The forward graph and the backward graph, without Python code until they are called.
    """
    kwargs.setdefault("compiler", "inductor")
    materialized = (
        functorch_config.ban_recompute_materialized_backward and not recompute_elementwise
    )
    settings: dict[str, Any] = {"ban_recompute_materialized_backward": materialized}
    if activation_budget < 1.0:
        settings["activation_memory_budget"] = activation_budget
        if hasattr(functorch_config, _SCRIPT_OBJECT_SIZE) and _hold_no_tensors(gm.graph):
            settings[_SCRIPT_OBJECT_SIZE] = True
    _save_readers_of_changed_inputs(gm.graph)
    budget = settings.get("activation_memory_budget", functorch_config.activation_memory_budget)
    several = budget < 1.0 and _save_random_numbers(gm.graph)
    materialize_zeros(gm.graph)
    joint = clone_graph_module(gm) if several else None
    with functorch_config.patch(cse=False, **settings), no_recompiles():
        made = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if joint is not None and _returns_tuples(made[0].graph):
            with functorch_config.patch(activation_memory_budget=1.0):
                made = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
    forward, backward = map(lazy_module, made)
    for gm in (forward, backward):
        _record_wrapped_values(gm.graph)
    save_inputs_of_views(forward, backward, kwargs["num_fwd_outputs"])
    _mark_outputs_of_model(forward, backward, kwargs["num_fwd_outputs"])
    kept = kept_strides(forward.graph)
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in kept:
            node.meta[_KEEPS_STRIDES] = True
    return forward, backward


_IS_OUTPUT, _KEEPS_STRIDES = "zpasses_is_output_of_model", "zpasses_keeps_strides"


def may_overwrite(saved: fx.Node) -> bool:
    """Whether AOTAutograd lets a backward graph write over an input: it "donates" saved values,
    unless the model also returns them. Incoming gradients belong to autograd.
    """
    return not saved.name.startswith("tangents") and not saved.meta.get(_IS_OUTPUT, False)


def is_returned_by_model(node: fx.Node) -> bool:
    """Whether the model returns a value of a graph, with the strides that the graph shows."""
    return bool(node.meta.get(_IS_OUTPUT))


def keeps_strides(saved: fx.Node) -> bool:
    """Whether Inductor's code for the forward graph computes an input of a backward graph with the
    strides that the graph shows, although it lays out convolutions channels last.
    """
    return bool(saved.meta.get(_KEEPS_STRIDES))


def _mark_outputs_of_model(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int
) -> None:
    returned: Any = forward.graph.output_node().args[0]
    outputs = [each for each in returned[:num_fwd_outputs] if isinstance(each, fx.Node)]
    for node in outputs:
        node.meta[_IS_OUTPUT] = True
    values = (each.meta["val"] for each in outputs)
    held = {storage_id(each) for each in values if isinstance(each, Tensor)}
    for node in backward.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor) and storage_id(value) in held:
            node.meta[_IS_OUTPUT] = True


def save_inputs_of_views(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int
) -> None:
    """Where forward saves a view of an input, save the input, and make the view in backward.

    autograd then sees if the input, such as a buffer, is written to before the backward. Views that
    Inductor's code returns do not share the version of their input.
    """
    output = forward.graph.output_node()
    returned: Any = output.args[0]
    saved = list(returned)
    changed = set(_changed_inputs(forward.graph))
    places = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    for value in returned[num_fwd_outputs:]:
        source, *views = _views_of_input(value)
        if not views or source in changed or value.meta.get("saved_tensor_with_no_vc_check"):
            continue  # torch counts the latter by their marks, and has them behind the others
        place, at = places[value.name], saved.index(value, num_fwd_outputs)
        if source in saved[num_fwd_outputs:]:
            made = places[source.name]
            del saved[at]
        else:
            with backward.graph.inserting_before(place):
                made = backward.graph.placeholder(source.name)
            made.meta = dict(source.meta)
            places[source.name], saved[at] = made, source
        first = next(node for node in backward.graph.nodes if node.op != "placeholder")
        with backward.graph.inserting_before(first):
            for view in views:
                made = backward.graph.node_copy(view, {view.args[0]: made}.__getitem__)
        place.replace_all_uses_with(made)
        backward.graph.erase_node(place)
    if len(saved) == len(returned) and all(map(operator.is_, saved, returned)):
        return
    output.args = (tuple(saved),)
    for node in reversed(forward.graph.nodes):
        if node.op == "call_function" and getattr(node.target, "is_view", False) and not node.users:
            forward.graph.erase_node(node)
    for each in (forward, backward):
        each.recompile()


def _views_of_input(value: Any) -> list[fx.Node]:
    """Returns an input and the views by which a value is made of it; one node if it is none."""
    chain = [value]
    while (node := chain[0]).op == "call_function":
        if not getattr(node.target, "is_view", False) or node.all_input_nodes != [node.args[0]]:
            return [value]
        chain.insert(0, node.args[0])
    return chain if node.op == "placeholder" else [value]


def materialize_zeros(graph: fx.Graph) -> None:
    """Replace the zeros of forward-mode derivatives, which nothing may write to. Inductor gives
    their memory to later results.
    """
    for node in graph.find_nodes(op="call_function", target=_ZEROS):
        node.target = torch.ops.aten.full.default
        node.args = (node.args[0], 0, *node.args[1:])


_ZEROS = torch.ops.aten._efficientzerotensor.default


def reads_changed_inputs_at_once(graph: fx.Graph) -> bool:
    """Whether an operator with several results, such as a normalisation, reads an input that
    forward changes, such as a running mean. With an activation budget, torch's partitioner may
    recompute it in backward, although its results are marked as saved.
    """
    return any(
        isinstance(user.meta.get("val"), (tuple, list))
        for read in _changed_inputs(graph)
        for user in read.users
    )


def _changed_inputs(graph: fx.Graph) -> list[fx.Node]:
    changed = {
        node.args[0]
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    }
    return [node for node in graph.find_nodes(op="placeholder") if node in changed]


def _save_readers_of_changed_inputs(graph: fx.Graph) -> None:
    """Let backward recompute nothing from an input that forward changes, such as a buffer: it would
    read the new value. torch's partitioner does not see this.
    """
    pending = _changed_inputs(graph)
    while pending:
        for user in pending.pop().users:
            if getattr(user.target, "is_view", False):
                pending.append(user)
            elif user.target is not torch.ops.aten.copy_.default:
                several = isinstance(user.meta.get("val"), (tuple, list))
                for value in user.users if several else (user,):
                    mark_saved(value)


def _save_random_numbers(graph: fx.Graph) -> bool:
    """Let backward draw no random numbers again: they would be others. With an activation budget,
    torch's partitioner lets it, and knows few of the operators that draw, not Inductor's seeds.

    Returns:
        Whether an operator that draws has several results.
    """
    several = False
    for node in graph.nodes:
        if _draws(node) and recompute_policy(node) is None:
            mark_saved(node)
            several |= isinstance(node.meta.get("val"), (tuple, list))
    return several


def _record_wrapped_values(graph: fx.Graph) -> None:
    """Records what operators return that a checkpoint runs again with the same random numbers,
    which torch's partitioner leaves out. The state of the generator that it saves has one size,
    although torch gives it a symbol, as if the sizes of a graph could change.
    """
    for node in graph.find_nodes(op="placeholder"):
        if node.name.startswith("rng_state_output"):
            _make_static(node)
    for node in graph.nodes:
        operator_run, args = operator_call(node)
        if operator_run is node.target or "val" in node.meta:
            continue
        kwargs = {name: each for name, each in node.kwargs.items() if name != "rng_state"}
        operands = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        with fake_mode_of(pytree.tree_leaves(operands)) or contextlib.nullcontext():
            value = operator_run(*operands[0], **operands[1])  # type: ignore[operator]
        if node.target is run_and_save_rng_state:
            states = [each for each in node.users if each.args[1:] == (0,)]
            value = (*map(_make_static, states[:1]), value)
        node.meta["val"] = value


def _make_static(state: fx.Node) -> Tensor:
    value: Tensor = state.meta["val"]
    if value._has_symbolic_sizes_strides:
        with fake_mode_of([value]) or contextlib.nullcontext():
            size = size_hint(value.numel())
            state.meta["val"] = torch.empty(size, dtype=value.dtype, device=value.device)
    made: Tensor = state.meta["val"]
    return made


def _draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers. Attention has the tag, but draws only for a dropout."""
    if (body := subgraph_of(node)) is not None:
        return any(map(_draws, body.graph.nodes))
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0) != 0.0)


def _returns_tuples(forward: fx.Graph) -> bool:
    """Whether torch's partitioner saves several results as one value, as it does where all that it
    may not compute again is marked.
    """
    return any(
        isinstance(node.meta.get("val"), (tuple, list))
        for node in forward.output_node().all_input_nodes
    )


def is_joint_of_subgraph(gm: fx.GraphModule) -> bool:
    """Whether a joint graph is that of a subgraph call, which torch partitions before the rest."""
    return not any("desc" in node.meta for node in gm.graph.nodes if node.op == "placeholder")


def aot_compile(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    forward: Any,
    backward: Any,
    inference: Any,
    partition_fn: Any,
) -> Any:
    """Runs AOTAutograd with the given compilers and partitioner, and without decompositions."""
    from torch._dynamo.backends.common import aot_autograd

    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition_fn,
        decompositions={},
        keep_inference_input_mutations=True,
    )
    with lazy_recompiles():
        return compiler(gm, inputs)


def user_outputs(outputs: Sequence[Any]) -> Sequence[Any]:
    """Returns the outputs of a forward graph without the values that are saved for backward."""
    context = TracingContext.try_get()
    meta: Any = context.fw_metadata if context is not None else None
    return outputs if meta is None else outputs[: meta.num_forward]


def undonate_saved(outputs: Sequence[Any], held: Callable[[fx.Node], bool]) -> None:
    """Keeps backward from overwriting saved values that something else also holds.

    AOTAutograd lets backward overwrite ("donates") every saved value that is neither an input nor
    an output of the model.

    Args:
        outputs: all outputs of the forward graph.
        held: whether a saved value must keep its contents.
    """
    context = TracingContext.try_get()
    meta: Any = context.fw_metadata if context is not None else None
    donated = meta.bw_donated_idxs if meta is not None else None
    if donated:
        saved = outputs[meta.tensors_saved_for_backwards_slice]
        first = meta.num_symints_saved_for_bw
        # In place, because other metadata shares the list.
        donated[:] = [i for i in donated if not held(saved[i - first])]


class CompilerState:
    """The context of a compile, kept so that a graph variant can be compiled later."""

    def __init__(self, fake_mode: FakeTensorMode | None = None) -> None:
        """Args:
        fake_mode: the mode of the graph's values; None takes that of the compile that runs.
        """
        from torch._inductor.virtualized import V

        self.context = TracingContext.try_get()
        ambient = V.fake_mode if isinstance(V.fake_mode, FakeTensorMode) else None
        self.fake_mode = fake_mode or ambient
        # Dynamo gives the context another mode after the compile.
        self._patches = {} if fake_mode is None else {"fake_mode": fake_mode}

    @contextlib.contextmanager
    def restored(
        self, output_strides: list[tuple[int, ...] | None] | None = None
    ) -> Iterator[None]:
        """Context manager: the saved context is active inside it.

        Args:
            output_strides: an empty list, which takes the strides of the outputs of the graph that
                Inductor compiles inside, in elements; None for outputs that are no tensors.
        """
        from torch._inductor.virtualized import V

        with contextlib.ExitStack() as stack:
            if self.fake_mode is not None:
                stack.enter_context(V.set_fake_mode(self.fake_mode))
            if self.context is not None:
                stack.enter_context(tracing(self.context))
                # Inductor asserts that output strides are reported for one graph only.
                stack.enter_context(
                    TracingContext.patch(output_strides=output_strides, **self._patches)
                )
            yield
