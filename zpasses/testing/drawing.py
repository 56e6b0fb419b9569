"""Draw joint graphs and pipelines, by any source of choices.

`choose` picks one of the values it is given: `random.Random(seed).choice`, or a draw of hypothesis
as in `zpasses.testing.strategies`. Plain values stand first, so hypothesis shrinks towards them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch

from zpasses.option_values import field_types, format_value
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.pipeline import Pipeline, catalogue
from zpasses.testing.graphs import JointRecipe, ParamSpec

Choose = Callable[[Sequence[Any]], Any]

WORLD_SIZES = (1, 2, 3, 4, 7)
"""No communication, powers of two, and sizes that no shape below divides."""

VALUES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "chunk-loss": {"chunks": (1, 2)},
    "flatten-on-device": {"group": ("0",), "free_bytes": (0, 1 << 30)},
    "merge-reads": {"max_hold_mb": (0.0, 0.0001, 1.0)},
    "schedule": {
        "cap_mb": (0.0, 0.0001, 0.0003, 0.001),
        "memory_budget": ("0%", "10%", "1000%", "1MiB"),
    },
}
"""Pass -> option that is a number or a text -> values to draw in addition to its default. Values of
other options follow from their types.
"""

NEEDS: Mapping[str, Mapping[str, str]] = {"schedule": {"cap_mb": "plan"}}
"""Pass -> option -> another option that must differ from its default, too."""

_ENCODES = {
    "encode": "results differ from those of the graph before the pipeline",
    "block": "needs encode",
    "exact_below_kib": "needs encode",
}

NOT_DRAWN: Mapping[str, Mapping[str, str]] = {
    "chunk-loss": {"chunks=auto": "needs the option memory_budget"},
    "flatten-on-device": {
        "replicated": "promises that all ranks hold equal values, but drawn inputs differ",
        "tier=distributed": "needs replicated=true",
    },
    "average-replicas": _ENCODES,
    "gather-params": _ENCODES,
    "reduce-grads": {**_ENCODES, "feedback": "needs encode", "hops": "needs encode"},
}
"""Pass -> option, or one value of it, that is never drawn -> the reason."""


def draw_param(choose: Choose) -> ParamSpec:
    """Draw a parameter, maybe of an unusual shape: a scalar, no rows, fewer rows than ranks."""
    dimensions = choose((1, 0, 2, 3))
    shape = tuple(
        choose((1, 2, 3, 4, 5, 7, 9, 0)) if at == 0 else choose((2, 1, 3, 0) if at == 1 else (2,))
        for at in range(dimensions)
    )
    frozen = choose((False, True))
    return ParamSpec(
        shape,
        param_dtype=choose((None, torch.bfloat16, torch.float64)),
        reduce_dtype=choose((None, torch.float32, torch.float64)),
        frozen=frozen,
        on_host=frozen and choose((False, True)),
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
    exact = all(each.param_dtype != torch.bfloat16 for each in params)  # chains make large numbers
    return JointRecipe(
        params,
        world_size,
        interleaved,
        choose(fitting),
        chained=exact and choose((False, True)),
    )


def draw_pipeline(
    choose: Choose,
    *,
    levels: Collection[Level] = tuple(Level),
    lowered: bool = True,
    ordered: bool = True,
) -> str:
    """Draw the text of a valid pipeline of installed passes, with options.

    Args:
        choose: picks a value.
        levels: the levels whose passes are drawn.
        lowered: whether every gather and reduction is lowered, as in a pipeline that trains. False
            also draws pipelines that leave some of the dialect.
        ordered: whether passes come in the order of the named pipelines, each at most once. Passes
            that no named pipeline has may come anywhere.
    """
    needed = ("gather-params", "reduce-grads") if lowered else ()
    order = _order()
    names = [name for name in order if name in needed or choose((False, True))]
    for name in _passes():
        if name not in order and choose((False, True)):
            names.insert(choose(range(len(names) + 1)), name)
    if not ordered:
        for _ in range(choose((0, 0, 1, 3))):  # moves, and repeats
            names.insert(choose(range(len(names) + 1)), choose(list(_passes())))
        names = [
            name
            for at, name in enumerate(names)
            if name not in names[at + 1 :] or choose((True, True, False))
        ]
    return ",".join(_drawn(choose, name) for name in names if _passes()[name].level in levels)


def drawn_values(kind: type[Pass], option: str) -> list[Any]:
    """The values of an option that are drawn; the default stands first, if there is one."""
    (field,) = (each for each in _options(kind) if each.name == option)
    given = [*values_of(field_types(kind)[option]), *VALUES.get(kind.name, {}).get(option, ())]
    if field.default is not MISSING:
        given = [field.default, *(each for each in given if each != field.default)]
    never = NOT_DRAWN.get(kind.name, {})
    if option in never:
        return given[:1]
    return [each for each in given if f"{option}={format_value(each)}" not in never]


def _drawn(choose: Choose, name: str) -> str:
    """The text of a pass with options."""
    kind = _passes()[name]
    drawn = [(each, choose(drawn_values(kind, each.name))) for each in _options(kind)]
    changed = {each.name: value for each, value in drawn if value != each.default}
    needs = NEEDS.get(name, {})
    given = [
        f"{option}={format_value(value)}"
        for option, value in changed.items()
        if option not in needs or needs[option] in changed
    ]
    return name + (f"{{{','.join(given)}}}" if given else "")


def values_of(kind: Any) -> list[Any]:
    """The values of a type with few values; none of any other type."""
    if get_origin(kind) in (Union, UnionType):
        return [value for each in get_args(kind) for value in values_of(each)]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    known: dict[Any, list[Any]] = {bool: [False, True], type(None): [None]}
    return known.get(kind, [])


def _options(kind: type[Pass]) -> Iterator[Field[Any]]:
    return (
        each
        for each in fields(kind)  # type: ignore[arg-type]
        if each.init and each.default_factory is MISSING
    )


def _passes() -> dict[str, type[Pass]]:
    """The installed passes by name, but for those with a required option of too many values."""
    return {
        name: kind
        for name, kind in catalogue().items()
        if not isinstance(kind, Pipeline)
        and all(drawn_values(kind, each.name) for each in _options(kind))
    }


def _order() -> list[str]:
    """The passes of all named pipelines, each after those that stand before it in a pipeline."""
    order: list[str] = []
    for pipeline in catalogue().values():
        at = 0
        for each in pipeline if isinstance(pipeline, Pipeline) else ():
            if each.name not in order:
                order.insert(at, each.name)
            at = order.index(each.name) + 1
    return order
