"""Plans of steps whose parameters rest on the host."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import zpasses
from tests.tools.planning import WORLD, figures
from tests.zpasses.models import Blocks
from zpasses import MemoryBudgetError, ZpassesError
from zpasses.graph.host_copies import host_copy_of
from zpasses.host.saved_arenas import gradients
from zpasses.optim import offload_params, parameter_plan, state_plan
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import fake_world
from zpasses.testing.step_graphs import capture_step
from zpasses.tools.capture.mesh_shapes import AutoMesh
from zpasses.tools.cli.main import cli
from zpasses.tools.plan.plan_request import PlanRequest
from zpasses.tools.plan.plan_view import plan_view
from zpasses.tools.plan.shape_table import shape_view
from zpasses.tools.plan.step_plans import plan_shapes, plan_step

HERE, NET = "tests.tools.test_plan_params", "tests.tools.test_plan_blocks:net"


class Adapted(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(256, 256, bias=False).requires_grad_(False)
        self.adapter = nn.Linear(256, 256, bias=False)

    def forward(self, x):
        return x + self.base(x).relu() + self.adapter(x)


def blocks(layers=2):
    return Blocks(256, layers, 512), torch.ones(1024, 256)


def adapted():
    return nn.Sequential(*(Adapted() for _ in range(3))), torch.ones(1024, 256)


def request(function="adapted", which="frozen", **more):
    given = {"target": "h100", "points": 2, **more}
    return PlanRequest(f"{HERE}:{function}", WORLD, offload_parameters=which, **given)


def compiled(function, which, options):
    """The graphs of a compile of the same model on real tensors, and where its parameters rest."""
    graphs = {}
    with (
        fake_world(WORLD) as mesh,
        observe_graphs(lambda seen: graphs.update({seen.kind: seen.graph})),
    ):
        model, x = globals()[function]()
        zpasses.shard(model, mesh=mesh)
        zpasses.offload_parameters(model, trained=which == "all")
        own = {"pipeline": "zero3", "cache": False}
        capture_step(model, x, options={**own, **options})
        return graphs, parameter_plan(model)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("function", "which"),
    [
        ("adapted", "frozen"),
        pytest.param(
            *("blocks", "all"),
            marks=pytest.mark.slow(quick="test_the_plan_is_that_of_a_compile[adapted-frozen]"),
        ),
    ],
)
def test_the_plan_is_that_of_a_compile(function, which):
    found = plan_step(request(function, which))
    for point in found.plans:
        graphs, rests = compiled(function, which, found.options_of(point))
        row = point.to_json()
        for name in ("forward", "backward"):
            wanted = figures(graphs[name])
            if name == "forward" and point.cached_bytes:  # its mean forward finds them gathered
                wanted = {"peak_bytes": wanted["peak_bytes"]}
            assert {key: row[name][key] for key in wanted} == pytest.approx(wanted, abs=0.06)
        assert found.resting.params_on_host == rests.host_bytes + rests.grad_bytes > 0
        assert found.resting.shard_bytes == rests.device_bytes
    copies = sum(host_copy_of(node) is not None for node in graphs["forward"].nodes)
    assert copies >= 3
    text = plan_view(found).text()
    grads = " and their gradients" if which == "all" else ""
    assert f"host: bytes of shards{grads} (" in text
    assert found.params_call in text
    assert found.to_json()["params_on_host"] == found.resting.params_on_host


def test_slower_copies_from_the_host_make_a_longer_step():
    plain = plan_step(request(which=None, points=2, stages=False))
    fast, slow = (
        plan_step(request(stages=False, target=f"h100,host_in_gb_s={rate}")) for rate in (400, 1)
    )
    assert plain.plans[0].total_us <= fast.plans[0].total_us < slow.plans[0].total_us
    assert "host" not in plan_view(plain).text()
    assert plain.resting.shard_bytes == fast.resting.shard_bytes + fast.resting.params_on_host
    with pytest.raises(MemoryBudgetError, match="192 KiB of shards and gradients are 192 KiB"):
        plan_step(request(target="h100,host_memory_bytes=1000"))


def test_with_the_optimizer_states_gradients_and_shards_travel():
    found = plan_step(request("blocks", "all", optimizer="adamw", stages=False))
    use, resting = found.plans[0].device, found.resting
    assert (resting.shard_bytes, resting.gradient_bytes, use.resting_bytes) == (0, 0, 0)
    assert found.offload_call == 'zpasses.offload_optimizer(optimizer, device_bytes="0B")'
    with fake_world(WORLD) as mesh:
        model, _ = blocks()
        zpasses.shard(model, mesh=mesh)
        zpasses.offload_parameters(model, trained=True)
        optimizer = zpasses.offload_optimizer(torch.optim.AdamW(model.parameters()))
        plan = state_plan(optimizer)
    assert use.states_on_host == plan.host_bytes == resting.state_bytes
    in_flight = plan.in_flight_bytes
    assert use.total_bytes == in_flight + max(in_flight, found.plans[0].peak_bytes)


def test_a_plan_takes_no_memory_of_the_host():
    with mock.patch.object(offload_params, "HostArena", side_effect=AssertionError):
        owed = gradients.promised
        plan_step(request("blocks", "all", stages=False))
        assert gradients.promised == owed


@pytest.mark.slow(quick="test_the_plan_is_that_of_a_compile[adapted-frozen]")
def test_blocks_rest_like_one_graph_and_wait_for_their_copies():
    asked = replace(request(which="all", stages=False), function=NET, arguments={"layers": 6})
    whole = plan_step(asked)
    asked = replace(asked, compile_blocks="layers.*")
    found = plan_step(asked)
    assert found.resting == whole.resting
    slow = plan_step(replace(asked, target="h100,host_in_gb_s=0.1,host_out_gb_s=0.1"))
    travel = 3 / 2 * whole.resting.params_on_host / 1e2  # shards twice, and gradients
    longer = slow.plans[-1].total_us - found.plans[-1].total_us
    assert longer == pytest.approx(travel, rel=0.1)


@pytest.mark.slow(quick="test_what_does_not_go_together_is_refused")
@pytest.mark.parametrize("which", ["frozen", "all"])
def test_each_mesh_is_planned_as_by_itself(which):
    asked = request(which=which, optimizer="adamw")
    found = plan_shapes(asked, AutoMesh.parse("auto"), lambda point: None)
    assert [each.mesh for each in found.points] == ["shard=4", "replicate=2,shard=2"]
    for point, shape in zip(found.points, AutoMesh.parse("auto").shapes(WORLD), strict=True):
        alone = plan_step(replace(asked, mesh=shape))
        assert alone.resting.params_on_host > 0
        assert point.total_bytes in [each.device.total_bytes for each in alone.plans]
        assert point.shard_bytes == alone.resting.shard_bytes
    assert "zpasses.offload_parameters(model" in str(shape_view(found))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["some"], "--offload-parameters: got 'some'; expected 'frozen', or"),
        (["all", "--mesh", "auto"], "goes together with --mesh auto only beside --optimizer"),
        (
            ["all", "--step-in-backward", "--compile-blocks", "auto", "--optimizer", "sgd"],
            "gradients of parameters on the host go there",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(given, said):
    given = ["--offload-parameters", *given]
    ran = CliRunner().invoke(cli, ["plan", f"{HERE}:blocks", "--world", "4", *given])
    assert ran.exit_code == 2, ran.output
    assert said in ran.stderr


def test_frozen_parameters_of_a_model_without_any_are_refused():
    with pytest.raises(ZpassesError, match="no parameter can move"):
        plan_step(request("blocks"))
