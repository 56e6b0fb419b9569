"""Steps of an optimizer inside of a backward graph, where gradients of shards are ready.

A parameter steps when nothing after it in the graph reads its shard or its gradient. Steps run
right before the graph awaits its next collective, so they fill the time in which that is in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from zpasses.graph.aliases import is_view
from zpasses.graph.queries import Editor, is_wait, numel, returned_values, started_by, value_of
from zpasses.graph.tags import REDUCE_ROLES, tag_of
from zpasses.runtime.early_steps import run_early_steps
from zpasses.runtime.grad_slots import summands
from zpasses.runtime.param_conversion import wrap_shard_grad


class _Running(threading.local):
    params: Mapping[int, DTensor] = {}


_running = _Running()


@contextmanager
def stepping(params: Mapping[int, DTensor]) -> Iterator[None]:
    """Inside, code of a backward graph steps these parameters.

    Args:
        params: by the numbers of their slots.
    """
    before, _running.params = _running.params, params
    try:
        yield
    finally:
        _running.params = before


def stepping_params() -> Mapping[int, DTensor]:
    """Returns the parameters of the innermost `stepping`."""
    return _running.params


_library = torch.library.Library("zpasses", "FRAGMENT")
# It may write gradients (a factor of the parameter) and writes shards, so generated code keeps it
# after all that reads them before. CUDA graphs would not run an optimizer's Python code again.
_library.define(
    "step_params(Tensor(a!)[] grads, Tensor(b!)[] shards, int[] slots) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)
STEP_PARAMS = torch.ops.zpasses.step_params.default
"""Steps the parameters of some slots with the gradients of their shards, which it frees."""


def _step_params(grads: Sequence[Tensor], shards: Sequence[Tensor], slots: Sequence[int]) -> None:
    params = [_running.params[slot] for slot in slots]
    pairs = zip(grads, params, strict=True)
    run_early_steps(params, [wrap_shard_grad(grad, param, stored=False) for grad, param in pairs])


_library.impl("step_params", _step_params, "CompositeExplicitAutograd")
torch.library.register_fake("zpasses::step_params", lambda grads, shards, slots: None, lib=_library)


def add_steps(
    graph: fx.Graph, steps: Mapping[int, tuple[str, int]], saved: Mapping[str, Sequence[str]]
) -> None:
    """Step parameters inside of a backward graph, which returns None in place of their gradients.

    Args:
        steps: number of a slot -> name of its parameter, and the position of its gradient among the
            outputs.
        saved: name of an input -> the parameters whose shard or full value it is.
    """
    returned = returned_values(graph)
    order = {node: at for at, node in enumerate(graph.nodes)}
    last_use, shards = _uses_of_params(graph, order, saved)
    first_waits = {started_by(node): node for node in reversed(order) if is_wait(node)}
    borders = sorted(map(order.__getitem__, first_waits.values()))
    batches: dict[fx.Node, list[int]] = {}
    nodes = list(graph.nodes)
    for number, (param, position) in steps.items():
        ready = max(order[returned[position]], last_use.get(param, 0))
        border = next((at for at in borders if at > ready), len(nodes) - 1)
        batches.setdefault(nodes[border], []).append(number)
    for before, numbers in batches.items():
        grads, read = list[fx.Node](), dict[fx.Node, None]()
        for number in numbers:
            param, position = steps[number]
            grads.append(returned[position])
            # With one rank, a full value may have the memory of the shard.
            size = numel(value_of(returned[position]))
            read |= {node: None for node in shards.get(param, ()) if numel(value_of(node)) == size}
        Editor(graph, before).call(STEP_PARAMS, grads, list(read), numbers)
    gone = {position for _, position in steps.values()}
    values = [None if at in gone else value for at, value in enumerate(returned)]
    graph.output_node().args = (tuple(values),)


def stepped_gradients(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """Returns, for the slot of each parameter that steps, the reduced gradients whose sum its
    gradient is.
    """
    nodes = graph.find_nodes(op="call_function", target=STEP_PARAMS)
    return {
        slot: summands(grad)
        for grads, _, slots in (node.args for node in nodes)
        for grad, slot in zip(grads, slots, strict=True)
    }


def _uses_of_params(
    graph: fx.Graph, order: Mapping[fx.Node, int], saved: Mapping[str, Sequence[str]]
) -> tuple[dict[str, int], dict[str, list[fx.Node]]]:
    """Returns, for each parameter, the place of the last node that reads its shard or gathers it,
    and the inputs that are values of it.
    """
    last, inputs = dict[str, int](), dict[str, list[fx.Node]]()
    for node, at in order.items():
        params: Sequence[str] = ()
        if node.op == "placeholder":
            params = saved.get(node.name, ())
            at = _last_reader(node, order)
            for param in params:
                inputs.setdefault(param, []).append(node)
        elif (tag := tag_of(node)) is not None and tag.role not in REDUCE_ROLES:
            params = tag.params  # a gather reads the shard until it is awaited
        for param in params:
            last[param] = max(at, last.get(param, 0))
    return last, inputs


def _last_reader(node: fx.Node, order: Mapping[fx.Node, int]) -> int:
    """Returns the place of the last node that reads a value or a view of it."""
    readers = (_last_reader(user, order) if is_view(user) else order[user] for user in node.users)
    return max((order[node], *readers))
