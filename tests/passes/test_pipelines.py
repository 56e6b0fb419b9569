import itertools

import pytest
import torch
from torch import nn

from tests.cases import some_quick
from tests.graphs import saved_for_backward
from tests.passes.odd_model import Model
from zpasses import Pipeline
from zpasses.graph.queries import collectives, nbytes, value_of
from zpasses.graph.tags import tagged
from zpasses.passes import ZERO1, ZERO2, ZERO3, GatherParams, ReduceGrads, Schedule
from zpasses.pipeline.pipeline import catalogue
from zpasses.pipeline.runner import run_passes
from zpasses.testing import (
    assert_step_equals_reference,
    capture_graphs,
    capture_ranks,
    fake_world,
    trace_joint,
)
from zpasses.testing.drawing import WORLD_SIZES

X = torch.zeros(2, 6)


@pytest.mark.parametrize(
    ("stage", "world_size"),
    some_quick(itertools.product(["zero2", "zero3"], WORLD_SIZES), [("zero2", 3), ("zero3", 3)]),
)
def test_step_equals_the_dialect_on_all_ranks(stage, world_size):
    assert_step_equals_reference(
        capture_ranks(Model(), (X,), world_size=world_size, pipeline=stage)
    )


def test_stages_lower_everything_and_reduce_each_trained_parameter_once():
    """Stage 3 gathers again in backward, and stages 1 and 2 do not."""
    for stage in ("zero1", "zero2", "zero3"):
        after = capture_graphs(Model(), (X,), world_size=3, pipeline=stage).after
        for gm in (after.joint, after.forward, after.backward):
            assert not {each.op for _, each in collectives(gm.graph)} & {"unshard", "reduce_grad"}
        reduced = [n for _, tag in tagged(after.backward.graph, "reduce") for n in tag.params]
        trained = ["last.bias", "last.weight", "scale", "up.bias", "up.weight"]
        assert sorted(reduced) == trained, stage
        assert bool([*tagged(after.backward.graph, "gather")]) == (stage == "zero3")


def test_stage_3_saves_fewer_bytes_than_stage_2():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 64), nn.Linear(64, 6)

        def forward(self, x):
            return self.down(self.up(x))

    def own_bytes(stage):
        """Returns the saved values that are not graph inputs. Inputs live in any case."""
        saved = saved_for_backward(capture_graphs(Wide(), (X,), world_size=2, pipeline=stage))
        return sum(nbytes(value_of(node)) for node in saved if node.op != "placeholder")

    reshard = "reshard-after-forward"
    regathers = str(Pipeline.parse("zero3")).replace(reshard, f"{reshard}{{keep=nothing}}")
    assert own_bytes(regathers) < own_bytes("zero2")


def test_a_stage_is_found_by_name_and_the_same_as_its_passes_written_out():
    for name, stage in (("zero1", ZERO1), ("zero2", ZERO2), ("zero3", ZERO3)):
        assert catalogue()[name] == stage
        assert Pipeline.parse(name) == Pipeline.parse(str(stage)) == stage


@pytest.mark.parametrize(
    ("world_size", "form", "mode", "reduce_dtype"),
    some_quick(
        itertools.product(
            [1, 3], ["all_reduce", "reduce_scatter"], ["coalesced", "flat"], [None, torch.bfloat16]
        ),
        [(3, "all_reduce", "flat", None), (3, "reduce_scatter", "coalesced", torch.bfloat16)],
    ),
)
def test_shards_and_gradients_of_any_strides_give_contiguous_results(
    world_size, form, mode, reduce_dtype
):
    """The verifier compares strides of all outputs, and of what every node records."""

    def model(a, x, b, y):
        reads = [
            torch.ops.zpasses.unshard(shard, 4, None, reduce_dtype, "0").t() for shard in (a, b)
        ]
        return tuple((full * other).sum(1) for full, other in zip(reads, (x, y), strict=True))

    def turned(*shape):
        return torch.zeros(shape[::-1]).t()

    shards = [turned(-(-4 // world_size), 6).requires_grad_() for _ in range(2)]
    with fake_world(world_size):
        inputs = (shards[0], torch.zeros(6, 4), shards[1], turned(6, 4))
        gm = trace_joint(model, inputs, {0: "a", 2: "b"})
        bucket = Schedule("single", mode=mode, memory_budget="1GiB")
        run_passes(gm.graph, [GatherParams(), ReduceGrads(form), bucket], verify="simulate")
    assert all(
        value_of(each).is_contiguous()
        for each in gm.graph.output_node().args[0][2:]
        if each is not None
    )
