"""Draw joint graphs and pipelines, by any source of choices.

`choose` picks one of the values it is given: `random.Random(seed).choice`, or a draw of hypothesis
as in `zpasses.testing.strategies`. Plain values stand first, so hypothesis shrinks towards them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from zpasses.option_values import format_value
from zpasses.pipeline.pipeline import Level
from zpasses.testing.graphs import JointRecipe, ParamSpec

__all__ = ["OPTIONS", "draw_joint_recipe", "draw_param", "draw_pipeline"]

Choose = Callable[[Sequence[Any]], Any]

WORLD_SIZES = (1, 2, 3, 4, 7)
"""No communication, powers of two, and sizes that no shape below divides."""

OPTIONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "merge-reads": {"max_hold_mb": (None, 0.0, 1.0)},
    "gather-params": {},
    "reduce-grads": {"form": ("reduce_scatter", "all_reduce")},
    "reshard-after-forward": {},
    "cache-params": {},
    "bucket": {
        "cap_mb": (25.0, 0.0001, 0.001),
        "mode": ("auto", "coalesced", "flat"),
        "memory_budget": ("5%", "0%", "1000%", "1GiB"),
        "plan_for_overlap": (False, True),
    },
    "overlap": {},
    "average-replicas": {},
    "defer-reduction": {},
}
"""Pass -> option -> values to draw; the default stands first. The passes that are missing need a
device or a copy engine.
"""

_LATER = ("bucket", "overlap", "average-replicas", "defer-reduction")

_LEVELS = {
    "cache-params": Level.FORWARD,
    "bucket": Level.PARTITIONED,
    "overlap": Level.PARTITIONED,
    "average-replicas": Level.BACKWARD,
    "defer-reduction": Level.BACKWARD,
}
"""Levels of passes that are not at the joint level."""


def draw_param(choose: Choose) -> ParamSpec:
    """Draw a parameter, maybe of an unusual shape: a scalar, no rows, fewer rows than ranks."""
    dimensions = choose((1, 0, 2, 3))
    shape = tuple(
        choose((1, 2, 3, 4, 5, 7, 9, 0)) if at == 0 else choose((2, 1, 3, 0) if at == 1 else (2,))
        for at in range(dimensions)
    )
    return ParamSpec(
        shape,
        param_dtype=choose((None, torch.bfloat16, torch.float64)),
        reduce_dtype=choose((None, torch.float32, torch.float64)),
        frozen=choose((False, True)),
        reads=choose((1, 2, 3)),
    )


def draw_joint_recipe(
    choose: Choose,
    *,
    max_params: int = 4,
    world_sizes: Sequence[int] = WORLD_SIZES,
    replicas: Sequence[int] = (1,),
) -> JointRecipe:
    """Draw joint graphs for all ranks of a world.

    Args:
        choose: picks a value.
        max_params: largest number of parameters.
        world_sizes: the numbers of ranks to draw from.
        replicas: the numbers of replicas to draw from. Those that do not divide the number of ranks
            are left out; one of them must.
    """
    count = choose(range(1, max_params + 1))
    params = tuple(draw_param(choose) for _ in range(count))
    world_size, interleaved = choose(world_sizes), choose((False, True))
    fitting = [each for each in replicas if world_size % each == 0]
    return JointRecipe(params, world_size, interleaved, choose(fitting))


def draw_pipeline(
    choose: Choose, *, levels: Collection[Level] = tuple(Level), lowered: bool = True
) -> str:
    """Draw the text of a valid pipeline of the passes in `OPTIONS`, with options.

    Args:
        choose: picks a value.
        levels: the levels whose passes are drawn.
        lowered: whether every gather and reduction is lowered, as in a pipeline that trains. False
            also draws pipelines that leave some of the dialect.
    """
    names = []
    if choose((False, True)):
        names.append("merge-reads")
    if lowered or choose((True, False)):
        names.append("gather-params")
    if lowered or choose((True, False)):
        names.append("reduce-grads")
    if "gather-params" in names:
        kept = choose(("", "reshard-after-forward", "cache-params"))
        names += [kept] if kept else []
    names += [name for name in _LATER if choose((False, True))]
    return ",".join(
        name + _drawn_options(choose, name)
        for name in names
        if _LEVELS.get(name, Level.JOINT) in levels
    )


def _drawn_options(choose: Choose, name: str) -> str:
    drawn = {option: (choose(values), values[0]) for option, values in OPTIONS[name].items()}
    texts = [
        f"{option}={format_value(value)}"
        for option, (value, default) in drawn.items()
        if value != default
    ]
    return f"{{{','.join(texts)}}}" if texts else ""
