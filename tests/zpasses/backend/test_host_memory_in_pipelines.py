"""Stages of torch's pipeline schedules whose blocks are compiled one by one, and of which what
micro-batches save rests on the host until their backward.
"""

import gc
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.profiler import ProfilerActivity, profile, record_function

import zpasses
from tests.frozen_training import assert_same
from tests.zpasses.backend.blocks_on_host import TARGET, plans
from tests.zpasses.backend.values_on_host import WIDTH, Block
from tests.zpasses.cost.memory.allocations import allocated
from tests.zpasses.parallel_models import assert_near, whole
from zpasses.host.saved_arenas import host
from zpasses.runtime.block_schedule import own_block_schedule
from zpasses.testing import run_on_ranks

ROWS, STEPS = 1024, 3


class Part(nn.Module):
    """The blocks of one stage."""

    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH, 0) for _ in range(blocks))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def parts(stages):
    torch.manual_seed(0)
    return [Part(8 // stages) for _ in range(stages)]


def mean_loss(out, target):
    return (out - target).square().mean()


def batch(step, rank, micro_batches):
    """The input and the target of all micro-batches of a data-parallel rank."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, ROWS * micro_batches, WIDTH, generator=draw)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), 0.001, eps=1e-4)


class Stage(PipelineStage):
    """A stage that notes how many bytes are on the host before each of its backwards."""

    def __init__(self, part, number, count, group, held):
        super().__init__(part, number, count, torch.device("cpu"), group=group)
        self.held = held

    def backward_one_chunk(self, *args, **kwargs):
        self.held.append(host.live)
        return super().backward_one_chunk(*args, **kwargs)


class Pipeline:
    """The stages of this rank: one, or two of four if they are interleaved."""

    def __init__(self, schedule, micro_batches, mesh, budgets=None, **options):
        torch._dynamo.reset()
        several = issubclass(schedule, ScheduleInterleaved1F1B)
        count, group = 4 if several else 2, mesh["pp"].get_group()
        self.pp, self.dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        self.micro_batches, self.held = micro_batches, []
        own = [self.pp, self.pp + 2] if several else [self.pp]
        all_parts = parts(count)
        self.model = nn.ModuleDict({str(number): all_parts[number] for number in own})
        zpasses.shard(self.model, mesh=mesh["dp"])
        options |= {"backwards_per_step": micro_batches, "target": TARGET, "cache": False}
        if budgets is not None:
            options |= {"memory_budget": budgets[self.pp], "host_memory": "1GiB"}
        stages = []
        for number in own:
            part = self.model[str(number)]
            zpasses.compile_blocks(part, "layers.*", **options)
            stages.append(Stage(part, number, count, group, self.held))
        self.schedule = schedule(stages if several else stages[0], micro_batches, mean_loss)

    def step(self, number, evaluate=False):
        """Runs all micro-batches. Returns their losses on the last stage, and none on others."""
        x, target = batch(number, self.dp, self.micro_batches)
        losses = []
        given = {"target": target, "losses": losses} if self.pp else {}
        run = self.schedule.eval if evaluate else self.schedule.step
        run(*([] if self.pp else [x]), **given)
        return [each.detach() for each in losses]


@dataclass
class Trained:
    losses: list
    params: dict
    held: list
    """Bytes on the host before each backward of the last step."""
    planned: int
    """The largest peak of a plan; 0 without plans."""
    peak: int
    """That of the last step that a profiler sees."""


def trained(*given, evaluates=False, **options):
    """Trains a `Pipeline`."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    losses = []
    with profiler, own_block_schedule():
        pipe = Pipeline(*given, **options)
        optimizer = optimizer_of(pipe.model)
        for number in range(STEPS):
            if evaluates and number:  # the next step runs the stages once more, to learn shapes
                with torch.no_grad():
                    losses += pipe.step(number, evaluate=True)
            optimizer.zero_grad()
            gc.collect()
            pipe.held.clear()
            with record_function(f"step {number}"):
                losses += pipe.step(number)
            optimizer.step()
        planned = max((each.peak_bytes for each in plans()), default=0)
        gc.collect()
        assert host.live == 0
    params = {name: whole(each).clone() for name, each in pipe.model.named_parameters()}
    peak = allocated(profiler, f"step {STEPS - 1}")[1]
    return Trained(losses, params, pipe.held, planned, peak)


def trained_alone(stages, micro_batches, data_parallel):
    """What PyTorch trains in one process. Returns parameters by name."""
    all_parts = parts(stages)
    model = nn.Sequential(*all_parts)
    optimizer = optimizer_of(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank in range(data_parallel):
            x, target = batch(number, rank, micro_batches)
            mean_loss(model(x), target).div(data_parallel).backward()
        optimizer.step()
    return dict(model.named_parameters())


def _compare(schedule, micro_batches, data_parallel=1, share=0.75, **options):
    mesh = init_device_mesh("cpu", (2, data_parallel), mesh_dim_names=("pp", "dp"))
    given = schedule, micro_batches, mesh
    expected = trained(*given, **options)
    free = trained(*given, ["1GiB"] * 2, **options)
    assert sum(expected.held) == sum(free.held) == 0
    largest = [None] * dist.get_world_size()
    dist.all_gather_object(largest, free.planned)
    halves = largest[:data_parallel], largest[data_parallel:]
    budgets = [int(share * max(each)) for each in halves]
    found = trained(*given, [f"{each}B" for each in budgets], **options)
    for each in (free, found):
        assert_same(each.losses, expected.losses)
        assert_same([*each.params.values()], [*expected.params.values()])
    stages = 4 if issubclass(schedule, ScheduleInterleaved1F1B) else 2
    alone = trained_alone(stages, micro_batches, data_parallel)
    assert_near(found.params, {name: alone[name] for name in found.params}, 2e-6)
    assert max(found.held) > 0
    assert found.planned <= budgets[mesh.get_local_rank("pp")]
    # A plan does not know gradients. How many there are depends on where the peak is. Forwards move
    # what the most demanding step needs, so others may hold less than planned.
    grads = sum(each.nbytes for each in found.params.values())
    assert expected.peak - found.peak >= free.planned - found.planned - grads > grads


@pytest.mark.inductor
@pytest.mark.processes
def test_micro_batches_of_1f1b_rest_on_the_host():
    run_on_ranks(_compare, Schedule1F1B, 4)


SLOW = [
    (Schedule1F1B, 6, {"zero_stage": 2}),
    (Schedule1F1B, 4, {"zero_stage": 1, "data_parallel": 2, "evaluates": True}),
    (ScheduleGPipe, 4, {"evaluates": True}),
    (ScheduleGPipe, 5, {"zero_stage": 2, "data_parallel": 2}),
    (ScheduleInterleaved1F1B, 4, {"evaluates": True}),
    (ScheduleInterleaved1F1B, 4, {"zero_stage": 2, "data_parallel": 2, "share": 0.85}),
]


@pytest.mark.slow(quick="test_micro_batches_of_1f1b_rest_on_the_host")
@pytest.mark.inductor
@pytest.mark.processes
@pytest.mark.parametrize(("schedule", "micro_batches", "options"), SLOW)
def test_micro_batches_of_all_schedules_rest_on_the_host(schedule, micro_batches, options):
    ranks = 2 * options.get("data_parallel", 1)
    run_on_ranks(_compare, schedule, micro_batches, **options, ranks=ranks, timeout_s=300)
