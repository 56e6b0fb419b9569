"""What the verifier knows about an operator: which arguments a call writes, which its result shares
memory with, whether it communicates, and whether it only passes values on.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Literal

import torch

from zpasses import compat
from zpasses.graph.ops import DIALECT

__all__ = [
    "GETITEM",
    "REDUCE_OPS",
    "WAIT",
    "Kind",
    "awaits_each_output",
    "is_collective",
    "is_factory_of_uninitialised",
    "is_launch",
    "is_link",
    "keeps_arguments",
    "shared_arguments",
    "written_arguments",
]

aten = torch.ops.aten
WAIT: compat.OpOverload = torch.ops._c10d_functional.wait_tensor.default
GETITEM = operator.getitem

Kind = Literal["gather", "reduce"]

REDUCE_OPS = frozenset({"sum", "avg", "product", "min", "max", "band", "bor", "bxor"})
"""The reduce ops that the functional collectives know."""

_LINKS = {
    GETITEM,
    WAIT,
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.contiguous.default,
    aten.slice_copy.Tensor,
    aten.stack.default,
    torch.ops.prims.convert_element_type.default,
}
_ARITHMETIC = {
    aten.add.Tensor,
    aten.div.Scalar,
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
_IN_PLACE_FUNCTIONS = {
    operator.setitem,
    operator.iadd,
    operator.imul,
    operator.isub,
    operator.itruediv,
}
_VIEW_METHODS = {"view", "reshape", "t", "transpose", "permute", "detach", "expand", "narrow"}


@functools.cache
def is_collective(target: Any) -> bool:
    """Whether a call of `target` starts a functional collective, or is an op of the dialect."""
    return (
        isinstance(target, compat.OpOverload)
        and target.namespace in ("_c10d_functional", "zpasses")
        and target is not WAIT
        and any(argument.name == "group_name" for argument in target._schema.arguments)
    )


@functools.cache
def is_launch(target: Any) -> bool:
    """Whether a call of `target` returns before its work is done, which `wait_tensor` awaits.

    The ops of the dialect communicate, but return their results.
    """
    return (is_collective(target) and target not in DIALECT) or _is_low_contention(target)


@functools.cache
def keeps_arguments(target: Any) -> bool:
    """Whether a launch keeps its inputs and outputs alive until it is awaited.

    Functional collectives and the ops of zpasses do. torch's own collectives by copy engines
    (`torch.ops.symm_mem._low_contention_*`) read and write memory that the caller must keep.
    """
    return not _is_low_contention(target)


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
    concatenation or a wait. For gradients also sums and scaling.
    """
    return (
        target in _LINKS
        or (kind == "reduce" and target in _ARITHMETIC)
        or (isinstance(target, compat.OpOverload) and (target.is_view or bool(_aliased(target))))
    )


@functools.cache
def is_factory_of_uninitialised(target: Any) -> bool:
    """Whether a call returns memory whose content is undefined."""
    return (
        isinstance(target, compat.OpOverload)
        and target.namespace == "aten"
        and compat.op_name(target) in _UNINITIALISED
    )


@functools.cache
def written_arguments(target: Any) -> tuple[str | int, ...]:
    """The arguments that a call writes to, by name; by position where there is no schema."""
    if isinstance(target, compat.OpOverload):
        return tuple(
            argument.name
            for argument in target._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    name = target if isinstance(target, str) else ""
    in_place = name.endswith("_") and not name.endswith("__")
    return (0,) if in_place or target in _IN_PLACE_FUNCTIONS else ()


@functools.cache
def shared_arguments(target: Any) -> tuple[str | int, ...]:
    """The arguments that share memory with the result."""
    if target is WAIT:
        return ("tensor",)
    if isinstance(target, compat.OpOverload):
        return _aliased(target)
    return (0,) if target in _VIEW_METHODS else written_arguments(target)


def _aliased(target: compat.OpOverload) -> tuple[str, ...]:
    if target is aten._unsafe_view.default:
        return ("self",)
    if not target._schema.returns:
        return ()
    returned = any(each.alias_info is not None for each in target._schema.returns)
    return tuple(
        argument.name
        for argument in target._schema.arguments
        if argument.alias_info is not None and (returned or target.is_view)
    )
