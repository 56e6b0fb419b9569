"""Collective operators that copy engines run, which leaves the compute units to compute.

    zpasses::sdma_all_gather(input, group_size, group)
        returns what all_gather_into_tensor returns
    zpasses::sdma_all_gather_out(input, group_size, group, *, out)
        returns out; `input` may be this rank's part of it
    zpasses::sdma_all_gather_coalesced(inputs, group_size, group)
        returns one output per input
    zpasses::sdma_reduce_scatter(input, op, group_size, group)
        returns what reduce_scatter_tensor returns

They take the arguments and return the results of the functional collectives of the same name. They
return at once, and the ordinary `wait_tensor` awaits them. On an accelerator, `wait_tensor` makes
the current stream wait, never the CPU. Inputs and outputs stay alive until then. The route is
chosen once per group (`zpasses.sdma.lifecycle`), and is the same on all ranks. If no copy engine is
available, the route is the functional collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zpasses import compat
from zpasses.sdma.lifecycle import route_of
from zpasses.sdma.routes import gathered_shape, resolve_contiguous

_library = torch.library.Library("zpasses", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides)
# Newer torch functionalizes an op by the tag `out`.
_OUT_TAGS = (*_TAGS, torch.Tag.out) if hasattr(torch.Tag, "out") else _TAGS
_library.define(
    "sdma_all_gather(Tensor input, int group_size, str group_name) -> Tensor", tags=_TAGS
)
_library.define(
    "sdma_all_gather_out(Tensor input, int group_size, str group_name, *, Tensor(a!) out) -> "
    "Tensor(a!)",
    tags=_OUT_TAGS,
)
_library.define(
    "sdma_all_gather_coalesced(Tensor[] inputs, int group_size, str group_name) -> Tensor[]",
    tags=_TAGS,
)
_library.define(
    "sdma_reduce_scatter(Tensor input, str reduce_op, int group_size, str group_name) -> Tensor",
    tags=_TAGS,
)

SDMA_ALL_GATHER: compat.OpOverload = torch.ops.zpasses.sdma_all_gather.default
SDMA_ALL_GATHER_OUT: compat.OpOverload = torch.ops.zpasses.sdma_all_gather_out.default
SDMA_ALL_GATHER_COALESCED: compat.OpOverload = torch.ops.zpasses.sdma_all_gather_coalesced.default
SDMA_REDUCE_SCATTER: compat.OpOverload = torch.ops.zpasses.sdma_reduce_scatter.default


def _empty_gathered(source: Tensor, group_size: int) -> Tensor:
    return source.new_empty(gathered_shape(source.shape, group_size))


def _all_gather(input: Tensor, group_size: int, group_name: str) -> Tensor:
    """Gather one tensor.

    Args:
        input: this rank's part, of any dtype, with the same shape on every rank. It is made
            contiguous if it is not.
        group_size: number of ranks of the group.
        group_name: the process group.

    Returns:
        [group_size * rows, ...], the parts in the order of the group's ranks. Nothing may read it
        before `wait_tensor`.

    Raises:
        RuntimeError: while a CUDA graph is captured, unless the group's route is the functional
            collective.
        AgreementError: on all ranks, if the ranks cannot agree on a route.
    """
    (output,) = _gather((input,), group_size, group_name)
    return output


def _all_gather_coalesced(
    inputs: Sequence[Tensor], group_size: int, group_name: str
) -> list[Tensor]:
    return _gather(inputs, group_size, group_name)


def _gather(inputs: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    if group_size == 1:
        return [
            resolve_contiguous(source).clone().reshape(gathered_shape(source.shape, 1))
            for source in inputs
        ]
    return (
        route_of(group_name, inputs[0].device).all_gather(inputs, group_size, group_name)
        if inputs
        else []
    )


def _all_gather_out(input: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    """Like `_all_gather`, but writes to `out`: contiguous, of the input's dtype, [group_size *
    rows, ...].
    """
    expected = input.numel() * group_size
    if (
        out.dtype != input.dtype
        or out.device != input.device
        or out.numel() != expected
        or not out.is_contiguous()
    ):
        layout = "contiguous" if out.is_contiguous() else "not contiguous"
        given = f"{out.dtype} {list(out.shape)} on {out.device}, {layout}"
        raise ValueError(
            f"sdma_all_gather_out: out is {given}; expected {input.dtype}, {expected} elements on "
            f"{input.device}, contiguous."
        )
    if group_size == 1:
        return out.copy_(input.reshape(out.shape))
    return route_of(group_name, input.device).all_gather_out(input, group_size, group_name, out)


def _reduce_scatter(input: Tensor, reduce_op: str, group_size: int, group_name: str) -> Tensor:
    """Reduce over the group ("sum" or "avg") and keep this rank's rows.

    Routes may add in another order than the functional collective does, so floating-point results
    may round differently.
    """
    if group_size == 1:
        return resolve_contiguous(input).clone()
    return route_of(group_name, input.device).reduce_scatter(
        input, reduce_op, group_size, group_name
    )


def _all_gather_fake(input: Tensor, group_size: int, group_name: str) -> Tensor:
    return _empty_gathered(input, group_size)


def _all_gather_coalesced_fake(
    inputs: Sequence[Tensor], group_size: int, group_name: str
) -> list[Tensor]:
    return [_empty_gathered(each, group_size) for each in inputs]


def _all_gather_out_fake(input: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    return out


def _all_gather_out_in_aot(*_: object, **__: object) -> Tensor:
    raise NotImplementedError(
        f"sdma_all_gather_out cannot be traced by AOTAutograd of torch {torch.__version__}, which "
        "supports no op that returns its argument. Call sdma_all_gather in a model instead. "
        "Only the pass 'sdma', which runs after that trace, can insert sdma_all_gather_out."
    )


def _reduce_scatter_fake(input: Tensor, reduce_op: str, group_size: int, group_name: str) -> Tensor:
    return input.new_empty((input.shape[0] // group_size, *input.shape[1:]))


for _name, _impl, _fake in (
    ("sdma_all_gather", _all_gather, _all_gather_fake),
    ("sdma_all_gather_out", _all_gather_out, _all_gather_out_fake),
    ("sdma_all_gather_coalesced", _all_gather_coalesced, _all_gather_coalesced_fake),
    ("sdma_reduce_scatter", _reduce_scatter, _reduce_scatter_fake),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zpasses::{_name}", _fake, lib=_library)

if not hasattr(torch.Tag, "out"):
    # Inductor generates code only for ops that have a Functionalize kernel.
    _library.impl("sdma_all_gather_out", _all_gather_out_in_aot, "Functionalize")

for _op in (SDMA_ALL_GATHER, SDMA_ALL_GATHER_COALESCED, SDMA_REDUCE_SCATTER):
    compat.declare_collective(_op)
compat.declare_collective(SDMA_ALL_GATHER_OUT, writes_out=True)
