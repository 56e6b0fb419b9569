"""The autograd engine: the running backward, and the consumers of its gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._C._functorch import is_legacy_batchedtensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad


def next_node_number() -> int:
    """Returns the number of the autograd node that this thread makes next. Numbers count up."""
    return int(cast(Any, torch.autograd)._get_sequence_nr())


def node_number(node: Any) -> int:
    """Returns the number of an autograd node among those that its thread made."""
    return int(node._sequence_nr())


def is_profiling() -> bool:
    """Whether a profiler of torch records this thread."""
    return bool(cast(Any, torch.autograd)._profiler_enabled())


def current_graph_task_id() -> int:
    """Returns the id of the innermost autograd engine run that this thread is in.

    Raises:
        RuntimeError: outside a backward.
    """
    number = cast(Any, torch._C)._current_graph_task_id()
    if number < 0:
        raise RuntimeError("no backward is running")
    return int(number)


def queue_engine_callback(fn: Callable[[], None]) -> None:
    """Calls `fn` after the current engine run succeeds.

    The engine holds a reference to `fn` until the run ends, successfully or not.
    """
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(fn)


def in_backward() -> bool:
    """Whether this thread is executing an autograd node."""
    return current_autograd_node() is not None


def current_autograd_node() -> Any:
    """Returns the autograd node that is executing, or None outside a backward."""
    return cast(Any, torch._C)._current_autograd_node()


def is_batched(value: Any) -> bool:
    """Whether a value is a batch of gradients that the engine runs at once (`is_grads_batched`)."""
    return isinstance(value, torch.Tensor) and is_legacy_batchedtensor(value)


def has_tangents(values: Sequence[Any]) -> bool:
    """Whether one of these values has a tangent of forward-mode AD."""
    if cast(Any, forward_ad)._current_level < 0:
        return False
    tensors = (each for each in values if isinstance(each, torch.Tensor))
    return any(forward_ad.unpack_dual(each).tangent is not None for each in tensors)


def grad_consumers(node: Any) -> list[Any]:
    """Returns, for each input of an autograd node, the node that receives its gradient, or None."""
    return [consumer for consumer, _ in node.next_functions]


def is_held_elsewhere(consumers: Sequence[Any], position: int) -> bool:
    """Whether the program holds a node that accumulates a gradient, so that it may have registered
    hooks on it. The node itself does not tell.

    Args:
        consumers: what `grad_consumers` has just returned, which nothing else refers to.
        position: of the node.
    """
    more = sum(each is consumers[position] for each in consumers) - 1
    return sys.getrefcount(consumers[position]) > _references_of_unheld_node() + more


@functools.cache
def _references_of_unheld_node() -> int:
    """The references to a node that is in one list only. torch itself may have one."""
    with torch.enable_grad():
        leaf = torch.ones(1, requires_grad=True)
        result = leaf.expand_as(leaf)  # keeps the node
    consumers = grad_consumers(result.grad_fn)
    return sys.getrefcount(consumers[0])


def has_tensor_hooks(tensor: Any) -> bool:
    """Whether a tensor has hooks that receive its gradient (`register_hook`)."""
    return bool(tensor._backward_hooks)


def has_hooks(param: Any) -> bool:
    """Whether a leaf has hooks that receive its gradient, or that are called after it was added
    (`register_post_accumulate_grad_hook`).
    """
    return has_tensor_hooks(param) or bool(param._post_accumulate_grad_hooks)


def only_accumulates(consumers: Sequence[Any], position: int, param: Any) -> bool:
    """Whether the current engine run adds a gradient to `param.grad`, and does nothing else with
    it.

    Args:
        consumers: what `grad_consumers` has just returned, which nothing else refers to.
        position: of the parameter.
    """
    return (
        will_accumulate(consumers[position]) is True
        and not is_held_elsewhere(consumers, position)
        and not has_hooks(param)
    )


def has_saved_tensor_hooks() -> bool:
    """Whether something handles what autograd saves now, such as a checkpoint."""
    return cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True) is not None


def will_accumulate(consumer: Any) -> bool | None:
    """Whether the current engine run adds a gradient to `param.grad`.

    Args:
        consumer: what `grad_consumers` returns for the parameter.

    Returns:
        None if the gradient goes elsewhere: to another autograd node, or to the caller of
            `torch.autograd.grad`.
    """
    if consumer is None:
        return False
    if not hasattr(consumer, "variable"):
        return None  # not a leaf: the gradient flows on through the graph
    try:
        return bool(cast(Any, torch._C)._will_engine_execute_node(consumer))
    except RuntimeError:  # the leaf is an input of torch.autograd.grad
        return None


def outside_transforms() -> AbstractContextManager[Any]:
    """Context manager in which no transform of torch.func, such as `vmap`, is active.

    What reads a parameter in a transform does not concern it: the transform did not wrap the
    parameter.
    """
    return temporarily_clear_interpreter_stack()
