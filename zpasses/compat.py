"""Every private torch API that zpasses touches, in one place.

Supported are torch 2.11 to 2.15. A name that moved between those versions is resolved here and nowhere else, so that a new torch
means reading one file.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._dynamo import disable as dynamo_disable
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.graph import _BoxedCodeGen
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "BOXED_CODEGEN",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "DTensorSpec",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "Work",
    "functional",
    "statically_known_true",
]

BOXED_CODEGEN = _BoxedCodeGen
"""Code generation whose function takes one list and empties it, so that inputs die at their last use."""

functional = torch.ops._c10d_functional
"""The functional collectives."""


Work: Any = torch._C._distributed_c10d.Work if dist.is_available() else object
"""What a collective that was started is awaited by; derive from it and override `wait`."""


# --- process groups --------------------------------------------------------------------------------------------------------------
def process_group(name: str) -> dist.ProcessGroup:
    """The process group that functional collectives call `name`; raises RuntimeError if there is none."""
    return cast(dist.ProcessGroup, cast(Any, c10d)._resolve_process_group(name))


def group_name(group: object) -> str:
    """The name of a group; graphs of torch >= 2.13 may hold the process group itself."""
    return str(group if isinstance(group, str) else cast(Any, group).group_name)


def group_ranks(name: str) -> list[int]:
    """Global ranks of the group, in group order."""
    return dist.get_process_group_ranks(process_group(name))


def group_backends() -> dict[str, str]:
    """Group name -> backend ("gloo", "nccl", "fake", ...) of every process group of this process."""
    return {c10d._world.pg_names[group]: backend for group, (backend, _) in c10d._world.pg_map.items()}


def group_names() -> list[str]:
    """Names of every process group that this process is in."""
    return [group_name(group) for group in process_groups()]


def process_groups() -> list[dist.ProcessGroup]:
    """Every process group that this process is in."""
    return list(c10d._world.pg_map)


def group_backend(name: str) -> str:
    """Backend of one group, in lower case; "cpu:gloo,cuda:nccl" style names are kept whole."""
    return str(dist.get_backend(process_group(name))).lower()


def is_gloo(name: str, device: torch.device | None = None) -> bool:
    """Whether tensors on `device` communicate through gloo in this group; without a device, whether all that it can communicate do.

    A group of simulated ranks counts as what it says it is.
    """
    backend = group_backend(name)
    if backend == "undefined":  # init_process_group() without a name takes what there is for each device
        group = process_group(name)
        backend = ",".join(f"{each.type}:{cast(Any, group._get_backend(each)).name()}" for each in group._device_types).lower()
    return "gloo" in backend and ("cuda" not in backend or (device is not None and device.type == "cpu"))


@contextlib.contextmanager
def limited_timeouts(names: Sequence[str], seconds: float) -> Iterator[None]:
    """Collectives of these groups that start inside give up after `seconds`, if they would wait longer."""
    limit, before = timedelta(seconds=seconds), []
    for name in names:
        group = process_group(name)
        for device in group._device_types:
            backend: Any = group._get_backend(device)
            usual = getattr(getattr(backend, "options", None), "_timeout", None)
            if usual is not None and usual > limit:
                backend._set_default_timeout(limit)
                before.append((backend, usual))
    try:
        yield
    finally:
        for backend, usual in before:
            backend._set_default_timeout(usual)


def default_store() -> Any:
    """The store through which the ranks of this job met."""
    return c10d._get_default_store()


def fake_store() -> Any:
    """A store for a process group of ranks that do not exist; registers the backend "fake"."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def flight_record() -> list[dict[str, Any]]:
    """Every collective that this process's groups ran, oldest first, as they recorded it themselves.

    Nothing is recorded unless TORCH_FR_BUFFER_SIZE, the number of entries to keep, is set before the first group is made.
    """
    dump = cast(Any, torch._C._distributed_c10d)._dump_fr_trace_json
    return cast(list[dict[str, Any]], json.loads(dump(True, False)).get("entries", []))


def register_work(tensor: Tensor, work: Any) -> None:
    """Let `wait_tensor` of this tensor, or of a view of it, call `work.wait()`."""
    cast(Any, torch._C._distributed_c10d)._register_work(tensor, work)


def symmetric_memory() -> Any:
    """The module that defines the operators `torch.ops.symm_mem`; raises ImportError where torch was built without it."""
    import torch.distributed._symmetric_memory as module

    return module


def low_contention_all_gather(source: Tensor, group: str) -> Tensor:
    """Gather by copy engines through symmetric memory; under way, as the functional collectives are."""
    symmetric_memory()
    result: Tensor = torch.ops.symm_mem._low_contention_all_gather(source, group)
    return result


def low_contention_reduce_scatter(source: Tensor, reduce_op: str, group: str) -> Tensor:
    """Exchange by copy engines and reduce ("sum", "avg"); under way, as the functional collectives are."""
    symmetric_memory()
    result: Tensor = torch.ops.symm_mem._low_contention_reduce_scatter(source, reduce_op, group)
    return result


def symmetric_stream() -> torch.cuda.Stream:
    """The stream on which low-contention collectives run."""
    return cast(torch.cuda.Stream, symmetric_memory()._get_backend_stream())


def storage_reference(tensor: Tensor) -> Callable[[], bool]:
    """Asks whether a tensor's memory has been freed, without keeping it."""
    from torch.multiprocessing.reductions import StorageWeakRef

    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: bool(reference.expired())


# --- DTensor ---------------------------------------------------------------------------------------------------------------------
def make_dtensor(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> DTensor:
    """A DTensor over a contiguous tensor of `shape`, without communication and without checks."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(reversed(strides)), local.dtype))
    return wrap_local(local, spec)


def wrap_local(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor of `spec` around `local`, built without dispatching (`from_local` is 20 times slower)."""
    build = cast(Callable[..., DTensor], DTensor)
    return build(local, spec, requires_grad=False)


class ArrivingGradient(DTensor):
    """A gradient on its way to `param.grad`, where it is a plain DTensor.

    Autograd detaches every gradient that it stores, which through DTensor's dispatch costs more than all else that happens to a small
    gradient. A gradient that nobody else holds need not be copied: it is handed on as it is.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # of what DTensor's stub says, a disabled C function
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in pytree.tree_leaves((args, kwargs)) if func is not _DETACH else args:
            if type(value) is ArrivingGradient:
                cast(Any, value).__class__ = DTensor
        return args[0] if func is _DETACH else func(*args, **(kwargs or {}))


_DETACH = torch.ops.aten.detach.default


def arriving_gradient(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A gradient of `spec` around a local one that nobody else holds; one that autograd follows (create_graph) stays in its graph."""
    if local.requires_grad:
        meta = cast(TensorMeta, spec.tensor_meta)
        return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride)
    build = cast(Callable[..., DTensor], ArrivingGradient)
    return build(local, spec, requires_grad=False)


def forget_sharding_decisions() -> None:
    """Clear what DTensor remembers of operations: local shapes in it are those of one rank, but its keys name no rank."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def local_of(dtensor: DTensor) -> Tensor:
    """The local tensor itself: no autograd node, same version counter."""
    return dtensor._local_tensor


def set_local(dtensor: DTensor, local: Tensor) -> None:
    """Give a DTensor another local tensor of the same shape and dtype."""
    dtensor._local_tensor = local


def storage_id(tensor: Tensor) -> int:
    """Names the memory that a tensor and its views share, as long as one of them lives; other than an address, also if it is empty."""
    return int(tensor.untyped_storage()._cdata)


def spec_of(dtensor: DTensor) -> DTensorSpec:
    return dtensor._spec


# --- Dynamo ----------------------------------------------------------------------------------------------------------------------
_SOURCE_PART = re.compile(r"_(modules|parameters|buffers)\[['\"]([^'\"]+)['\"]\]")


def placeholder_source(node: fx.Node) -> str:
    """The Python expression that a Dynamo placeholder stands for, or "" for graphs from elsewhere."""
    argument = node.meta.get("grapharg")
    source = getattr(node, "_dynamo_source", None) or getattr(argument, "source", None)
    if source is None:
        return ""
    name = source.name  # a method until torch 2.11, a property since
    return str(name() if callable(name) else name)


def parameter_name(node: fx.Node) -> str:
    """The parameter's name below the compiled module ("layers.0.weight"); the placeholder's own name for anything else."""
    parts = [match.group(2) for match in _SOURCE_PART.finditer(placeholder_source(node))]
    return ".".join(parts) or node.name


def is_to_local(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph is `dtensor.to_local()`, without arguments.

    A method call, until torch 2.11 a function made for the occasion that closes over the arguments.
    """
    if len(node.args) != 1 or node.kwargs:
        return False
    if node.op == "call_method":
        return node.target == "to_local"
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "prim_to_local":
        return False
    captured = [cell.cell_contents for cell in getattr(node.target, "__closure__", None) or ()]
    return not any(captured)


def aot_input_index(desc: object) -> int | None:
    """Position among the captured graph's inputs that an AOTAutograd description of a plain (or unwrapped DTensor) input means."""
    base = getattr(desc, "base", desc)
    return getattr(base, "idx", None) if type(base).__name__ == "PlainAOTInput" else None


def aot_gradient_index(desc: object) -> int | None:
    """Position of the captured graph's input whose gradient a described output is."""
    return aot_input_index(getattr(getattr(desc, "base", desc), "grad_of", None))


def compile_name() -> str:
    """Dynamo's id of the graph being compiled ("0/1": second compile of the first frame), or "-" outside a compile."""
    return str(CompileContext.current_compile_id() or "-")


def is_tracing() -> bool:
    """Whether Dynamo is at work, which looks at attributes of the tensors that it is given."""
    return CompileContext.current_compile_id() is not None


def is_restart(error: BaseException) -> bool:
    """Whether an exception is Dynamo's way of tracing a frame once more, and no failure."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def wrapped_error(error: BaseException) -> BaseException | None:
    """What a backend raised, of the exception that Dynamo makes of it."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else None


def undynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo out of a function that runs inside compiled code."""
    return cast(Callable[..., Any], dynamo_disable(fn))


# --- autograd --------------------------------------------------------------------------------------------------------------------
def current_engine_run() -> int:
    """Number of the innermost run of the autograd engine that calls this; raises RuntimeError outside a backward."""
    number = cast(Any, torch._C)._current_graph_task_id()
    if number < 0:
        raise RuntimeError("no backward is running")
    return int(number)


def queue_engine_callback(fn: Callable[[], None]) -> None:
    """Call `fn` when the current run of the engine has succeeded. The engine holds it until that run is over, whatever its end."""
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(fn)


def in_backward() -> bool:
    return cast(Any, torch._C)._current_autograd_node() is not None


def sharded_inputs() -> Any:
    """The node of `zpasses.runtime` that gave shards to the node of autograd that runs right now; None if there is none."""
    node = cast(Any, torch._C)._current_autograd_node()
    for source, _ in node.next_functions if node is not None else ():
        if hasattr(source, "zpasses_params"):
            return source
    return None


def takers(source: Any) -> list[Any]:
    """For each input of a node of autograd what takes its gradient; None where nothing does."""
    return [taker for taker, _ in source.next_functions]


def will_accumulate(taker: Any) -> bool | None:
    """Whether the current run of the engine adds a gradient to `param.grad`; None if it hands it to somebody else."""
    if taker is None:
        return False
    if not hasattr(taker, "variable"):
        return None  # no leaf: autograd goes on behind it
    try:
        return bool(cast(Any, torch._C)._will_engine_execute_node(taker))
    except RuntimeError:  # torch.autograd.grad asks for it
        return None


# --- AOTAutograd -----------------------------------------------------------------------------------------------------------------
_LAST_REGION = 1 << 30


def mark_recompute(node: fx.Node) -> None:
    """Never save this value for backward: compute it again there.

    The region number is above every checkpoint's: the partitioner saves a recomputed value that a *later* region reads.
    """
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _LAST_REGION


def is_marked_recompute(node: fx.Node) -> bool:
    return node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE and node.meta.get("ac_graph_id") == _LAST_REGION


def recompute_mark(node: fx.Node) -> tuple[str, int] | None:
    """What the partitioner is told of a value, by checkpoints or by `mark_recompute`: the policy ("must_recompute", "prefer_save", ...)
    and the region; None for a value that it may treat as it likes."""
    policy = node.meta.get("recompute")
    if not isinstance(policy, CheckpointPolicy):
        return None
    region = node.meta.get("ac_graph_id")
    return policy.name.lower(), region if isinstance(region, int) else 0


def eliminate_common_subexpressions(gm: fx.GraphModule, distinct: Sequence[fx.Node]) -> None:
    """What the partitioner does first, except that the nodes in `distinct` (whose last argument is a string) are never merged."""
    for i, node in enumerate(distinct):
        node.args = (*node.args[:-1], f"{node.args[-1]}#{i}")
    gm.graph = fx_graph_cse(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.args and isinstance(node.args[-1], str) and "#" in node.args[-1]:
            node.args = (*node.args[:-1], node.args[-1].rpartition("#")[0])


def partition(
    gm: fx.GraphModule, joint_inputs: Sequence[Any], *, recompute_elementwise: bool = False, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Min-cut partition of a joint graph whose common subexpressions were merged already.

    Args:
        recompute_elementwise: also where a matrix product reads the result, for which it must be written to memory once more.
    """
    kwargs.setdefault("compiler", "inductor")
    materialized = functorch_config.ban_recompute_materialized_backward and not recompute_elementwise
    with functorch_config.patch(cse=False, ban_recompute_materialized_backward=materialized):
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


def aot_compile(gm: fx.GraphModule, inputs: Sequence[Any], forward: Any, backward: Any, inference: Any, partition_fn: Any) -> Any:
    """AOTAutograd with our compilers and no decompositions."""
    from torch._dynamo.backends.common import aot_autograd

    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition_fn,
        decompositions={},
        keep_inference_input_mutations=True,
    )
    return compiler(gm, inputs)


def returned_to_caller(outputs: Sequence[Any]) -> Sequence[Any]:
    """Of what a forward graph returns, all but what is saved for backward."""
    context = TracingContext.try_get()
    meta: Any = context.fw_metadata if context is not None else None
    return outputs if meta is None else outputs[: meta.num_forward]


def withdraw_donations(outputs: Sequence[Any], held: Callable[[fx.Node], bool]) -> None:
    """Let backward not overwrite the values saved for it that somebody else holds too.

    AOTAutograd lets it overwrite ("donates") all that are neither inputs nor outputs of the model.

    Args:
        outputs: what the forward graph returns.
        held: whether a saved value must stay as it is.
    """
    context = TracingContext.try_get()
    meta: Any = context.fw_metadata if context is not None else None
    donated = meta.bw_donated_idxs if meta is not None else None
    if donated:
        saved, first = outputs[meta.tensors_saved_for_backwards_slice], meta.num_symints_saved_for_bw
        donated[:] = [i for i in donated if not held(saved[i - first])]  # in place: other metadata shares the list


class CompilerState:
    """What a compiler may look up while it runs, kept so that a variant can be compiled later, at call time."""

    def __init__(self) -> None:
        from torch._inductor.virtualized import V

        self.context = TracingContext.try_get()
        self.fake_mode = V.fake_mode if isinstance(V.fake_mode, FakeTensorMode) else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        from torch._inductor.virtualized import V

        with contextlib.ExitStack() as stack:
            if self.fake_mode is not None:
                stack.enter_context(V.set_fake_mode(self.fake_mode))
            if self.context is not None:
                stack.enter_context(tracing(self.context))
                # Inductor asserts that it reports the strides of one forward only.
                stack.enter_context(TracingContext.patch(output_strides=None))
            yield


def trace_aten(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The aten graph of a function, traced on fakes of its inputs; runs without autograd and reads nothing."""
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None) or FakeTensorMode()
    with torch.no_grad(), mode:
        return make_fx(fn, tracing_mode="real")(*[as_fake(value, mode) for value in inputs])


# --- Inductor --------------------------------------------------------------------------------------------------------------------
_ONE_SCHEDULER = {
    # Passes of Inductor that reorder or merge collectives after ours: one scheduler owns the order.
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "_fuse_ddp_communication": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    # A replayed CUDA graph owns its outputs; carried values must outlive the replay.
    "triton.cudagraphs": False,
    # Orders nodes by what surrounds them, which may differ between ranks (padding).
    "reorder_for_locality": False,
    # Moves waits to where their memory is needed or free, and so undoes what runs beside compute.
    "reorder_for_peak_memory": False,
}


def inductor_patches(partitioner: CustomPartitionerFn, extra: dict[str, Any]) -> dict[str, Any]:
    """Inductor options of one compile: ours, then the user's. Options that this torch does not have are left out."""
    known = inductor_option_names()
    ours = {key: value for key, value in _ONE_SCHEDULER.items() if key in known}
    return {**ours, "custom_partitioner_fn": partitioner, **extra}


def inductor_option_names() -> frozenset[str]:
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def inductor_compile(gm: fx.GraphModule, inputs: Sequence[Any], inner: Callable[..., Any], patches: dict[str, Any]) -> Any:
    """`torch._inductor.compile_fx` with all of Inductor's own passes and `inner` in place of its last step.

    AOTAutograd's own cache is off: a hit would skip `inner`. The cache of compiled kernels stays on; it keys on the rewritten graph.
    """
    from torch._inductor.compile_fx import compile_fx

    with functorch_config.patch(enable_autograd_cache=False):
        return compile_fx(gm, cast(Any, inputs), inner_compile=inner, config_patches=patches)


def pin_output_strides(output: fx.Node) -> None:
    """Keep Inductor from choosing the strides of what a graph returns: all variants of it must return alike, and take what they return."""
    output.meta["user_visible_output_idxs"] = list(range(len(cast(Sequence[Any], output.args[0]))))


def inductor_codegen(gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Generate and load code for one graph; the result takes one list of inputs."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    lower_own_collectives()
    _decompose_casts(gm)
    with config.patch(patches):
        return cast(Callable[..., Any], compile_fx_inner(gm, cast(Any, inputs), **kwargs))


_own_collectives: dict[torch._ops.OpOverload, bool] = {}


def declare_collective(op: torch._ops.OpOverload, *, writes_out: bool = False) -> None:
    """Say that an operator of ours returns at once and is awaited by `wait_tensor`, as the functional collectives are.

    Args:
        writes_out: it has an argument `out`, which it returns.
    """
    _own_collectives[op] = writes_out


def lower_own_collectives() -> None:
    """Teach Inductor the declared collectives: what they read and write stays untouched, and is not freed, until it is awaited.

    An operator that Inductor does not know becomes a plain call, after which it reuses the memory of the arguments.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, lowerings
    from torch._inductor.virtualized import V

    kernel: Any = cast(Any, ir)._CollectiveKernel

    def out_of_place(op: torch._ops.OpOverload) -> Callable[..., Any]:
        return lambda inputs, *args: pytree.tree_map(ir.TensorBox.create, kernel.create_out_of_place(op, inputs, *args))

    def into_given(op: torch._ops.OpOverload) -> Callable[..., Any]:
        def lower(source: Any, *args: Any, out: Any) -> Any:
            kernel.create_inplace(op, source, *args, out=out)
            # The wait will be of `out` alone: Inductor may let go of the input before, which the op keeps alive, but not write to it.
            V.graph.never_reuse_buffers.add(source.get_name())
            return out

        return lower

    for op, writes_out in _own_collectives.items():
        if op not in lowerings:
            add_layout_constraint(op, constrain_to_fx_strides)
            # Past `register_lowering`, which takes no op with an argument `out` but torch's own.
            lowerings[op] = (into_given if writes_out else out_of_place)(op)


def inductor_is_lowering() -> bool:
    """Whether a pass runs inside a compile by Inductor that zpasses did not start (a hook of Inductor), or may do so."""
    return "torch._inductor.lowering" in sys.modules


def _decompose_casts(gm: fx.GraphModule) -> None:
    """Casts that passes inserted, in Inductor's own words: it knows `_to_copy` only as something that was decomposed before."""
    for node in list(gm.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)):
        if not node.kwargs.keys() <= {"dtype", "memory_format"}:
            continue
        source, dtype = node.args[0], node.kwargs.get("dtype")
        with gm.graph.inserting_before(node):
            cast = gm.graph.call_function(torch.ops.prims.convert_element_type.default, (source, dtype)) if dtype else source
            cast = cast if cast is source else _described(cast, node)
            if cast is source or "memory_format" in node.kwargs:
                cast = _described(gm.graph.call_function(torch.ops.aten.clone.default, (cast,), _format(node)), node)
        node.replace_all_uses_with(cast)
        gm.graph.erase_node(node)
    gm.recompile()


def _described(node: fx.Node, like: fx.Node) -> fx.Node:
    node.meta = copy.copy(like.meta)
    return node


def _format(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.kwargs.items() if key == "memory_format"}


def inductor_codegen_alone(gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    """As `inductor_codegen`, for a graph without gradients that no compile of torch is behind."""
    from torch._inductor.virtualized import V

    mode = fake_mode_of(inputs)
    with V.set_fake_mode(mode), tracing(TracingContext(mode)):
        return inductor_codegen(gm, inputs, patches, {"is_inference": True, "static_input_idxs": ()})


# --- structured trace -------------------------------------------------------------------------------------------------------------
def is_structured_trace_on() -> bool:
    """Whether somebody listens to torch's structured trace: TORCH_TRACE is set, or torch's own tests listen."""
    from torch._logging._internal import trace_log

    return bool(trace_log.handlers) and trace_log.isEnabledFor(10)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text into torch's structured trace, where tlparse shows it with the compile under way."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


# --- figures ---------------------------------------------------------------------------------------------------------------------
def flop_formula(target: object) -> Callable[..., int] | None:
    """How many floating-point operations a call of `target` takes, as torch counts them; None where it counts none."""
    from torch.utils.flop_counter import flop_registry

    packet = getattr(target, "overloadpacket", None)
    return cast("Callable[..., int] | None", flop_registry.get(packet))


def size_hint(size: Any) -> int:
    """A size as a number; a dynamic one as it is at hand, 1 where it depends on data."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if isinstance(hint, int) else 1


# --- fake tensors ----------------------------------------------------------------------------------------------------------------
def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode that these values (or the compile under way) belong to."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    context = TracingContext.try_get()
    return context.fake_mode if context is not None else None


def as_fake(value: Tensor, mode: FakeTensorMode | None) -> Tensor:
    """A fake of fixed shape: shards never have a dynamic one."""
    if mode is None or isinstance(value, FakeTensor):
        return value
    return mode.from_tensor(value, static_shapes=True)


def has_unbacked_size(value: object) -> bool:
    """Whether a fake value has a size that depends on data."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(cast(Any, value)))


def ambient_fake_mode() -> FakeTensorMode | None:
    """The fake mode that is active right now, if any."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, FakeTensorMode)]
    return modes[-1] if modes else None


def clone_graph_module(gm: fx.GraphModule, source: fx.Graph | None = None) -> fx.GraphModule:
    """A copy of the module's graph (or of `source`) that can be rewritten; attributes and metadata values are shared."""
    graph = fx.Graph()
    output = graph.graph_copy(source or gm.graph, {}, return_output_node=True)
    value, old = cast(tuple[Any, fx.Node], output)
    graph.output(value).meta = copy.copy(old.meta)
    clone = fx.GraphModule(gm, graph)
    clone.meta = copy.copy(gm.meta)
    return clone
