"""`zpasses plan --mesh auto`: the shapes of hybrid sharding side by side."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from zpasses.errors import OptionError
from zpasses.tools.capture.mesh_shapes import AutoMesh, MeshShape
from zpasses.tools.cli.main import cli
from zpasses.tools.plan.plan_table import DeviceUse, GraphFigures, PlanPoint, PlanTable, Resting
from zpasses.tools.plan.shape_table import ShapePoint, ShapeTable, shape_point, shape_view

HERE = "tests.tools.test_plan"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "world", "shapes"),
    [
        ("auto", 8, ["shard=8", "replicate=2,shard=4", "replicate=4,shard=2"]),
        ("auto", 6, ["shard=6", "replicate=2,shard=3", "replicate=3,shard=2"]),
        ("auto", 2, ["shard=2"]),
        ("auto,tp=4", 16, ["shard=4,tp=4", "replicate=2,shard=2,tp=4"]),
    ],
)
def test_auto_has_every_division_into_replicas_and_shards(text, world, shapes):
    found = AutoMesh.parse(text).shapes(world)
    assert [str(each) for each in found] == shapes
    assert [each.ranks for each in found] == [world] * len(shapes)
    assert [MeshShape.parse(str(each)) for each in found] == found


@pytest.mark.parametrize(
    ("text", "world", "message"),
    [
        ("auto", 1, "1 ranks, and 1 for"),
        ("auto,tp=8", 12, "12 ranks, and 8 for the dimensions of the model"),
        ("auto,tp=8", 8, "by at least 2"),
        ("automatic", 8, "expected auto, or auto,tp=8"),
        ("auto,replicate=2", 8, "leave out replicate|before shard"),
        ("auto,shard=2", 8, "stands twice"),
        ("auto,dp=2", 8, "several dimensions to shard over"),
    ],
)
def test_what_cannot_be_divided_is_refused(text, world, message):
    with pytest.raises(OptionError, match=message):
        AutoMesh.parse(text).shapes(world)


def plan_of(total_us, peak_bytes, budget="1GiB"):
    half = GraphFigures(total_us / 2, 0.0, total_us / 2, peak_bytes, 1)
    return PlanPoint("plan", budget, peak_bytes, {"forward": half, "backward": half}, 0, 0, 1.0)


def shapes_of(*points, **more):
    given = {"given_target": None, "memory": None, "device_bytes": 80 * GIB, **more}
    return ShapeTable("f", 8, "h100", backwards_per_step=1, points=points, **given)


def test_the_fastest_mesh_that_fits_is_chosen():
    full = ShapePoint("shard=8", plan_of(300.0, 10 * GIB), None, 2 * GIB)
    half = ShapePoint("replicate=2,shard=4", plan_of(200.0, 10 * GIB), None, 4 * GIB)
    most = ShapePoint("replicate=4,shard=2", plan_of(100.0, 60 * GIB), None, 8 * GIB)
    assert most.total_bytes == 84 * GIB
    found = shapes_of(full, half, most)
    assert found.chosen is half
    assert found.reason.endswith("replicate=4,shard=2 takes 100 us, and needs 84 GiB.")
    assert found.options == {"memory_budget": "1GiB"}
    rows = [line for line in str(shape_view(found)).splitlines() if "replicate=" in line]
    assert [line.split()[-1] for line in rows[:2]] == ["chosen", "device"]
    equal = ShapePoint("shard=8", plan_of(200.01, 10 * GIB), None, 2 * GIB)
    assert shapes_of(equal, half).chosen is equal  # less memory, and as fast


def test_the_fastest_mesh_with_the_copies_of_states_is_chosen():
    def mesh_of(name, total_us, optimizer_us, gib, fits=True):
        call = "1GiB" if optimizer_us else None
        device = DeviceUse(GIB, gib * GIB, 3 * GIB, optimizer_us, fits, call)
        return ShapePoint(name, replace(plan_of(total_us, GIB), device=device), None, GIB)

    full = mesh_of("shard=8", 300.0, 0.0, 10)
    half = mesh_of("replicate=2,shard=4", 200.0, 50.0, 20)
    most = mesh_of("replicate=4,shard=2", 100.0, 250.0, 20)
    found = shapes_of(full, half, most, mesh_of("shard=4", 9.0, 0.0, 20, fits=False), optimizer="x")
    assert found.chosen is half
    assert half.total_bytes == 20 * GIB
    text = str(shape_view(found))
    call = 'zpasses.offload_optimizer(optimizer, device_bytes="1GiB")'
    assert call in text
    assert "with optimizer" in text
    assert "with AdamW" not in text
    assert found.to_json()["offload_optimizer"] == call
    assert shapes_of(half, most, device_bytes=19 * GIB, optimizer="x").chosen is None
    plans = plans_of(*(each.plan for each in (full, half, most)))
    assert shape_point("shard=8", plans, 80 * GIB).plan is half.plan


def test_nothing_fits():
    large = ShapePoint("shard=8", plan_of(300.0, 90 * GIB), None, GIB)
    found = shapes_of(large)
    assert found.chosen is found.options is None
    assert "No mesh fits in the 80 GiB of a device of h100." in str(shape_view(found))
    none = shapes_of(ShapePoint("shard=8", None, "It needs 3 GiB more.", GIB), memory="1GiB")
    assert "None is chosen. It needs 3 GiB more." in str(shape_view(none))
    assert none.to_json()["shapes"][0]["total_bytes"] is None


def plans_of(*plans, memory=None, chosen=None):
    return PlanTable(
        "f", 8, "h100", None, 1, plans, (), memory, None, chosen, None, 0.0, resting=Resting(GIB)
    )


def test_a_mesh_has_its_fastest_plan_that_fits_in_a_device():
    lean, middle, fast = plan_of(300.0, 10 * GIB), plan_of(200.0, 20 * GIB), plan_of(100, 90 * GIB)
    plans = plans_of(lean, middle, fast, chosen=fast)
    assert shape_point("shard=8", plans, 80 * GIB).plan is middle
    assert shape_point("shard=8", plans, 100 * GIB).plan is fast
    assert shape_point("shard=8", plans, 8 * GIB).plan is lean
    budget = plans_of(lean, middle, memory="10GiB", chosen=lean)
    assert shape_point("shard=8", budget, 80 * GIB).plan is lean


@pytest.mark.slow(quick="the other tests of test_plan_shapes.py")
def test_the_command_plans_every_shape():
    arguments = ["--mesh", "auto", "--world", "4", "--target", "h100,ranks_per_node=2", "--json"]
    small = ["--arg", "rows=64", "--arg", "layers=1"]
    done = CliRunner().invoke(cli, ["plan", f"{HERE}:blocks", *arguments, *small])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    full, hybrid = found["shapes"]
    assert (full["mesh"], hybrid["mesh"]) == ("shard=4", "replicate=2,shard=2")
    # Gathers of the whole mesh cross the network, and those of a replica do not.
    assert hybrid["plan"]["forward"]["total_us"] < full["plan"]["forward"]["total_us"]
    assert hybrid["shard_bytes"] == 2 * full["shard_bytes"]
    for shape in (full, hybrid):
        assert shape["total_bytes"] == shape["plan"]["peak_bytes"] + 3 * shape["shard_bytes"]
    assert [each["chosen"] for each in found["shapes"]].count(True) == 1
    states = ["--optimizer", "adamw", "--device-memory", "10MiB"]
    done = CliRunner().invoke(cli, ["plan", f"{HERE}:blocks", *arguments, *small, *states])
    assert done.exit_code == 0, done.output
    for shape in json.loads(done.stdout)["shapes"]:
        assert shape["total_bytes"] == shape["plan"]["device"]["total_bytes"] <= 10 << 20
        assert shape["plan"]["device"]["resting_bytes"] == 4 * shape["shard_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--html", "plans.html"], "--html shows the plans of one mesh"),
        (["capture", "-o", "dump"], "cannot read 'auto'"),
    ],
)
def test_auto_has_no_picture_and_no_capture(arguments, said):
    done = CliRunner().invoke(cli, [*arguments, f"{HERE}:blocks", "--mesh", "auto"])
    assert done.exit_code == 2
    assert said in done.output
