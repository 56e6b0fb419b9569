"""Plans of a step with many equal layers, of which four are captured."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from tests.tools.equal_layers import WIDTH, Net
from zpasses.backend.partition_marks import mark_kept
from zpasses.backend.step_trials import StepTrials
from zpasses.errors import OptionError
from zpasses.graph.tags import tag_of, tagged
from zpasses.pipeline.events import listen
from zpasses.testing import capture_graphs
from zpasses.tools.capture.captured_step import CaptureError
from zpasses.tools.capture.mesh_shapes import AutoMesh, MeshShape
from zpasses.tools.cli.main import cli
from zpasses.tools.plan import equal_layers, layer_plans, step_plans
from zpasses.tools.plan.equal_layers import EqualPartitions
from zpasses.tools.plan.plan_request import PlanRequest
from zpasses.tools.plan.shape_table import ShapePoint, ShapeTable, shape_point, shape_view
from zpasses.tools.plan.step_plans import plan_shapes, plan_step

NET = "tests.tools.test_plan_blocks:net"
TARGET = "h100,link_gb_s=20,launch_us=1,hop_us=1"


def request(layers=6, rows=4096, **more):
    arguments = {"layers": layers, "rows": rows}
    return PlanRequest(NET, 2, TARGET, arguments=arguments, host_memory="1GiB", **more)


def adapted(layers, rows):
    net = Net(layers)
    for layer in net.layers:
        layer.up.requires_grad_(False)
    return net, torch.ones(rows, WIDTH)


OFF = 0.2
"""How far the time of an estimate may be from that of the captured step, as the docs say."""


@pytest.mark.slow(quick="test_further_layers_are_those_of_a_capture")
def test_estimates_of_six_layers_are_near_the_plans_of_a_capture():
    estimated = plan_step(request(repeat="layers", points=4))
    assert len(estimated.plans) > 2
    for each in estimated.plans:
        real = plan_step(request(memory=each.budget, points=2, stages=False)).chosen
        assert real is not None
        assert each.total_us == pytest.approx(real.total_us, rel=OFF)
        assert each.peak_bytes <= each.limit_bytes
        assert each.least_us <= min(each.total_us, real.total_us)


@pytest.mark.slow(quick="test_further_layers_are_those_of_a_capture")
def test_partitions_that_a_few_plans_rule_out_are_no_faster(monkeypatch):
    everything = request(repeat="layers", points=4)
    likely = plan_step(everything)
    monkeypatch.setattr(layer_plans, "_LIKELY", 1000)
    monkeypatch.setattr(layer_plans, "_GAIN", -1.0)
    for one, best in zip(likely.plans, plan_step(everything).plans, strict=True):
        assert one.total_us <= 1.01 * best.total_us


@pytest.mark.slow(quick="test_averages_over_replicas_follow_what_is_awaited_together")
def test_averages_over_replicas_count():
    target = "h100,ranks_per_node=2,network_gb_s=1,launch_us=1,hop_us=1"
    mesh = MeshShape.parse("replicate=2,shard=2")
    hybrid = replace(request(memory="100MiB", points=2), world=4, target=target, mesh=mesh)
    real = plan_step(replace(hybrid, stages=False)).chosen
    estimated = plan_step(replace(hybrid, repeat="layers")).chosen
    assert real is not None
    assert estimated is not None
    assert real.graphs["backward"].exposed_us > 100  # the averages
    assert estimated.total_us == pytest.approx(real.total_us, rel=OFF)


@pytest.mark.slow(quick="test_copies_of_gradients_to_the_host_follow_their_reductions")
@pytest.mark.parametrize("which", ["frozen", "all"])
def test_parameters_on_the_host_count(which):
    asked = replace(
        request(memory="100MiB", points=2, offload_parameters=which, stages=False),
        function="tests.tools.test_plan_layers:adapted",
        target=f"{TARGET},host_in_gb_s=4,host_out_gb_s=2",
    )
    real, estimated = plan_step(asked), plan_step(replace(asked, repeat="layers"))
    assert estimated.resting == real.resting
    assert real.resting.params_on_host > 0
    for kind, graph in real.chosen.graphs.items():
        assert estimated.chosen.graphs[kind].total_us == pytest.approx(graph.total_us, rel=OFF)


@pytest.mark.slow(quick="test_what_layers_save_is_found_once")
def test_meshes_have_the_plans_that_each_has_by_itself():
    everything = replace(request(repeat="layers"), world=4)
    found = plan_shapes(everything, AutoMesh(), lambda point: None)
    assert [each.mesh for each in found.points] == ["shard=4", "replicate=2,shard=2"]
    for each in found.points:
        one = replace(everything, mesh=MeshShape.parse(each.mesh), points=1, stages=False)
        alone = plan_step(one, device_bytes=found.device_bytes)
        assert each == shape_point(each.mesh, alone, found.device_bytes)
    assert "Estimated from 4 layers" in str(shape_view(found))


def test_what_layers_save_is_found_once(monkeypatch):
    searched, found = [], []
    search = equal_layers._equal_marks

    def counted(trials):
        searched.append(trials)
        return search(trials)

    monkeypatch.setattr(equal_layers, "_equal_marks", counted)
    partitions = EqualPartitions()

    def observe(trials):
        for _ in range(2):
            made = partitions.of(trials)
            found.append([[str(each.graph) for each in graphs] for graphs in made])

    with listen(StepTrials, observe):
        capture_graphs(Net(4), (torch.zeros(64, WIDTH),), world_size=2, pipeline="zero3")
    assert len(searched) == 1
    assert len(found) == 2
    assert found[0] == found[1]
    assert len(found[0]) > 1


def test_a_parameter_that_one_mesh_keeps_is_gathered_again_on_another():
    partitions, saved = EqualPartitions(), []

    def observe(trials):
        keeps = not saved
        if keeps:
            full = [node for node, _ in tagged(trials.gm.graph, "full")]
            mark_kept(full[len(full) // 2])
        for _, backward in partitions.of(trials):
            inputs = backward.graph.find_nodes(op="placeholder")
            roles = [tag.role for node in inputs if (tag := tag_of(node)) is not None]
            saved.append((keeps, roles.count("full")))

    for _ in range(2):  # of ranks of two stages of a pipeline, for example
        with listen(StepTrials, observe):
            capture_graphs(Net(4), (torch.zeros(64, WIDTH),), world_size=2, pipeline="zero3")
    assert len(partitions._marks) == 1
    assert set(saved) == {(True, 1), (False, 0)}


@pytest.mark.slow(quick="test_further_layers_are_those_of_a_capture")
def test_command_says_that_it_estimates():
    arguments = ("plan", NET, "--world", "2", "--target", TARGET, "--arg", "layers=40")
    ran = CliRunner().invoke(cli, [*arguments, "--repeat-layers", "layers", "--points", "2"])
    assert ran.exit_code == 0, ran.output
    assert "Estimated from 4 layers, with the same values saved in each." in ran.output
    ran = CliRunner().invoke(
        cli,
        [*arguments, "--repeat-layers", "layers", "--points", "2", "--json", "--memory", "1KiB"],
    )
    assert ran.exit_code == 1, ran.output
    assert "the leanest plan needs" in json.loads(ran.stdout)["reason"]


def test_number_of_layers_must_be_given():
    with pytest.raises(OptionError, match="as an argument of the function, such as --arg depth=80"):
        request(repeat="depth").check()
    with pytest.raises(OptionError, match="at least 4"):
        request(layers=3, repeat="layers").check()
    with pytest.raises(OptionError, match="in chunks does not go together with --repeat-layers"):
        request(layers=6, repeat="layers", pipeline="chunk-loss,zero3").check()


@pytest.mark.parametrize("more", [("--compile-blocks", "layers.*"), ("--backwards-per-step", "2")])
def test_options_that_do_not_go_together_are_refused(more):
    ran = CliRunner().invoke(cli, ["plan", NET, "--repeat-layers", "layers", *more])
    assert ran.exit_code == 2
    assert f"{more[0]} does not go together with --repeat-layers" in ran.output


@pytest.mark.slow(quick="test_too_few_layers_are_refused")
def test_model_without_equal_layers_is_refused():
    with pytest.raises(CaptureError, match="the step has no 4 equal layers"):
        plan_step(PlanRequest(NET, 2, TARGET, arguments={"rows": 4, "frozen": 8}, repeat="frozen"))


def test_meshes_of_repeated_layers_are_planned_from_the_command_line(monkeypatch):
    asked = []

    def plan(request, auto, progress):
        asked.append((request.repeat, request.arguments["layers"], auto))
        points = (ShapePoint("shard=4", None, "nothing fits", 1),)
        more = {"memory": None, "device_bytes": 1, "points": points, "repeated": 4}
        return ShapeTable("f", 4, "h100", given_target=None, backwards_per_step=1, **more)

    monkeypatch.setattr(step_plans, "plan_shapes", plan)
    arguments = ("plan", NET, "--world", "4", "--target", TARGET, "--arg", "layers=40")
    ran = CliRunner().invoke(cli, [*arguments, "--repeat-layers", "layers", "--mesh", "auto"])
    assert ran.exit_code == 1, ran.output
    assert asked == [("layers", 40, AutoMesh())]
    assert "Estimated from 4 layers, with the same values saved in each." in ran.output
