"""Which values of a graph are linear in one input: `f(c * x) = c * f(x)`.

What is computed from the gradient of a loss usually is. It can then be computed for a gradient of
one, and multiplied by the true one later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx

from zpasses.graph.aliases import written_arguments
from zpasses.graph.queries import named_arguments, value_of

aten, prims = torch.ops.aten, torch.ops.prims

Dependence = Literal["linear", "zero", "constant"]
"""How a value depends on the input: linearly; not at all, as it is zero; not at all."""

_SCALABLE = (torch.bfloat16, torch.float32, torch.float64)
"""Dtypes in which small values are not lost before they are multiplied."""


class NotLinearError(Exception):
    """A value is not linear, or too narrow to be scaled later. The message says why."""


def dependences(start: fx.Node, nodes: Iterable[fx.Node]) -> dict[fx.Node, Dependence]:
    """Returns how values depend on an input of one element.

    Args:
        start: the input.
        nodes: calls that read it, or each other, in graph order.

    Raises:
        NotLinearError: if one of them may be neither linear in the input nor independent of it.
    """
    _check_dtype(start)
    known: dict[fx.Node, Dependence] = {start: "linear"}
    for node in nodes:
        known[node] = _dependence(node, known)
        if known[node] == "linear":
            _check_dtype(node)
    return known


def _check_dtype(node: fx.Node) -> None:
    value = value_of(node)
    if not isinstance(value, Tensor):
        raise NotLinearError(f"{node.name} is no tensor")
    if value.dtype == torch.float16:
        raise NotLinearError(
            f"{node.name} is float16, whose small values are lost without the scale of the loss"
        )
    if value.dtype not in _SCALABLE:
        raise NotLinearError(f"{node.name} is {str(value.dtype).removeprefix('torch.')}")


def _dependence(node: fx.Node, known: Mapping[fx.Node, Dependence]) -> Dependence:
    target: Any = node.target
    if node.op != "call_function" or not hasattr(target, "_schema"):
        raise NotLinearError(f"{node.name} is {target}")
    if target in _ZEROS or target in _FILLED:
        return _of_constant(node)
    given = named_arguments(node, target)
    by_name = {name: _of_argument(value, known) for name, value in given.items()}
    if target in _RULES:
        names, combine = _RULES[target]
        names = names or (target._schema.arguments[0].name,)
        found = combine([by_name.get(name, "zero") for name in names])
        if found is not None and all(
            kind != "linear" for name, kind in by_name.items() if name not in names
        ):
            return found
    elif "linear" not in by_name.values() and _repeats(target):
        return "constant"
    raise NotLinearError(f"{node.name} ({target}) is not linear in the gradient of the loss")


def _repeats(target: Any) -> bool:
    """Whether a second call with the same arguments returns the same and changes nothing."""
    random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return not random and not written_arguments(target)


def _of_argument(value: Any, known: Mapping[fx.Node, Dependence]) -> Dependence:
    if isinstance(value, fx.Node):
        return known[value] if value in known else _of_constant(value)
    if isinstance(value, (list, tuple)):
        kinds = [_of_argument(each, known) for each in value]
        return "linear" if "linear" in kinds else "constant"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "zero" if value == 0 else "constant"
    return "constant"


def _of_constant(node: fx.Node) -> Dependence:
    """Of a value that does not depend on the input: "zero" if that is plain to see."""
    while node.target in _SAME_VALUES:
        node = node.all_input_nodes[0]
    at = _FILLED.get(node.target)
    filled = at is not None and node.args[at : at + 1] == (0,)
    return "zero" if filled or node.target in _ZEROS else "constant"


# --- rules ----------------------------------------------------------------------------------------
def _same(kinds: Sequence[Dependence]) -> Dependence | None:
    return kinds[0]


def _multiplied(kinds: Sequence[Dependence]) -> Dependence | None:
    if "zero" in kinds:
        return "zero"
    if kinds.count("linear") > 1:
        return None
    return "linear" if "linear" in kinds else "constant"


def _summed(kinds: Sequence[Dependence]) -> Dependence | None:
    """Of a value each element of which is one of some values, or a sum of multiples of them."""
    left = set(kinds) - {"zero"}
    if len(left) > 1:
        return None
    return left.pop() if left else "zero"


def _sum_of_product(kinds: Sequence[Dependence]) -> Dependence | None:
    product = _multiplied(kinds[1:])
    return None if product is None else _summed([kinds[0], product])


_SAME_VALUES: tuple[Any, ...] = (
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
)
"""Calls whose result has the values of their first argument, but for rounding."""
_ZEROS: tuple[Any, ...] = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_FILLED: dict[Any, int] = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.ones_like.default: 1,
    aten.scalar_tensor.default: 0,
}
"""Calls whose result is filled with one value -> the position of that argument."""

Rule = tuple[tuple[str, ...] | None, Callable[[Sequence[Dependence]], Dependence | None]]
"""Names of the arguments on which the result may depend, or None for the first one alone; and how
it depends on them. It depends on no other argument."""
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        (
            *_SAME_VALUES,
            aten.neg.default,
            aten.sum.default,
            aten.sum.dim_IntList,
            aten.mean.default,
            aten.mean.dim,
            aten.select.int,
            aten.slice.Tensor,
            aten.gather.default,
            aten.select_backward.default,
            aten.slice_backward.default,
            # Gradients of functions: linear in the first argument, the gradient of their results.
            aten._softmax_backward_data.default,
            aten._log_softmax_backward_data.default,
            aten.nll_loss_backward.default,
            aten.tanh_backward.default,
            aten.sigmoid_backward.default,
            aten.gelu_backward.default,
            aten.silu_backward.default,
            aten.threshold_backward.default,
            aten.div.Tensor,
            aten.div.Scalar,
        ),
        (None, _same),
    ),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), (("self", "other"), _multiplied)),
    **dict.fromkeys((aten.mm.default, aten.bmm.default), (("self", "mat2"), _multiplied)),
    aten.addmm.default: (("self", "mat1", "mat2"), _sum_of_product),
    **dict.fromkeys(
        (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar),
        (("self", "other"), _summed),
    ),
    **dict.fromkeys(
        (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf),
        (("self", "other"), _summed),
    ),
    aten.masked_fill.Scalar: (("self", "value"), _summed),
    aten.constant_pad_nd.default: (("self", "value"), _summed),
    aten.scatter.src: (("self", "src"), _summed),
    aten.scatter.value: (("self", "value"), _summed),
    aten.slice_scatter.default: (("self", "src"), _summed),
}
