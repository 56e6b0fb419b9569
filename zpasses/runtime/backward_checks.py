"""What a backward checks before it runs: parameters have the values that its forward used, and
autograd asks for nothing that compiled code has no formulas for.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.ranks.failures import report_failure
from zpasses.runtime.edits import memory_of
from zpasses.runtime.layout import layout_of
from zpasses.runtime.param_value import look_after, value_stamps


class ValuesUsed:
    """The values of parameters that a forward used.

    Backward uses some of them again: stage 3 gathers them again. Where they have changed since, its
    gradients would belong to no value of them. torch raises such an error about tensors that it
    saves.
    """

    def __init__(self, params: Sequence[Any], names: Sequence[str]) -> None:
        for param, name in zip(params, names, strict=True):
            if memory_of(param) is None:
                raise ShardingError(
                    f"parameter {name} was replaced where zpasses does not see it, such as by an "
                    "assignment to module._parameters, or by torch.utils.swap_tensors. Assign it "
                    "to its module, module.weight = parameter, or write its values, "
                    "param.copy_(values)."
                )
        self._params, self._names = params, names
        self._stamps = value_stamps(params)

    def check(self, positions: Mapping[str, int]) -> None:
        """Raises ShardingError if one of these parameters was edited.

        Args:
            positions: name of a parameter -> its position among those of the call.
        """
        look_after(self._params)
        changed = self._changed()
        for name, i in positions.items():
            if i in changed:
                raise self._error(i, name)

    def check_saved(self, node: Any) -> None:
        """Raises ShardingError if a shard that a node has saved was edited, in place of torch's
        error, which does not say what was edited.
        """
        changed = self._changed()
        if not changed:
            return
        try:
            _ = node.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            i = min(changed)
            raise self._error(i, self._names[i]) from error

    def _changed(self) -> frozenset[int]:
        """Positions of the parameters that were edited since the forward."""
        now = value_stamps(self._params)
        if now == self._stamps:
            return frozenset()
        pairs = list(zip(now, self._stamps, strict=False))
        edited = [any(new[i] != old[i] for new, old in pairs) for i in range(len(self._params))]
        return frozenset(i for i, each in enumerate(edited) if each)

    def _error(self, position: int, name: str) -> ShardingError:
        """Reports the failure to the other ranks."""
        error = ShardingError(
            f"parameter {name} was edited between a forward and its backward: in place, by an "
            "optimizer step, or by load_state_dict. Backward needs the value that forward used. "
            "Edit parameters before the forward or after the backward."
        )
        groups = layout_of(self._params[position]).sharding_groups
        report_failure(groups, error, "running a backward")
        return error


def with_value_check(
    code: Callable[[list[Any]], Any], positions: Mapping[str, int]
) -> Callable[[list[Any]], Any]:
    """The code of a backward, with a check that parameters have the values that forward used.

    Args:
        positions: name of each parameter that the graph reads -> its position among those of the
            call.
    """

    def run(args: list[Any]) -> Any:
        used = values_used()
        if used is not None:
            used.check(positions)
        return code(args)

    return run


_VALUES_USED = "zpasses_values_used"


def values_used() -> ValuesUsed | None:
    """Returns those of the forward whose backward runs; None if they are not known. It is what
    `zpasses.runtime.param_conversion.current_backward` refers to in that forward.
    """
    found: ValuesUsed | None = getattr(compat.current_autograd_node(), _VALUES_USED, None)
    return found


def prepare_backward(outputs: Any, values_used: ValuesUsed, first_node: int) -> None:
    """Give the autograd node of a call what its backward has to check.

    Args:
        first_node: the number of the first autograd node that the call made.
    """
    for value in outputs if isinstance(outputs, (list, tuple)) else (outputs,):
        node = _compiled_node(value.grad_fn, first_node) if isinstance(value, Tensor) else None
        if node is not None:  # all outputs share the node
            setattr(node, _VALUES_USED, values_used)
            node.register_prehook(_refuse_what_needs_formulas)
            # The node refers to its hooks, so they hold it weakly.
            node.register_prehook(functools.partial(_check_saved, values_used, weakref.ref(node)))
            break


def _check_saved(values_used: ValuesUsed, node: weakref.ref[Any], _: Any) -> None:
    values_used.check_saved(node())


def _compiled_node(node: Any, first_node: int) -> Any:
    """The node of a compiled graph, from the `grad_fn` of an output; None for a view of an input.

    AOTAutograd makes outputs that are views of other outputs, or of inputs, after the graph has
    run. Their nodes are torch's own.
    """
    while node is not None and compat.node_number(node) >= first_node:
        if isinstance(node, BackwardCFunction):
            return node
        node = node.next_functions[0][0]
    return None


def _refuse_what_needs_formulas(grads: Sequence[Any]) -> None:
    """Raise an error in a backward that would be differentiated again, or runs for a batch of
    gradients. Compiled code has no formulas for either, and errors of torch name options that do
    not help, or operators.
    """
    if torch.is_grad_enabled():
        raise ShardingError(
            "create_graph=True, as for gradient penalties, through a graph that zpasses compiled: "
            "torch.compile cannot differentiate a backward again. Compute this loss with the "
            "sharded model itself instead of its compiled form; gradients of gradients are exact "
            "there, and both may be used in one step."
        )
    if any(map(compat.is_batched, grads)):
        raise ShardingError(
            "is_grads_batched=True, as in jacobian(vectorize=True), through a graph that zpasses "
            "compiled: torch.compile cannot run a backward under vmap. Run it for one gradient at "
            "a time, with retain_graph=True, or compute this with the sharded model itself instead "
            "of its compiled form."
        )
