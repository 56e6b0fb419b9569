"""Dynamo: sources of placeholders, compile ids, errors, and the structured trace."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable
from types import CodeType
from typing import Any, cast

import torch
from torch import fx, nn
from torch._dynamo import disable as _dynamo_disable
from torch._dynamo import trace_rules
from torch._dynamo.comptime import comptime
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.utils import counters
from torch._guards import CompileContext

_SOURCE_PART = re.compile(r"_(modules|parameters|buffers)\[['\"]([^'\"]+)['\"]\]")


def placeholder_source(node: fx.Node) -> str:
    """Returns the Python expression that a Dynamo placeholder stands for; "" in other graphs."""
    argument = node.meta.get("grapharg")
    source = getattr(node, "_dynamo_source", None) or getattr(argument, "source", None)
    if source is None:
        return ""
    name = source.name  # a method until torch 2.11, a property since
    return str(name() if callable(name) else name)


def parameter_name(node: fx.Node) -> str:
    """Returns the name of a placeholder's parameter relative to the compiled module
    ("layers.0.weight").

    Returns the placeholder's own name if it is no parameter or buffer.
    """
    parts = [match.group(2) for match in _SOURCE_PART.finditer(placeholder_source(node))]
    return ".".join(parts) or node.name


def is_to_local(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph is `dtensor.to_local()` without arguments.

    In torch 2.11 the node calls a generated function, `prim_to_local`, that closes over the
    arguments. Later versions call the method.
    """
    if len(node.args) != 1 or node.kwargs:
        return False
    if node.op == "call_method":
        return node.target == "to_local"
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "prim_to_local":
        return False
    captured = [cell.cell_contents for cell in getattr(node.target, "__closure__", None) or ()]
    return not any(captured)


def current_compile_id() -> str:
    """Returns Dynamo's id of the current compile, or "-" outside a compile.

    "0/1" is the second compile of the first frame.
    """
    return str(CompileContext.current_compile_id() or "-")


def is_tracing() -> bool:
    """Whether Dynamo is tracing. It then reads attributes of the tensors that it receives."""
    return CompileContext.current_compile_id() is not None


def no_collection_after_compiles() -> contextlib.AbstractContextManager[Any]:
    """Context manager: torch does not collect cyclic garbage at the end of a compile. It visits all
    objects that the compile has made.
    """
    found = torch._dynamo.config.patch(run_gc_after_compile=False)
    return cast("contextlib.AbstractContextManager[Any]", found)


def is_optimized_module(module: object) -> bool:
    """Whether a module is what `torch.compile(module)` returns."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule)


def is_dynamo_restart(error: BaseException) -> bool:
    """Whether an exception only makes Dynamo restart its analysis of a frame, and is no failure."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def inner_exception(error: BaseException) -> BaseException | None:
    """Returns the exception of a backend that Dynamo wrapped in `error`; None if it wraps none."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else None


def dynamo_disable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps Dynamo from tracing a function that compiled code calls."""
    return cast(Callable[..., Any], _dynamo_disable(fn))


def is_structured_trace_on() -> bool:
    """Whether torch's structured trace is recorded, by TORCH_TRACE or by torch's own tests."""
    from torch._logging._internal import trace_log

    # pytest adds handlers of its own to loggers that do not propagate.
    own = [each for each in trace_log.handlers if not type(each).__module__.startswith("_pytest")]
    return bool(own) and trace_log.isEnabledFor(10)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Adds a text to torch's structured trace. tlparse shows it with the current compile."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


def compile_module(module: nn.Module, **how: Any) -> None:
    """Compiles a module in place, as `module.compile` does, also if its class is torch's own.

    Dynamo does not begin with a forward of `torch.nn`, so `nn.Linear(...).compile()` compiles
    nothing. It inlines it into a function that it does begin with. Each class has a function of its
    own, whose compiles Dynamo counts and compares by themselves.

    Args:
        how: arguments of `torch.compile`.
    """
    if trace_rules.check(type(module).forward):
        call: Any = wrap_inline(module._call_impl)
        call.__code__ = _entry_code(cast(Any, type(module)))
        module._compiled_call_impl = torch.compile(call, **how)
    else:
        module.compile(**how)


def begin_no_compile_at(function: Callable[..., Any]) -> None:
    """Runs a function and what it calls as it is where compiled code calls it outside of a graph.

    In a graph, Dynamo traces it as before.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(cast(Any, function).__code__, skip)


at_compile_time = comptime
"""Calls a function at once where Dynamo traces the call, and nothing elsewhere."""

_BODIES = {"cond", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention"}
"""Operators whose bodies Dynamo traces as graphs that run any number of times, or not at all."""


def leave_bodies(context: Any) -> None:
    """Has Dynamo trace what follows into the graph that calls the outermost body it is in.

    Bodies cannot communicate, as ranks may take different branches, and they cannot take DTensors.

    Args:
        context: of `at_compile_time`, which calls this function in traced code.
    """
    tracers = _tracers(context)
    for caller, body in itertools.pairwise(tracers):
        if getattr(body.source_target, "__name__", None) in _BODIES:
            tracers.append(caller)
            return


def return_to_bodies(context: Any) -> None:
    """Ends the effect of `leave_bodies`."""
    tracers = _tracers(context)
    if tracers[-1] in tracers[:-1]:
        tracers.pop()


def _tracers(context: Any) -> list[Any]:
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    tracers: list[Any] = tx.output.tracers
    return tracers


@functools.cache
def _entry_code(kind: Any) -> CodeType:
    code: CodeType = wrap_inline(kind).__code__.replace(co_name=kind.__name__)
    return code


def starts_alike(module: nn.Module) -> object:
    """Returns what is equal for modules whose compiles Dynamo counts together."""
    forward = type(module).forward
    return type(module) if trace_rules.check(forward) else getattr(forward, "__code__", forward)


def recompile_limit(kinds: int) -> dict[str, int]:
    """Returns what lets `torch.compile` compile one function for so many kinds of modules, each as
    often as Dynamo allows for one.

    Empty for one kind.
    """
    limit = torch._dynamo.config.recompile_limit
    return {"recompile_limit": kinds * limit} if kinds > 1 else {}


def recompile_reason() -> str | None:
    """Returns which guard failed, if the current compile repeats that of an earlier call.

    Returns None for a first compile, and where this torch does not tell.
    """
    from torch._dynamo.utils import get_metrics_context

    found = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")
    return found if isinstance(found, str) else None


def compile_counts() -> dict[str, int]:
    """Returns how many graphs Dynamo captured in this process ("captured"), and for how many graphs
    Inductor generated code instead of reading its cache ("generated").
    """
    return {
        "captured": counters["stats"]["unique_graphs"],
        "generated": counters["inductor"]["fxgraph_cache_miss"],
    }


def warm_up_compilers() -> None:
    """Imports the compilers and lets them prepare their patterns, so that forks of this process
    compile at once. A machine without a C++ compiler is no error.

    On a machine with CUDA devices it does nothing: a compile asks for them, and CUDA works in no
    fork of a process that did.
    """
    if torch.cuda.device_count():  # asks the driver's management library, which forks may do
        return
    with contextlib.suppress(Exception), torch.no_grad():
        # Forward only: autograd does not work in forks of a process that ran a backward.
        torch.compile(torch.cos, backend="aot_eager")(torch.ones(2))
        torch.compile(torch.sin)(torch.ones(2))
    torch.compiler.reset()
    counters.clear()


def call_around_compiles(start: Callable[[object], None], end: Callable[[object], None]) -> None:
    """Calls these functions when Dynamo or a late backward compile starts and ends, until
    `torch._dynamo.reset`.

    Compiles inside a compile are not told. Further calls with the same functions do nothing.
    """
    from torch._dynamo.callback import callback_handler, on_compile_end, on_compile_start

    if start not in callback_handler.start_callbacks:
        on_compile_start(start)
        on_compile_end(end)
