"""Code of a graph whose gathers start before it, and whose reductions end after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.prefetch import GraphRun
from zpasses.graph.hoisting import HoistedGraph
from zpasses.runtime.block_schedule import Reducing, RunKey, Starter, block_schedule
from zpasses.runtime.codegen import boxed
from zpasses.runtime.local_shards import current_call, current_params, local_shards_node

__all__ = ["hoisted_code"]

_Code = Callable[[list[Any]], Any]


def hoisted_code(
    graph: HoistedGraph,
    body: _Code,
    name: str,
    order: Mapping[str, int],
    *,
    is_backward: bool,
    ahead: int | None,
    cost: GraphRun,
    plan: Callable[[Sequence[GraphRun]], int],
    limits: Callable[[], AbstractContextManager[None]],
    part: Callable[[fx.GraphModule], _Code],
) -> _Code:
    """Returns code of a whole graph. It takes and returns what the graph does.

    Gradients whose reductions are still in flight are returned as None, and are added to
    `param.grad` when the run of the autograd engine ends. Autograd would call the hooks of such a
    parameter with None, so the gradients of parameters with hooks are awaited.

    Args:
        body: code of `graph.body`.
        name: equal for graphs, of any rank, that communicate the same.
        order: name of a sharded input -> its position among the sharded inputs of the call.
        ahead: for how many graphs after this one gathers start; None plans it.
        cost: what the graph takes.
        plan: as in `BlockSchedule.plan_at_end`.
        limits: context in which collectives give up in time.
        part: returns code of a part of the graph.
    """
    gathers, reductions = graph.gathers, graph.reductions
    gather_positions = [order[param] for param in gathers.params] if gathers is not None else []
    start_gathers = part(gathers.graph) if gathers is not None else None
    reduced = list(reductions.gradients) if reductions is not None else []
    grad_positions = [order[param] for param in reductions.gradients.values()] if reductions else []
    if reductions is not None:
        start_reductions = part(reductions.start)
        end_reductions = part(reductions.end)
    schedule = block_schedule()

    def params_of_call() -> Sequence[Any]:
        if not is_backward:
            return current_params()
        source = local_shards_node()
        return source.zpasses_params if source is not None else ()

    def run(args: list[Any]) -> Any:
        params = params_of_call()
        starter = None
        if gathers is not None and start_gathers is not None:
            own = [params[position] for position in gather_positions]
            starter = Starter(start_gathers, gathers.in_flight, own)
        call = current_call()
        whose: object = call.digest if call is not None else tuple(map(id, params))
        key = RunKey(name, whose, is_backward)
        distance = schedule.planned if ahead is None else ahead
        if ahead is None and is_backward:
            schedule.plan_at_end(plan)
        of = f" with {call.text}" if call is not None else ""
        gathered = schedule.begin(
            key, starter, distance, lambda: replace(cost, name=f"{cost.name}{of}")
        )
        if gathered is not None:
            args.extend(gathered.wait())
            del gathered
        values = body(args)
        if reductions is None:
            return values
        values = list(values)
        sent, later = values[graph.outputs :], []
        sent, later = sent[: reductions.inputs], sent[reductions.inputs :]
        del values[graph.outputs :]
        started = [*start_reductions(sent), *later]

        def finish() -> list[Tensor]:
            return list(end_reductions(started))

        trained = [params[position] for position in grad_positions]
        if _are_accumulated(grad_positions) and not any(map(compat.has_tensor_hooks, trained)):
            schedule.reduce_later(Reducing(finish, trained, limits), distance)
        else:
            for position, grad in zip(reduced, finish(), strict=True):
                values[position] = grad
        return values

    return boxed(run)


def _are_accumulated(positions: Sequence[int]) -> bool:
    """Whether the running backward adds the gradients of all these parameters to `param.grad`."""
    source = local_shards_node()
    if source is None:
        return False
    consumers = compat.grad_consumers(source)
    return all(compat.will_accumulate(consumers[position]) is True for position in positions)
