"""What the verifier knows about an operator: whether it communicates, and whether it only passes
values on. `zpasses.graph.aliases` says which arguments a call writes or returns.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

from zpasses import compat
from zpasses.graph.aliases import COPIES, GETITEM, shared_arguments
from zpasses.graph.dialect import DIALECT, TO_HOST
from zpasses.graph.encoding import DECODE, DECODE_MEAN, ENCODE
from zpasses.graph.host_copies import FROM_HOST, HOST_STARTS, HOST_WAITS
from zpasses.graph.queries import communicates

aten = torch.ops.aten

Kind = Literal["gather", "reduce"]

REDUCE_OPS = frozenset({"sum", "avg", "product", "min", "max", "band", "bor", "bxor"})
"""The reduce ops that the functional collectives know."""

_LINKS = (
    COPIES
    | HOST_STARTS
    | HOST_WAITS
    | {
        DECODE,
        ENCODE,
        FROM_HOST,
        GETITEM,
        TO_HOST,
        aten.cat.default,
        aten.contiguous.default,
        aten.slice_copy.Tensor,
        aten.stack.default,
    }
)
_ARITHMETIC = {
    aten.add.Tensor,
    aten.div.Scalar,
    DECODE_MEAN,
    aten.div.Tensor,
    aten.mul.Scalar,
    aten.mul.Tensor,
    aten.sub.Tensor,
}
_UNINITIALISED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


@functools.cache
def is_launch(target: Any) -> bool:
    """Whether a call of `target` returns before its work is done, which `wait_tensor` awaits, or
    the wait of a copy to the host or back.

    The ops of the dialect communicate, but return their results.
    """
    starts = communicates(target) and target not in DIALECT
    return starts or _is_low_contention(target) or target in HOST_STARTS


@functools.cache
def keeps_arguments(target: Any) -> bool:
    """Whether a launch keeps its inputs and outputs alive until it is awaited.

    Functional collectives and the ops of zpasses do. torch's own collectives by copy engines
    (`torch.ops.symm_mem._low_contention_*`) read and write memory that the caller must keep. So do
    copies to the host and back: Inductor reuses memory after its last reader.
    """
    return not _is_low_contention(target) and target not in HOST_STARTS


@functools.cache
def awaits_each_output(target: Any) -> bool:
    """Whether the outputs of a launch are awaited separately. The outputs of a functional coalesced
    collective arrive together.
    """
    return is_launch(target) and compat.op_name(target).startswith("sdma_")


def _is_low_contention(target: Any) -> bool:
    return (
        isinstance(target, compat.OpOverload)
        and target.namespace == "symm_mem"
        and compat.op_name(target).startswith("_low_contention_")
    )


@functools.cache
def is_link(target: Any, kind: Kind) -> bool:
    """Whether a call passes the values of its inputs on: a view, a cast, a copy, padding, a
    concatenation, an encode or decode, or a wait. For gradients also sums and scaling.
    """
    return (
        target in _LINKS
        or (kind == "reduce" and target in _ARITHMETIC)
        or (isinstance(target, compat.OpOverload) and bool(shared_arguments(target)))
    )


@functools.cache
def is_factory_of_uninitialised(target: Any) -> bool:
    """Whether a call returns memory whose content is undefined."""
    return (
        isinstance(target, compat.OpOverload)
        and target.namespace == "aten"
        and compat.op_name(target) in _UNINITIALISED
    )
