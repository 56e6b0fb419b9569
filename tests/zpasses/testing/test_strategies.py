"""What the strategies draw is valid, and the same draws work with any source of choices."""

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from hypothesis import find, given
from hypothesis import strategies as st
from torch import nn

from tests.graphs import few_examples
from zpasses import Level, Pass, Pipeline
from zpasses.option_values import field_types
from zpasses.passes import Schedule
from zpasses.pipeline.pipeline import catalogue
from zpasses.testing import (
    JointRecipe,
    ParamSpec,
    assert_equal_bits,
    assert_step_equals_reference,
    capture_ranks,
    random_inputs,
)
from zpasses.testing.drawing import (
    NOT_DRAWN,
    VALUES,
    draw_joint_recipe,
    draw_pipeline,
    drawn_values,
)
from zpasses.testing.strategies import joint_recipes, passes, pipelines, world_sizes


@few_examples
@given(joint_recipes(max_params=3), pipelines(levels=[Level.JOINT], lowered=False))
def test_joint_pipelines_keep_the_bits_of_drawn_graphs(recipe, pipeline):
    before, after = recipe.run_pipeline(pipeline)
    assert_equal_bits(before, after, random_inputs(before))


@few_examples
@given(pipelines(), st.sampled_from([1, 2, 3]))
def test_whole_pipelines_keep_the_bits_of_a_step(pipeline, world_size):
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    inputs = (torch.ones(2, 5),)
    captures = capture_ranks(model, inputs, world_size=world_size, pipeline=pipeline)
    assert_step_equals_reference(captures)


@pytest.mark.slow(quick="test_every_pass_and_option_of_the_catalogue_is_drawn_or_says_why_not")
def test_failures_shrink_to_plain_values():
    assert len(find(joint_recipes(), lambda _: True).params) == 1
    assert find(pipelines(), lambda _: True) == "gather-params,reduce-grads"
    assert find(world_sizes(), lambda size: size > 2) == 3


def test_a_random_generator_draws_the_same_things():
    def drawn(seed):
        choose = random.Random(seed).choice
        return draw_joint_recipe(choose), draw_pipeline(choose)

    assert drawn(1) == drawn(1) != drawn(2)
    names = {"torch": torch, "ParamSpec": ParamSpec, "JointRecipe": JointRecipe}
    for seed in range(100):
        recipe, pipeline = drawn(seed)
        assert eval(repr(recipe), names) == recipe
        assert str(Pipeline.parse(pipeline)) == pipeline


def test_every_pass_and_option_of_the_catalogue_is_drawn_or_says_why_not():
    drawn = defaultdict(set)
    choose = random.Random(0).choice
    for _ in range(1000):
        for each in Pipeline.parse(draw_pipeline(choose, ordered=False)):
            for option in field_types(type(each)):
                drawn[each.name, option].add(getattr(each, option))
            drawn[each.name, ""].add(each.level)
    for name, kind in catalogue().items():
        if isinstance(kind, Pipeline):
            continue
        assert (name, "") in drawn
        for option in field_types(kind):
            reasons = NOT_DRAWN.get(name, {})
            assert len(drawn[name, option]) > 1 or option in reasons, (name, option)
            assert drawn[name, option] == set(drawn_values(kind, option))


def test_tables_of_options_name_passes_and_options_that_exist():
    for name, options in [*VALUES.items(), *NOT_DRAWN.items()]:
        assert {each.partition("=")[0] for each in options} <= {*field_types(catalogue()[name])}
    for name, options in VALUES.items():
        for option, values in options.items():
            default = catalogue()[name].__dataclass_fields__[option].default
            assert default not in values
            never = f"{option}={default}" in NOT_DRAWN.get(name, {})
            assert (drawn_values(catalogue()[name], option)[0] == default) != never


@dataclass(frozen=True)
class Optioned(Pass):
    name: ClassVar[str] = "optioned"
    level: ClassVar[Level] = Level.JOINT

    size: int
    mode: Literal["a", "b"] | None = None
    dtype: torch.dtype = torch.float32
    text: str = "kept"

    def rewrite(self, graph):
        return 0


@few_examples
@given(passes(Optioned), passes(Schedule, plan=st.just("single"), memory_budget=st.just("7%")))
def test_passes_have_options_of_their_types(optioned, schedule):
    assert type(optioned.size) is int
    assert optioned.mode in ("a", "b", None)
    assert isinstance(optioned.dtype, torch.dtype)
    assert optioned.text == "kept"
    assert (schedule.memory_budget, schedule.cap_mb is None or schedule.cap_mb >= 0) == ("7%", True)


def test_options_without_a_strategy_are_errors():
    @dataclass(frozen=True)
    class Needed(Pass):
        text: str

    with pytest.raises(TypeError, match="Optioned has no option 'colour'"):
        passes(Optioned, colour=st.none())
    with pytest.raises(TypeError, match="no strategy for the option 'text' of Needed; give one"):
        passes(Needed)
