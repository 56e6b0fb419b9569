"""Hypothesis strategies for graphs and pipelines.

They need hypothesis (`pip install 'zpasses[testing]'`). Tracing a graph takes tens of milliseconds
per rank, so tests set `@settings(max_examples=20, deadline=None)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, get_args

import torch

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "zpasses.testing.strategies needs hypothesis, which is not installed. Run: "
        "pip install 'zpasses[testing]', or pip install hypothesis.",
        name="hypothesis",
    ) from error

from zpasses.option_values import field_types
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.testing.drawing import (
    WORLD_SIZES,
    draw_joint_recipe,
    draw_param,
    draw_pipeline,
    values_of,
)
from zpasses.testing.graphs import JointRecipe, ParamSpec

P = TypeVar("P", bound=Pass)


def world_sizes(max_size: int = 8) -> st.SearchStrategy[int]:
    """Numbers of ranks, from 1 to `max_size`."""
    return st.integers(1, max_size)


@st.composite
def param_specs(draw: Callable[[st.SearchStrategy[Any]], Any], /, **fixed: Any) -> ParamSpec:
    """Parameters, some of unusual shapes: scalars, no rows, fewer rows than ranks, and up to three
    dimensions.

    Args:
        fixed: fields of `ParamSpec` that are not drawn, such as `reads=1`.
    """
    return dataclasses.replace(draw_param(_chooser(draw)), **fixed)


def param_lists(max_size: int = 4, **fixed: Any) -> st.SearchStrategy[list[ParamSpec]]:
    """Lists of one to `max_size` parameters. `fixed` is as in `param_specs`."""
    return st.lists(param_specs(**fixed), min_size=1, max_size=max_size)


@st.composite
def joint_recipes(
    draw: Callable[[st.SearchStrategy[Any]], Any],
    *,
    max_params: int = 4,
    world_sizes: Sequence[int] = WORLD_SIZES,
    replicas: Sequence[int] = (1,),
) -> JointRecipe:
    """Joint graphs for all ranks of a world: `recipe.graphs()` traces them.

    Args:
        max_params: largest number of parameters.
        world_sizes: the numbers of ranks to draw from.
        replicas: the numbers of replicas to draw from, of those that divide the number of ranks.
            With several, `simulate` and `assert_equal_bits` need `recipe.groups()`.
    """
    return draw_joint_recipe(
        _chooser(draw),
        max_params=max_params,
        world_sizes=world_sizes,
        replicas=replicas,
    )


@st.composite
def pipelines(
    draw: Callable[[st.SearchStrategy[Any]], Any],
    *,
    levels: Collection[Level] = tuple(Level),
    lowered: bool = True,
) -> str:
    """Texts of valid pipelines of installed passes, with options.

    Args:
        levels: the levels whose passes are drawn. A joint graph needs `[Level.JOINT]`.
        lowered: whether every gather and reduction is lowered, as in a pipeline that trains.
    """
    return draw_pipeline(_chooser(draw), levels=levels, lowered=lowered)


def passes(cls: type[P], **options: st.SearchStrategy[Any]) -> st.SearchStrategy[P]:
    """Passes of one class, with drawn options.

    Args:
        cls: the class of the pass.
        options: strategies of options. Other options are drawn by their types: bool, Literal, None
            and dtypes any value, int and float numbers from 0 to a million. An option of another
            type keeps its default.

    Raises:
        TypeError: for an option that the pass does not have, and for one of another type that has
            no default.
    """
    kinds = field_types(cls)
    unknown = sorted(set(options) - set(kinds))
    if unknown:
        raise TypeError(f"passes: {cls.__name__} has no option {unknown[0]!r}; it has {[*kinds]}.")
    drawn = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        known = field.name in options
        strategy = options[field.name] if known else _by_type(kinds.get(field.name))
        if strategy is not None:
            drawn[field.name] = strategy
        elif field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise TypeError(
                f"passes: no strategy for the option {field.name!r} of {cls.__name__}; give one: "
                f"passes({cls.__name__}, {field.name}=st.just(...))."
            )
    return st.builds(cls, **drawn)


def _by_type(kind: Any) -> st.SearchStrategy[Any] | None:
    """A strategy for an option's type; None if there is none."""
    few = values_of(kind)
    found = [_STRATEGIES[each] for each in (kind, *get_args(kind)) if each in _STRATEGIES]
    return st.one_of(*([st.sampled_from(few)] if few else []), *found) if few or found else None


def _chooser(
    draw: Callable[[st.SearchStrategy[Any]], Any],
) -> Callable[[Sequence[Any]], Any]:
    """The source of choices that `zpasses.testing.drawing` takes."""
    return lambda values: draw(st.sampled_from(values))


_STRATEGIES: Mapping[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 10**6),
    float: st.floats(0, 1e6),
    torch.dtype: st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
}
"""Types of too many values to list."""
