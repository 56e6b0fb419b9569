"""AOTAutograd's results, Inductor's code and FX graphs as bytes that another process can load.

AOTAutograd can hand out what it made of a graph (`BundledAOTAutogradResult`): metadata, wrappers,
and one object of code per graph. Its own cache is bypassed here, because a hit on one rank would
skip votes in which the other ranks wait. In the result, the code of a graph is a `GraphCode`, which
holds only the kind of the graph. Whoever loads the result supplies the code.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext

from zpasses.compat.fake import FakeTensor, FakeTensorMode
from zpasses.compat.fx_graph import OpOverload, OpOverloadPacket, clone_graph_module, pytree
from zpasses.compat.inductor import inductor_decompositions

log = logging.getLogger("zpasses")


_HOOKS = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
)
"""Options of Inductor that hold functions."""

_SETTINGS = {
    "enable_autograd_cache": True,
    "enable_remote_autograd_cache": False,
    "bundled_autograd_cache": True,
    "bypass_autograd_cache_key": True,
    "force_non_lazy_backward_lowering": True,
    "strict_autograd_cache": False,
}
"""Make AOTAutograd build its result with each compile, and look nothing up."""

Code = Callable[[list[Any]], Any]


def artifacts_refusal(
    gm: fx.GraphModule, functions: Sequence[Callable[..., Any]], inductor: Mapping[str, Any]
) -> str | None:
    """Returns why the compiled form of a captured graph cannot be stored; None if it can.

    Args:
        gm: the graph that Dynamo captured.
        functions: functions in the graph that are safe to store besides those that torch knows.
        inductor: the user's options of Inductor.
    """
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable
    from torch._inductor import config

    known = {f"{each.__module__}.{each.__name__}": "zpasses" for each in functions}
    with config.patch({**inductor, "unsafe_marked_cacheable_functions": known}):
        if config.force_disable_caches:
            return "torch._inductor.config.force_disable_caches is set"
        if hook := next((name for name in _HOOKS if getattr(config, name, None)), None):
            return f"torch._inductor.config.{hook} is set"
        for module in gm.modules():
            if not isinstance(module, fx.GraphModule):
                continue
            try:
                check_cacheable(module)
            except Exception as error:  # torch's BypassAOTAutogradCache, and what graphs make of it
                return " ".join(str(error).split())[:200]
    return None


def code_environment(inductor: Mapping[str, Any]) -> list[str]:
    """Returns what decides the code that Inductor generates, besides the graph: versions, the
    machine, and settings.

    Args:
        inductor: the user's options of Inductor.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CacheBase, torch_key

    with config.patch(dict(inductor)):
        settings = config.save_config_portable()
    backends: Any = torch.backends
    outside = (  # what Inductor reads besides its own settings
        backends.cuda.matmul.fp32_precision,
        backends.cudnn.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
        backends.mkldnn.enabled,
        cast(Any, torch.utils.deterministic).fill_uninitialized_memory,
    )
    return [
        torch_key().hex(),
        sys.version,
        repr(CacheBase.get_system()),
        # Decides which vector instructions Inductor uses, which takes a second to find.
        torch.backends.cpu.get_cpu_capability(),
        repr(outside),
        repr(sorted(settings.items())),
        repr(sorted(functorch_config.save_config_portable().items())),
    ]


def attention_backends() -> list[str]:
    """Returns the kernels that `scaled_dot_product_attention` may become while it is traced, the
    preferred one first.
    """
    return [each.name for each in torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)]


def checkpoint_policy(gm: fx.GraphModule) -> Callable[..., Any] | None:
    """Returns `context_fn` of `torch.utils.checkpoint`, if a graph is what it was called with."""
    found: Callable[..., Any] | None = gm.meta.get("_checkpoint_context_fn")
    return found


def inductor_cache_folder() -> str:
    """Returns the folder of Inductor's caches: TORCHINDUCTOR_CACHE_DIR or torch's default."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def op_namespace(op: OpOverload | OpOverloadPacket) -> str:
    """Returns the namespace of an operator, such as "aten"."""
    return _qualified_name(op).partition("::")[0]


def _qualified_name(op: OpOverload | OpOverloadPacket) -> str:
    packet = op.overloadpacket if isinstance(op, OpOverload) else op
    return str(packet._qualified_op_name)


def custom_op_functions(op: OpOverload | OpOverloadPacket) -> list[Callable[..., Any]]:
    """Returns the Python functions of an operator that `torch.library.custom_op` defined: its
    implementations, fake implementation, and backward. Returns [] for other operators.
    """
    from torch._library.custom_ops import OPDEFS

    found: Any = OPDEFS.get(_qualified_name(op))
    if found is None:
        return []
    names = ("_init_fn", "_abstract_fn", "_setup_context_fn", "_backward_fn")
    functions = [getattr(found, name, None) for name in names]
    return [each for each in (*functions, *found._backend_fns.values()) if each is not None]


def inductor_compile_packed(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    inner: Callable[..., Code],
    patches: dict[str, Any],
) -> tuple[Any, bytes | None]:
    """Like `inductor_compile`, and also returns the bytes for `unpack_result`.

    The backward is handed to `inner` together with the forward instead of before it first runs.

    Args:
        inner: as `inner_compile` of Inductor. Called with kwargs `is_backward` and `is_inference`.

    Returns:
        The compiled function, and its result as bytes; None if torch could not make any.
    """
    from torch._inductor.compile_fx import compile_fx

    from zpasses.compat.graph_code import GraphCode

    def wrapped(graph: fx.GraphModule, values: Sequence[Any], **kwargs: Any) -> GraphCode:
        return GraphCode(kind_of_inner_compile(kwargs), inner(graph, values, **kwargs))

    with functorch_config.patch(_SETTINGS):
        compiled = compile_fx(
            gm,
            cast(Any, inputs),
            inner_compile=wrapped,
            config_patches=patches,
            decompositions=inductor_decompositions(),
        )
    serialize = getattr(compiled, "serialize", None)
    entry = serialize() if serialize is not None else None
    return compiled, None if entry is None else _packed_result(entry)


def kind_of_inner_compile(kwargs: Mapping[str, Any]) -> str:
    """Returns "forward", "backward" or "inference", of the arguments of `inner_compile`."""
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"


def _packed_result(entry: Any) -> bytes | None:
    entry = copy.copy(entry)
    for name in ("compiled_fw", "compiled_bw"):
        part = copy.copy(getattr(entry, name))
        if part is not None:
            part.result = part.result.stored()
        setattr(entry, name, part)
    # Texts of graphs, and the backward for compiled autograd, which starts from a new capture.
    for name in (
        "aot_joint_graph_str",
        "aot_forward_graph_str",
        "aot_backward_graph_str",
        "min_cut_info_str",
        "serialized_bw_module",
    ):
        if hasattr(entry, name):
            setattr(entry, name, None)
    return _pickled(entry)


def _pickled(value: Any) -> bytes | None:
    try:
        with torch.utils._python_dispatch._disable_current_modes():
            return pickle.dumps(value)
    except Exception as error:  # a part of torch's may refuse for a reason of its own
        log.info("compile cache: %s cannot be pickled (%s)", type(value).__name__, error)
        return None


def unpack_result(
    data: bytes, inputs: Sequence[Any], code_of: Callable[[str], Code]
) -> Callable[..., Any]:
    """Returns the function that `inductor_compile_packed` compiled in another process.

    Args:
        inputs: the fake inputs of this capture, in which guards on sizes are checked.
        code_of: returns the code of the graph "forward", "backward" or "inference".

    Raises:
        AssertionError: if the sizes of `inputs` do not meet the guards of the stored graph.
    """
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool

    from zpasses.compat.graph_code import loader

    entry = pickle.loads(data)
    context = TracingContext.try_get()
    if context is not None:
        context.fw_metadata = entry.runtime_metadata
    settings = {
        "cudagraphs": BoxedBool(False),
        "boxed_forward_device_index": BoxedDeviceIndex(None),
    }
    with loader(code_of), functorch_config.patch(_SETTINGS):
        code = entry.wrap_post_compile(list(inputs), entry.sanitized_aot_config, settings)

    def run(*args: Any) -> Any:
        return code(list(args))

    return run


# --- Inductor's code ------------------------------------------------------------------------------
def pack_code(code: object) -> bytes | None:
    """Returns what Inductor generated for one graph as bytes, or None if it cannot be stored."""
    from torch._inductor.output_code import CompiledFxGraph

    if type(code) is not CompiledFxGraph:
        return None
    stored = copy.copy(code)
    stored.prepare_for_serialization()
    with _without_launchers(stored):
        return _pickled(stored)


@contextlib.contextmanager
def _without_launchers(code: Any) -> Iterator[None]:
    """In the block, the Triton kernels that `code` brings along can be pickled.

    Kernels that Inductor loaded from its own cache are those that run, and hold launchers.
    """
    bundle = code._triton_bundle
    kernels = [each.kernel for each in (bundle.static_autotuners if bundle is not None else ())]
    with contextlib.ExitStack() as stack:
        for kernel in kernels:
            if kernel.launchers:
                stack.callback(kernel.restore_after_unpickle, kernel.prepare_for_pickle())
        yield


def unpack_code(data: bytes, *, is_backward: bool) -> Code:
    """Loads what `pack_code` stored.

    Raises:
        RuntimeError: if the files that Inductor compiles of it cannot be made.
    """
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    stored, constants = pickle.loads(data), CompiledFxGraphConstants()
    code, _ = FxGraphCache.cache_hit_post_compile(stored, {}, constants)
    if code is None:
        raise RuntimeError("Inductor could not load stored code.")
    settings: Any = {
        "cudagraphs": BoxedBool(False),
        "boxed_forward_device_index": BoxedDeviceIndex(None),
        "is_backward": is_backward,
    }
    code.post_compile((), constants, settings)
    return code


# --- FX graphs ------------------------------------------------------------------------------------
_KEPT_META = (
    "val",
    "tensor_meta",
    "zpasses",
    "zpasses_is_output_of_model",
    "zpasses_keeps_strides",
    "custom",
    "stack_trace",
    "recompute",
    "ac_graph_id",
    "user_visible_output_idxs",
)


def pack_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> bytes:
    """Returns a graph of one of Inductor's compilers as bytes, with the fake values of its nodes.

    Args:
        inputs: fake inputs, whose strides may differ from those of the trace.

    Raises:
        Exception: any kind, from values in the graph that cannot be pickled.
    """
    from torch.fx._graph_pickler import GraphPickler, Options, patch_pytree_map_over_slice

    options = Options(ops_filter=None, node_metadata_key_filter=lambda key: key in _KEPT_META)
    stored = clone_graph_module(gm)
    for node, value in zip(stored.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"] = value
    for each in stored.modules():  # with the subgraphs
        for node in each.graph.nodes if isinstance(each, fx.GraphModule) else ():
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map_only(torch.Tensor, _no_view, node.meta["val"])
    stream = io.BytesIO()
    try:
        with patch_pytree_map_over_slice():
            _pickler_in_c(GraphPickler(io.BytesIO(), options), stream).dump(stored)
    except (pickle.PicklingError, AttributeError, TypeError):  # dill knows more objects
        return GraphPickler.dumps(stored, options)
    return stream.getvalue()


def _pickler_in_c(pickler: Any, stream: io.BytesIO) -> Any:
    """Returns a pickler with the methods and attributes of torch's one, written in C.

    Where dill is installed, torch's own is written in Python, and takes three times as long.
    """
    own: Any = type(pickler)
    methods = {name: value for name, value in vars(own).items() if not name.startswith("__")}
    made = type(own.__name__, (pickle.Pickler,), methods)(stream)
    inherited = getattr(own.__base__(io.BytesIO()), "__dict__", {})
    for name in vars(pickler).keys() - inherited.keys():
        setattr(made, name, getattr(pickler, name))
    return made


def _no_view(value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same memory that autograd does not know as a view. The pickle of a
    view would contain the fake mode of its base, with all that this has cached.
    """
    if not value._is_view() or not isinstance(value, FakeTensor):
        return value
    with value.fake_mode, torch.no_grad():
        plain = torch.empty(0, dtype=value.dtype, device=value.device)
        return plain.set_(
            value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )


def unpack_graph(data: bytes, mode: FakeTensorMode) -> fx.GraphModule:
    """Returns the graph that `pack_graph` stored, with fake values of `mode`."""
    from torch.fx._graph_pickler import GraphPickler

    return cast(fx.GraphModule, GraphPickler.loads(data, mode))
