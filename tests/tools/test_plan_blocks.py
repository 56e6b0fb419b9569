"""Plans of a step whose blocks are compiled one by one, and what a training run does with them."""

import itertools
import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.checkpoint import checkpoint

import zpasses
from zpasses.errors import MemoryBudgetError, OptionError
from zpasses.runtime.block_schedule import BlockSchedule, block_schedule, own_block_schedule
from zpasses.testing import run_on_ranks, world_mesh
from zpasses.tools.capture.captured_step import CaptureRequest, run_capture
from zpasses.tools.cli.main import cli
from zpasses.tools.plan.plan_request import PlanRequest
from zpasses.tools.plan.plan_view import plan_view
from zpasses.tools.plan.step_plans import plan_step

HERE = "tests.tools.test_plan_blocks"
WIDTH, ROWS = 64, 128
TARGET = "h100,link_gb_s=1.5,launch_us=1,hop_us=1"
"""A gather takes longer than a forward, and not as long as two."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers, frozen=0):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.layers[:frozen].requires_grad_(False)
        self.head = nn.Linear(WIDTH, 8)
        self.holds = False

    def forward(self, x):
        held = []
        for layer in self.layers:
            x = layer(x)
            if self.holds:
                held.append(x)
        return self.head(x).square().mean()


class Recomputed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def net(layers=6, rows=ROWS, frozen=0):
    return Net(layers, frozen), torch.ones(rows, WIDTH)


def request(blocks="layers.*", **more):
    return PlanRequest(f"{HERE}:net", 2, TARGET, compile_blocks=blocks, **more)


@pytest.fixture(scope="module")
def table():
    return plan_step(request())


# --- plans ---------------------------------------------------------------------------------------
def test_plans_of_blocks_choose_copy_engines_and_say_why():
    engines = "mi300x,launch_us=0.01,hop_us=0.01,link_gb_s=2"  # gain whatever the size
    asked = request()
    found = plan_step(replace(asked, target=engines))
    names = [name for each in ("zero2", "zero3") for name in (f"{each}, no copy engines", each)]
    assert [each.name for each in found.stages] == names
    without, stage3 = found.stages[2:]
    assert stage3.total_us < 0.99 * without.total_us
    assert found.chosen.total_us == pytest.approx(stage3.total_us)
    gathering = [run for run in found.chosen.routes if ": by mori: " in run]
    assert all(" us, gains " in each for each in gathering)
    taken = [": by mori: " in each for each in found.chosen.routes]
    text = plan_view(found).text()
    assert f"Copy engines run {sum(taken)} of {len(taken)} launches of gathers:" in text
    assert sum(taken) > len(taken) / 2
    off = plan_step(
        replace(asked, target=engines, pipeline="zero3{schedule.copy_engines=off}", stages=False)
    )
    assert off.chosen.routes == ()


def test_steps_in_backward_hold_the_gradients_of_two_blocks():
    asked = request(optimizer="adamw", stages=False)
    whole, freed = (plan_step(replace(asked, step_in_backward=each)) for each in (False, True))
    block = 2 * 2 * WIDTH * WIDTH + 3 * WIDTH
    head = 8 * WIDTH + 8
    assert whole.resting.gradient_bytes == (6 * block + head) * 4 // 2
    assert freed.resting.gradient_bytes == (2 * block + head) * 4 // 2
    less = whole.resting.gradient_bytes - freed.resting.gradient_bytes
    for one, other in zip(whole.plans, freed.plans, strict=True):
        assert one.device.total_bytes - other.device.total_bytes == less
    assert "zpasses.step_in_backward(optimizer)" in str(plan_view(freed))
    assert "of gradients at a time, which backward frees, and" in plan_view(freed).text()
    assert "step_in_backward" not in str(plan_view(whole))
    assert "backward frees" not in plan_view(whole).text()
    assert freed.to_json()["step_in_backward"] == "zpasses.step_in_backward(optimizer)"
    assert whole.to_json()["step_in_backward"] is None
    assert "step_in_backward" not in freed.to_json()["resting"]
    for wrong in ({"optimizer": None}, {"device_memory": "1GiB"}, {"compile_blocks": None}):
        with pytest.raises(OptionError, match="--step-in-backward"):
            replace(asked, step_in_backward=True, **wrong).check()


def test_each_number_of_graphs_ahead_that_gains_time_is_a_plan(table):
    assert [each.ahead for each in table.plans] == [0, 1, 2]
    for lean, fast in itertools.pairwise(table.plans):
        assert lean.peak_bytes < fast.peak_bytes
        assert lean.total_us > fast.total_us
    assert all(each.peak_bytes <= each.limit_bytes for each in table.plans)
    assert all(each.bound_us <= each.total_us for each in (*table.plans, *table.stages))
    assert all(each.exposed_us < each.total_us for each in table.plans)
    assert table.plans[0].collectives == 3 * 6  # gathers twice, reduces once
    assert table.chosen is table.plans[-1]
    zero2, zero3 = table.stages
    assert zero3.graphs == table.chosen.graphs
    assert (zero2.collectives, zero2.kept_bytes) == (2 * 6, 6 * 4 * (4 * WIDTH**2 + 3 * WIDTH))
    assert zero2.peak_bytes > zero3.peak_bytes + zero2.kept_bytes / 2
    assert table.resting.shard_bytes == sum(each.nbytes for each in Net(6).parameters()) // 2


def run_with(budgets):
    """Trains with each budget; returns the numbers of graphs ahead, or the errors."""
    found = []
    for budget in budgets:
        torch._dynamo.reset()
        with own_block_schedule():
            model, x = net()
            zpasses.shard(model, mesh=world_mesh())
            options = {"memory_budget": budget, "target": TARGET}
            zpasses.compile_blocks(model, "layers.*", cache=False, **options)
            try:
                for _ in range(3):
                    model(x).backward()
                found.append(block_schedule().plans.ahead)
            except MemoryBudgetError as error:
                found.append(str(error))
    return found


@pytest.mark.slow(quick="the other tests of test_plan_blocks.py")
@pytest.mark.processes
def test_a_run_gathers_as_far_ahead_as_the_plan_says(table):
    budgets = [table.plans[0].budget, "10%", table.plans[2].budget, "1KiB"]
    planned = [plan_step(request(memory=each, stages=False)) for each in budgets]
    expected = [each.reason if each.chosen is None else each.chosen.ahead for each in planned]
    assert run_on_ranks(run_with, budgets) == [expected] * 2
    assert expected[:3] == [0, 1, 2]
    assert " are missing" in expected[-1]


def test_the_plan_is_that_of_a_step_after_others():
    """In stage 2, a step after the first one does not gather frozen parameters."""
    zero2, _ = plan_step(request(arguments={"frozen": 2})).stages
    assert zero2.collectives == 2 * 4


def test_a_capture_knows_nothing_of_graphs_before_it():
    seen = []
    begin = BlockSchedule.begin

    def observed(self, *args, **more):
        seen.append(self)
        return begin(self, *args, **more)

    with mock.patch.object(BlockSchedule, "begin", observed):
        for _ in range(2):
            given = {"arguments": {"layers": 1}, "compile_blocks": "layers.*"}
            run_capture(CaptureRequest(f"{HERE}:net", None, 2, **given))
    assert len(seen) == 4
    assert len(set(map(id, (*seen, block_schedule())))) == 3


# --- the command ---------------------------------------------------------------------------------
def run(*arguments, blocks="layers.*"):
    more = ["--compile-blocks", blocks, "--target", TARGET, "--arg", "layers=3"]
    return CliRunner().invoke(cli, ["plan", f"{HERE}:net", *more, *map(str, arguments)])


def test_the_command_prints_the_call_and_what_it_does_not_count(tmp_path):
    page = tmp_path / "plans.html"
    done = run("--world", 2, "--memory", "10GiB", "--html", page)
    assert done.exit_code == 0, done.output
    call = 'zpasses.compile_blocks(model, "layers.*", memory_budget="10GiB", '
    assert f'{call}target="{TARGET}")' in done.stdout
    header = next(line for line in done.stdout.splitlines() if line.startswith("plan "))
    assert "ahead" in header
    assert not {"activations", "cached"} & set(header.split())
    assert "Not counted: what runs between the blocks" in done.stdout
    assert '--compile-blocks "layers.*,head"' in done.stdout
    assert "memory_budget" in page.read_text()
    done = run("--world", 2, "--memory", "1KiB", "--json", blocks="layers.*,head")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["compile_blocks"], found["uncompiled"]) == ("layers.*,head", {})
    assert (found["options"], " are missing" in found["reason"]) == (None, True)
    assert [each["name"] for each in found["stages"]] == ["zero2", "zero3"]
    assert {"ahead", "step"} <= set(found["plans"][0])


def test_shapes_of_hybrid_sharding_are_compared_in_blocks():
    done = run("--mesh", "auto", "--world", 4)
    assert done.exit_code == 0, done.output
    assert "replicate=2,shard=2" in done.stdout
    assert 'zpasses.compile_blocks(model, "layers.*", memory_budget="' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--points", 8], "--points does not go together with --compile-blocks"),
        (["--backwards-per-step", 2], "--backwards-per-step 2 does not go together with"),
        (["--memory", "auto"], "expected a size such as '70GiB'"),
        (["--compile-blocks", "layer.*"], "no module matches 'layer.*'"),
        (["--arg", "frozen=3"], "the blocks 'layers.*' gather no sharded parameters"),
    ],
)
def test_what_cannot_be_planned_in_blocks_is_an_error(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_blocks_save_rests_on_the_host_where_the_memory_needs_it(table):
    least = table.plans[0]
    value = 4 * ROWS * 2 * WIDTH  # the largest that a block saves
    memory = f"{least.peak_bytes - value}B"
    found = plan_step(request(stages=False, host_memory="1GiB", memory=memory))
    assert found.chosen.host_bytes in range(value, 5 * value, value)  # the last two move none
    assert least.peak_bytes - found.chosen.host_bytes <= found.chosen.peak_bytes
    lean = [each for each in found.plans if each.host_bytes]
    assert min(each.peak_bytes for each in lean) < found.chosen.peak_bytes
    assert all(each.peak_bytes <= each.limit_bytes for each in found.plans)
    text = plan_view(found).text()
    assert 'host_memory="1GiB")' in text
    assert "host: bytes of what blocks save" in text
    assert " host" in next(line for line in text.splitlines() if line.startswith("plan "))


def holding(layers=6, rows=1024, holds=False):
    """Blocks that recompute all, so each saves only what it gets."""
    model = Net(layers)
    for at, block in enumerate(model.layers):
        model.layers[at] = Recomputed(block)
    model.holds = holds
    return model, torch.ones(rows, WIDTH)


def test_inputs_of_blocks_rest_on_the_host_unless_something_holds_them():
    size = 1024 * WIDTH * 4
    plans = {}
    for holds in (False, True):
        asked = PlanRequest(
            f"{HERE}:holding",
            2,
            TARGET,
            compile_blocks="layers.*",
            stages=False,
            host_memory="1GiB",
            arguments={"holds": holds},
        )
        plans[holds] = plan_step(asked).plans
    # The caller holds the batch, and the last two blocks move nothing.
    assert max(each.host_bytes for each in plans[False]) == 3 * size
    assert {each.host_bytes for each in plans[True]} == {0}


def test_names_of_modules_are_escaped(table):
    hostile = replace(table, uncompiled={"\x1b[31m": 1 << 30}, blocks="\x1b[32m")
    assert "\x1b" not in plan_view(hostile).text()
