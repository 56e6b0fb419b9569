"""Conversion of DTensor parameters to local shards, and of the shards' gradients to DTensors.

Compiled graphs take local shards instead of DTensors. One autograd node converts all parameters of
a call, and wraps the gradients of their shards as DTensors in backward.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.graph.host_copies import SETTLE
from zpasses.runtime.early_steps import expect_gradients, gradients_came
from zpasses.runtime.layout import layout_of, rows_of, rows_of_all
from zpasses.runtime.param_value import drop_cached
from zpasses.runtime.watched import run_explained, watch, watch_if_needed


@dataclass(frozen=True)
class CallParams:
    """Which parameters a call of compiled code has, equally on all ranks.

    Modules of one class share compiled code, so a graph does not say whose parameters it gathers.
    """

    digest: str
    """Equal for calls with the same parameters."""
    text: str
    """For errors: "parameters 'layers.0.weight' to 'layers.0.bias', sharded in call 1 of
    zpasses.shard"."""

    @classmethod
    def of(cls, identities: Sequence[str]) -> CallParams | None:
        """Returns what parameters with these identities are; None if one has none."""
        if not identities or not all(identities):
            return None
        digest = hashlib.sha256("\n".join(identities).encode()).hexdigest()[:16]
        number, _, first = identities[0].partition(":")
        last = identities[-1].partition(":")[2]
        names = repr(first) if first == last else f"{first!r} to {last!r}"
        return cls(digest, f"parameters {names}, sharded in call {number} of zpasses.shard")


@functools.lru_cache(maxsize=1 << 14)
def read_of(identity: str) -> CallParams | None:
    """Returns the one parameter of a read in code that is not compiled."""
    return CallParams.of([identity])


class _Calls(threading.local):
    current: CallParams | None = None
    params: Sequence[Any] = ()
    backward: weakref.ref[object] | None = None


_calls = _Calls()


@contextmanager
def bound_call(call: CallParams | None, params: Sequence[Any] = ()) -> Iterator[None]:
    """Inside, compiled code runs with these parameters, and so does its backward later."""
    before = _calls.current, _calls.params, _calls.backward
    _calls.current, _calls.params, _calls.backward = call, params, None
    try:
        yield
    finally:
        _calls.current, _calls.params, _calls.backward = before


def current_params() -> Sequence[Any]:
    """Returns the sharded parameters of the call whose forward runs."""
    return _calls.params


def await_backward(held: object) -> None:
    """The forward of the call runs next, and its autograd node will hold this object."""
    _calls.backward = weakref.ref(held)


def current_backward() -> weakref.ref[object] | None:
    """Returns what is alive as long as the backward of the call whose forward runs may run; None
    if that is not known.
    """
    return _calls.backward


def current_call() -> CallParams | None:
    """Returns the parameters of the call whose forward or backward runs; None if not known."""
    if _calls.current is not None:
        return _calls.current
    node = local_shards_node()
    found: CallParams | None = getattr(node, "zpasses_call", None)
    return found


def whose_call(params: Sequence[Any]) -> object:
    """Returns what identifies the parameters of the call whose forward or backward runs."""
    call = current_call()
    return call.digest if call is not None else tuple(map(id, params))


class _LocalShards(torch.autograd.Function):
    """Converts all DTensor parameters of a call to their local shards."""

    @staticmethod
    def forward(ctx: Any, *params: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a missing gradient must stay None
        ctx.zpasses_params = params  # backward graphs find their parameters here
        ctx.zpasses_call = _calls.current
        # Other tensors of the same memory and version counter: autograd would mark a returned
        # tensor as this node's output, and that must not happen to the parameter's own tensor.
        return tuple([rows.detach() for rows in rows_of_all(params)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[DTensor | None, ...]:
        gradients_came(ctx.zpasses_params)
        result: list[DTensor | None] = []
        consumers = compat.grad_consumers(ctx)
        for param, grad, consumer in zip(ctx.zpasses_params, grads, consumers, strict=True):
            if grad is None:
                result.append(None)
                continue
            if compat.is_batched(grad):
                raise ShardingError(
                    "is_grads_batched=True, as in jacobian(vectorize=True), for sharded "
                    "parameters, whose gradients are DTensors: torch has no batches of these. Run "
                    "the backward for one gradient at a time, with retain_graph=True."
                )
            # An optimizer step is expected, on every rank, so the cached copy becomes stale.
            drop_cached(param)
            # Any other gradient goes to the caller of torch.autograd.grad, or first to a hook.
            stored = not compat.has_tensor_hooks(param) and compat.will_accumulate(consumer) is True
            result.append(wrap_shard_grad(grad, param, stored=stored))
        return tuple(result)


def to_local_shard(param: DTensor) -> Tensor:
    """Convert a parameter that eager code reads to its local shard. Its gradient may be
    deferred.
    """
    if not (torch.is_grad_enabled() and param.requires_grad):
        return rows_of(param)
    expect_gradients((param,))
    (shard,) = _LocalShards.apply(param)  # type: ignore[no-untyped-call]
    return cast(Tensor, shard)


def to_local_shards(params: Sequence[DTensor]) -> tuple[Tensor, ...]:
    """Convert the parameters of a call of compiled code to local shards, in one autograd node."""
    if torch.is_grad_enabled():
        expect_gradients(params)
    return cast("tuple[Tensor, ...]", _LocalShards.apply(*params))  # type: ignore[no-untyped-call]


def local_shards_node() -> Any:
    """Return the autograd node that produced the local shards for the node that is running; None if
    there is none.

    Its attribute `zpasses_params` holds the parameters.
    """
    node = compat.current_autograd_node()
    for source, _ in node.next_functions if node is not None else ():
        if hasattr(source, "zpasses_params"):
            return source
    return None


class StealableGrad(DTensor):
    """A DTensor gradient that autograd can store in `param.grad` without a copy or dispatch.

    Autograd detaches a gradient before it stores it. Through DTensor's dispatch, that costs more
    than everything else that happens to a small gradient. If nothing else references the gradient,
    detach is not needed, so this class returns itself from detach. Any other operation, and detach
    itself, turns it into a plain DTensor, or a WatchedShard if torch's reductions need one.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a disabled C function in DTensor's stub
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DETACH:
            return _settle(args[0])
        for value in compat.pytree.tree_leaves((args, kwargs)):
            if type(value) is StealableGrad:
                _settle(value)
        return run_explained(func, args, kwargs or {})


def watch_gradients() -> None:
    """From now on, gradients are WatchedShards, whose errors say what to do. For programs that have
    plain gradients, too, which torch cannot mix with DTensors. It costs time per operator.
    """
    global _watches_gradients
    _watches_gradients = True


_watches_gradients = False


def _settle(grad: Any) -> DTensor:
    """Make a gradient what it is for the rest of its life, in place."""
    if _watches_gradients or compat.has_empty_part(grad._spec):
        return watch(grad, None)
    grad.__class__ = DTensor
    return cast(DTensor, grad)


_DETACH = torch.ops.aten.detach.default


def wrap_shard_grad(rows: Tensor, param: DTensor, *, stored: bool = True) -> DTensor:
    """Wrap the gradient of a parameter's shard as a DTensor.

    Args:
        rows: the average over the ranks, with the cut dimension first. Nothing else may reference
            it. If it requires grad (create_graph), the result stays in the autograd graph.
        stored: whether autograd adds the gradient to `param.grad`. False returns a plain DTensor.
    """
    layout, spec = layout_of(param), compat.spec_of(param)
    if rows.device.type != layout.mesh.device_type:
        SETTLE(rows)  # from here on, the CPU may read it
    if layout.grad_scale != 1.0:
        in_place = not rows.requires_grad and rows.is_floating_point()
        rows = rows.mul_(layout.grad_scale) if in_place else rows * layout.grad_scale
    local = layout.rows_back(rows) if layout.dim else rows
    if not local.requires_grad:
        if stored:
            return compat.wrap_local(local, spec, StealableGrad)
        made: DTensor = watch_if_needed(compat.wrap_local(local, spec))
        return made
    meta = cast(Any, spec.tensor_meta)
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=meta.shape, stride=meta.stride
    )


class _StoredGrads(torch.autograd.Function):
    """Returns gradients of parameters in its backward. The engine can store them without a copy,
    which it cannot if the caller of a backward holds them.
    """

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *params: DTensor) -> Tensor:
        ctx.zpasses_grads, ctx.zpasses_params = grads, params
        return grads[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, root: Tensor) -> tuple[DTensor | None, ...]:
        pairs = zip(ctx.zpasses_grads, ctx.zpasses_params, strict=True)
        return None, *[wrap_shard_grad(grad, param) for grad, param in pairs]


def accumulate_grads(params: Sequence[Any], grads: Sequence[Tensor]) -> None:
    """Add gradients of shards to `param.grad` through autograd, which calls all hooks.

    Args:
        grads: one per parameter, at least one. Nothing else may reference them.
    """
    for param in params:
        drop_cached(param)  # an optimizer step is expected after every reduction
    frozen = [param for param in params if not param.requires_grad]  # since its gradient came
    for param in frozen:
        param.requires_grad_(True)
    try:
        with torch.enable_grad():
            root = _StoredGrads.apply(grads, *params)  # type: ignore[no-untyped-call]
        root.backward()
    finally:
        for param in frozen:
            param.requires_grad_(False)
