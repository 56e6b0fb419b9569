"""Collective operators that copy engines run, which leaves the compute units to compute.

    zpasses::sdma_all_gather(input, group_size, group, *, route="")
        returns what all_gather_into_tensor returns
    zpasses::sdma_all_gather_out(input, group_size, group, *, out, route="")
        returns out; `input` may be this rank's part of it
    zpasses::sdma_all_gather_coalesced(inputs, group_size, group, *, route="")
        returns one output per input
    zpasses::sdma_reduce_scatter(input, op, group_size, group)
        returns what reduce_scatter_tensor returns

They take the arguments and return the results of the functional collectives of the same name. They
return at once, and the ordinary `wait_tensor` awaits them. On an accelerator, `wait_tensor` makes
the current stream wait, never the CPU. Inputs and outputs stay alive until then. `route` names the
route that a plan prefers. Whether a group can take it is found out once
(`zpasses.sdma.lifecycle`), and is the same on all ranks. If it cannot, or if none is named, the
group takes the first of the others that it can, and the functional collective if there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zpasses import compat
from zpasses.runtime.gloo import gathered_shape, implement_collective, scattered_shape
from zpasses.sdma.lifecycle import route_of
from zpasses.sdma.routes import resolve_contiguous

_library = torch.library.Library("zpasses", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides)
# Newer torch functionalizes an op by the tag `out`.
_OUT_TAGS = (*_TAGS, torch.Tag.out) if hasattr(torch.Tag, "out") else _TAGS
_GROUP, _ROUTE = "int group_size, str group_name", "str route=''"
for _schema, _tags in (
    (f"sdma_all_gather(Tensor input, {_GROUP}, *, {_ROUTE}) -> Tensor", _TAGS),
    (
        f"sdma_all_gather_out(Tensor input, {_GROUP}, *, Tensor(a!) out, {_ROUTE}) -> Tensor(a!)",
        _OUT_TAGS,
    ),
    (f"sdma_all_gather_coalesced(Tensor[] inputs, {_GROUP}, *, {_ROUTE}) -> Tensor[]", _TAGS),
    (f"sdma_reduce_scatter(Tensor input, str reduce_op, {_GROUP}) -> Tensor", _TAGS),
):
    _library.define(_schema, tags=_tags)

SDMA_ALL_GATHER: compat.OpOverload = torch.ops.zpasses.sdma_all_gather.default
SDMA_ALL_GATHER_OUT: compat.OpOverload = torch.ops.zpasses.sdma_all_gather_out.default
SDMA_ALL_GATHER_COALESCED: compat.OpOverload = torch.ops.zpasses.sdma_all_gather_coalesced.default
SDMA_REDUCE_SCATTER: compat.OpOverload = torch.ops.zpasses.sdma_reduce_scatter.default


def _all_gather(
    inputs: Sequence[Tensor], group_size: int, group_name: str, *, route: str = ""
) -> list[Tensor]:
    """Gather tensors.

    Args:
        inputs: this rank's parts, of any dtype, with the same shapes on every rank. They are made
            contiguous if they are not.
        group_size: number of ranks of the group.
        group_name: the process group.
        route: the preferred route.

    Returns:
        For each input [group_size * rows, ...], the parts in the order of the group's ranks.
        Nothing may read it before `wait_tensor`.

    Raises:
        RuntimeError: while a CUDA graph is captured, unless the group's route is the functional
            collective.
        AgreementError: on all ranks, if the ranks cannot agree on a route.
    """
    if group_size == 1:
        return [
            resolve_contiguous(source).clone().reshape(gathered_shape(source.shape, 1))
            for source in inputs
        ]
    return (
        route_of(group_name, inputs[0].device, route).all_gather(inputs, group_size, group_name)
        if inputs
        else []
    )


def _all_gather_out(
    input: Tensor, group_size: int, group_name: str, *, out: Tensor, route: str = ""
) -> Tensor:
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
    taken = route_of(group_name, input.device, route)
    return taken.all_gather_out(input, group_size, group_name, out)


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


def _all_gather_out_fake(input: Tensor, *_: object, out: Tensor, **__: object) -> Tensor:
    return out


def _untraced(*_: object, **__: object) -> Tensor:
    raise NotImplementedError("torch 2.11 traces no operator that returns its argument")


def _reduce_scatter_fake(input: Tensor, reduce_op: str, group_size: int, group_name: str) -> Tensor:
    return input.new_empty(scattered_shape(input.shape, group_size))


implement_collective("sdma_all_gather", _all_gather, gathered_shape)
for _name, _impl, _fake in (
    ("sdma_all_gather_out", _all_gather_out, _all_gather_out_fake),
    ("sdma_reduce_scatter", _reduce_scatter, _reduce_scatter_fake),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zpasses::{_name}", _fake, lib=_library)

if not hasattr(torch.Tag, "out"):  # torch 2.11, on which tests marked `gpu` may run
    # Inductor generates code only for ops that have a Functionalize kernel.
    _library.impl("sdma_all_gather_out", _untraced, "Functionalize")

for _op in (SDMA_ALL_GATHER, SDMA_ALL_GATHER_COALESCED, SDMA_REDUCE_SCATTER):
    compat.declare_collective(_op)
compat.declare_collective(SDMA_ALL_GATHER_OUT, writes_out=True)
