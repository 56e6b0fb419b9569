"""Seeded races: the static check finds each, and runs on the simulated device show it in what the
graph returns.
"""

import re

import pytest
import torch
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem

from tests.streams import SEEDS, GraphBuilder, races_and_difference
from tests.zpasses.graph.rewrites import Do
from zpasses import PassError
from zpasses.graph.queries import Editor
from zpasses.graph.verifier.operators import is_launch
from zpasses.pipeline.runner import run_passes

pytestmark = pytest.mark.usefixtures("two_ranks")

aten, F, sdma = torch.ops.aten, torch.ops._c10d_functional, torch.ops.zpasses
GATHER, GATHER_OUT = F.all_gather_into_tensor.default, F.all_gather_into_tensor_out.default
GATHERS = F.all_gather_into_tensor_coalesced.default
SCATTER, REDUCE_ = F.reduce_scatter_tensor.default, F.all_reduce_.default
SDMA_GATHER_OUT = sdma.sdma_all_gather_out.default
SYMM_GATHER = torch.ops.symm_mem._low_contention_all_gather.default
WAIT = F.wait_tensor.default
RACES = {}


def race(node, buffer, message):
    """Adds a graph, and what the static check says of it."""
    return lambda graph: RACES.setdefault(graph, (node, buffer, message)) and graph


@race("mul_tensor", "all_gather_into_tensor_default", r"reads or writes what")
def missing_wait():
    """The gathered parameter is read without a wait."""
    build = GraphBuilder("x")
    started = build.call(GATHER, build.inputs[0], 2, "0")
    return build.returns(build.call(aten.mul.Tensor, started, 2))


@race(
    "_low_contention_all_gather_default",
    "mul_tensor",
    r"is the last to need .* reads: .*It is freed, and may be reused. wait_tensor\(_low",
)
def freed_source():
    """torch's gather by copy engines does not keep its source, which nobody else reads."""
    build = GraphBuilder("x")
    source = build.call(aten.mul.Tensor, build.inputs[0], 2)
    started = build.call(SYMM_GATHER, source, "0")
    other = build.call(aten.add.Tensor, build.inputs[0], 1)
    full = build.call(WAIT, started)
    return build.returns(full, other)


@race(
    "all_gather_into_tensor_out_default_1",
    "empty_memory_format",
    r"on stream 0 \(all_gather_into_tensor_out_default\)\. wait_tensor\(all_gather",
)
def two_gathers_on_one_handle():
    """Two gathers write to the same output buffer."""
    build = GraphBuilder("x", "y")
    x, y = build.inputs
    buffer = build.call(aten.empty.memory_format, [8, 2], device="cpu")
    first = build.call(GATHER_OUT, x, 2, "0", out=buffer)
    second = build.call(GATHER_OUT, y, 2, "0", out=buffer)
    one = build.call(aten.mul.Tensor, build.call(WAIT, first), 2)
    return build.returns(one, build.call(aten.mul.Tensor, build.call(WAIT, second), 3))


@race("output", "clone_default", r"reads or writes what")
def output_read_early():
    """The graph returns what a reduction is still writing."""
    build = GraphBuilder("x")
    started = build.call(REDUCE_, build.call(aten.clone.default, build.inputs[0]), "sum", "0")
    return build.returns(started)


@race("output", "grad", r"reads the buffer of grad")
def source_overwritten_by_the_next_micro_batch():
    """A gather that reads what the caller writes to in its next call is never awaited."""
    build = GraphBuilder("grad", total=(8, 2))
    grad, total = build.inputs
    build.call(sdma.sdma_all_gather_out.default, grad, 2, "0", out=total)
    return build.returns(build.call(aten.mul.Tensor, grad, 2))


@race("copy__default", "zeros_default", r"writes to the input")
def own_part_written_in_flight():
    """A gather into a buffer reads its own part of it, which is filled after the start."""
    build = GraphBuilder("x")
    buffer = build.call(aten.zeros.default, [8, 2], device="cpu")
    part = build.call(aten.slice.Tensor, buffer, 0, 0, 4)
    started = build.call(SDMA_GATHER_OUT, part, 2, "0", out=buffer)
    build.call(aten.copy_.default, part, build.inputs[0])
    return build.returns(build.call(WAIT, started))


@race(
    "_low_contention_all_gather_default",
    "_low_contention_all_gather_default",
    r"running, writes: .*It is freed",
)
def output_freed_in_flight():
    """Nobody holds or awaits the output of a gather by copy engines; its memory goes to the next
    operator, over which the gather then writes.
    """
    build = GraphBuilder("x", y=(8, 2))
    x, y = build.inputs
    build.call(SYMM_GATHER, x, "0")
    return build.returns(build.call(aten.mul.Tensor, y, 2))


NOT_RETURNED = {source_overwritten_by_the_next_micro_batch}
"""Races that spoil the memory of the caller, and nothing that the graph returns."""


for_each_race = pytest.mark.parametrize("race", RACES, ids=lambda each: each.__name__)


@for_each_race
def test_static_check_names_node_buffer_stream_and_wait_and_runs_show_the_race(race):
    node, buffer, message = RACES[race]
    found, difference, schedule = races_and_difference(race())
    assert (found[0].node.name, found[0].buffer.name) == (node, buffer)
    assert re.search(message, str(found[0])), str(found[0])
    assert difference is not None
    if race not in NOT_RETURNED:
        expected = schedule.in_program_order()
        assert not expected.has_nan
        assert any(schedule.run(seed).differs_from(expected) for seed in range(SEEDS))


@for_each_race
def test_awaiting_each_launch_at_once_removes_the_race(race):
    gm = race()
    for node in list(gm.graph.nodes):
        if is_launch(node.target):
            edit = Editor(gm.graph, before=node.next)
            edit.call(WAIT, node)
            for held in (*node.all_input_nodes, node):
                edit.call(aten.neg.default, held)
    races, difference, _ = races_and_difference(gm)
    assert (races, difference) == ([], None)


def test_runner_names_the_pass_that_takes_the_order_away():
    build = GraphBuilder("x")
    source = build.call(aten.mul.Tensor, build.inputs[0], 2)
    started = build.call(GATHER, source, 2, "0")
    gm = build.returns(build.call(WAIT, started))

    def use_symmetric_memory(graph):
        started.target, started.args = SYMM_GATHER, (source, "0")

    message = r"pass 'do': %all_gather.* is the last to need .* the buffer of mul_tensor, on stream"
    with pytest.raises(PassError, match=message):
        run_passes(gm.graph, [Do(use_symmetric_memory)])
