"""A step of many equal layers, made from that of four, against the step that was captured."""

from dataclasses import replace

import pytest
import torch

from tests.tools.equal_layers import ROWS, WIDTH, Net
from tests.zpasses.cost.plan.stacks import LOWER, step_of
from zpasses.cost.plan.kept_params import keepable_params
from zpasses.cost.plan.offloaded_values import saved_values
from zpasses.cost.time.target import Target, use_target
from zpasses.graph.host_copies import offload_saved, offloadable_values
from zpasses.testing import capture_graphs
from zpasses.tools.plan.repeated_layers import RepeatedLayers, with_values_on_host


def graphs_of(layers):
    options = {"world_size": 2, "pipeline": LOWER % "nothing"}
    return capture_graphs(Net(layers), (torch.zeros(ROWS, WIDTH),), **options).after


@pytest.fixture(scope="module")
def captured():
    return {layers: graphs_of(layers) for layers in (4, 6)}


def known(step):
    """All that a plan is made from."""
    return [
        (
            [round(each, 6) for each in problem.work_us],
            problem.live_bytes.tolist(),
            [
                (job.is_gather, job.earliest, job.latest, job.held_from, job.full_bytes)
                for job in problem.jobs
            ],
        )
        for problem in (step.forward, step.backward)
    ]


def jobs_of(problem):
    """Those of one segment in any order."""
    return sorted((job.is_gather, job.earliest, job.latest, job.full_bytes) for job in problem.jobs)


def values_of(step, graphs):
    movable = offloadable_values(graphs.forward.graph, graphs.backward.graph, 1)
    return saved_values(step, movable)


def test_further_layers_are_those_of_a_capture(captured):
    few, more = (step_of(captured[layers], 2) for layers in (4, 6))
    step, params, _ = RepeatedLayers.of(few).extended(6, keepable_params(few))
    assert known(step) == known(more)
    assert sorted((each.nbytes, round(each.held_us, 6)) for each in params) == sorted(
        (each.nbytes, round(each.held_us, 6)) for each in keepable_params(more)
    )
    assert known(step.keeping(params)) == known(more.keeping(keepable_params(more)))


def places(values):
    return sorted((each.nbytes, each.forward_slot, each.backward_slot) for each in values)


def test_values_of_further_layers_are_those_of_a_capture(captured):
    few, more = (step_of(captured[layers], 2) for layers in (4, 6))
    given = values_of(few, captured[4])
    _, _, found = RepeatedLayers.of(few).extended(6, (), given)
    assert len(given) < len(found)
    assert places(found) == places(values_of(more, captured[6]))


def test_values_that_last_until_forward_ends_have_copies(captured):
    few = step_of(captured[4], 2)
    given = [each for each in values_of(few, captured[4]) if each.nbytes == 8 * ROWS * WIDTH]
    last = [replace(each, forward_slot=few.forward.end) for each in given]
    _, _, usual = RepeatedLayers.of(few).extended(6, (), given)
    step, _, found = RepeatedLayers.of(few).extended(6, (), last)
    assert len(found) == 6
    assert {each.forward_slot for each in found} == {step.forward.end}
    assert sorted((each.ready_slot, each.backward_slot) for each in found) == sorted(
        (each.ready_slot, each.backward_slot) for each in usual
    )


def test_values_on_the_host_cost_what_they_cost_in_a_graph():
    graphs = graphs_of(4)
    with use_target(Target.parse("h100")):
        step = step_of(graphs, 2)
        values = values_of(step, graphs)
        moved, params = with_values_on_host(step, values, keepable_params(step))
        names = [each.name for each in values]
        offload_saved(graphs.forward.graph, graphs.backward.graph, names, "test")
        real = step_of(graphs, 2)
    assert values
    assert moved.peak_bytes() == real.peak_bytes()
    for planned, built in ((moved.forward, real.forward), (moved.backward, real.backward)):
        assert sum(planned.work_us) == pytest.approx(sum(built.work_us))
        assert jobs_of(planned) == jobs_of(built)
    keeping, built = moved.keeping(params), real.keeping(keepable_params(real))
    assert keeping.peak_bytes() == built.peak_bytes()


def test_too_few_layers_are_refused():
    few = step_of(graphs_of(2), 2)
    with pytest.raises(ValueError, match="found 2 layers, and needs 4"):
        RepeatedLayers.of(few)
