"""AOTAutograd: recompute marks, the partitioner, and what a joint graph says of its inputs and
outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "CompilerState",
    "aot_compile",
    "aot_gradient_index",
    "aot_input_index",
    "eliminate_common_subexpressions",
    "is_marked_recompute",
    "mark_recompute",
    "partition",
    "recompute_mark",
    "returned_to_caller",
    "undonate_saved",
]


def aot_input_index(desc: object) -> int | None:
    """Position among the captured graph's inputs that an AOTAutograd description of a plain (or
    unwrapped DTensor) input means."""
    base = getattr(desc, "base", desc)
    return getattr(base, "idx", None) if type(base).__name__ == "PlainAOTInput" else None


def aot_gradient_index(desc: object) -> int | None:
    """Position of the captured graph's input whose gradient a described output is."""
    return aot_input_index(getattr(getattr(desc, "base", desc), "grad_of", None))


_LAST_REGION = 1 << 30


def mark_recompute(node: fx.Node) -> None:
    """Never save this value for backward: compute it again there.

    The region number is above every checkpoint's: the partitioner saves a recomputed value that a
    *later* region reads."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _LAST_REGION


def is_marked_recompute(node: fx.Node) -> bool:
    return (
        node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE
        and node.meta.get("ac_graph_id") == _LAST_REGION
    )


def recompute_mark(node: fx.Node) -> tuple[str, int] | None:
    """What the partitioner is told of a value, by checkpoints or by `mark_recompute`: the policy
    ("must_recompute", "prefer_save", ...) and the region; None for a value that it may treat as it
    likes."""
    policy = node.meta.get("recompute")
    if not isinstance(policy, CheckpointPolicy):
        return None
    region = node.meta.get("ac_graph_id")
    return policy.name.lower(), region if isinstance(region, int) else 0


def eliminate_common_subexpressions(gm: fx.GraphModule, distinct: Sequence[fx.Node]) -> None:
    """What the partitioner does first, except that the nodes in `distinct` (whose last argument is
    a string) are never merged."""
    for i, node in enumerate(distinct):
        node.args = (*node.args[:-1], f"{node.args[-1]}#{i}")
    gm.graph = fx_graph_cse(gm.graph)
    for node in gm.graph.nodes:
        if (
            node.op == "call_function"
            and node.args
            and isinstance(node.args[-1], str)
            and "#" in node.args[-1]
        ):
            node.args = (*node.args[:-1], node.args[-1].rpartition("#")[0])


def partition(
    gm: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    recompute_elementwise: bool = False,
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Min-cut partition of a joint graph whose common subexpressions were merged already.

    Args:
        recompute_elementwise: also where a matrix product reads the result, for which it must be
            written to memory once more.
    """
    kwargs.setdefault("compiler", "inductor")
    materialized = (
        functorch_config.ban_recompute_materialized_backward and not recompute_elementwise
    )
    with functorch_config.patch(cse=False, ban_recompute_materialized_backward=materialized):
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


def aot_compile(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    forward: Any,
    backward: Any,
    inference: Any,
    partition_fn: Any,
) -> Any:
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


def undonate_saved(outputs: Sequence[Any], held: Callable[[fx.Node], bool]) -> None:
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
        saved, first = (
            outputs[meta.tensors_saved_for_backwards_slice],
            meta.num_symints_saved_for_bw,
        )
        donated[:] = [
            i for i in donated if not held(saved[i - first])
        ]  # in place: other metadata shares the list


class CompilerState:
    """What a compiler may look up while it runs, kept so that a variant can be compiled later, at
    call time."""

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
