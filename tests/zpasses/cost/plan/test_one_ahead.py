"""Peaks with one gather and one reduction in flight, computed for many sets of kept parameters."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.zpasses.cost.plan.stacks import captured, step_of
from zpasses.cost.plan.kept_params import _StepPeaks, keepable_params
from zpasses.cost.plan.one_ahead import OneAheadPeak
from zpasses.cost.plan.schedule_evaluation import live_bytes
from zpasses.cost.plan.simple_plans import one_ahead_plan

MODELS = [
    ([48, 64, 64, 96], 129, 16, 2),
    ([7, 33, 33, 5], 60, 2, 3),
    ([9] * 6, 50, 8, 3),
    ([1024] * 4, 1024, 16, 2),
]


@functools.cache
def step(number):
    return step_of(captured(*MODELS[number], "nothing"), MODELS[number][3])


@pytest.mark.parametrize("number", range(len(MODELS)))
def test_the_peak_of_a_graph_is_that_of_its_plan(number):
    for problem in (step(number).forward, step(number).backward):
        none = np.zeros(len(problem.slots), dtype=np.int64)
        expected = int(live_bytes(problem, one_ahead_plan(problem)).max())
        assert OneAheadPeak(problem).peak_bytes(none) == expected


@given(st.data())
def test_peaks_are_those_of_the_step_that_keeps_the_parameters(data):
    lean = step(data.draw(st.integers(0, len(MODELS) - 1)))
    kept, cached = [], []
    for each in keepable_params(lean):
        {0: [], 1: kept, 2: cached}[data.draw(st.integers(0, 2))].append(each)
    expected = lean.keeping(kept, cached).peak_bytes()
    assert _StepPeaks(lean).peak_bytes(kept, cached) == expected
