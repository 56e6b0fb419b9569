import dataclasses
from types import SimpleNamespace

import pytest
import torch

import zpasses
from zpasses import OptionError
from zpasses.cost.time.route_figures import planned_routes
from zpasses.cost.time.target import TARGETS, Target, current_target, target_of, use_target
from zpasses.passes import GatherParams


@pytest.fixture(autouse=True)
def no_target_in_the_environment(monkeypatch):
    monkeypatch.delenv("ZPASSES_TARGET", raising=False)


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_is_found_by_its_name_and_says_where_its_figures_are_from(name):
    target = Target.parse(name)
    assert target is TARGETS[name] or target == TARGETS[name]
    assert target.source
    assert str(target) == name


def test_figures_can_be_changed():
    target = Target.parse("mi300x, network_gb_s = 25, link_gb_s=300")
    assert (target.network_gb_s, target.link_gb_s) == (25.0, 300.0)
    assert dataclasses.replace(target, network_gb_s=50.0, link_gb_s=448.0) == TARGETS["mi300x"]


@pytest.mark.parametrize(
    ("text", "out", "into"),
    [
        ("h200", 20.0, 20.0),
        ("h200,ranks_per_node=4", 40.0, 40.0),
        ("h200,ranks_per_node=1", 50.0, 50.0),
        ("h200,ranks_per_node=16", 20.0, 20.0),
        ("h200,ranks_per_node=1,host_in_gb_s=30", 50.0, 30.0),
        ("h200,ranks_per_node=1,host_alone=1.5", 30.0, 30.0),
        ("gh200,ranks_per_node=1", 170.0, 411.0),
        ("gb300,ranks_per_node=72", 183.0, 172.0),
    ],
)
def test_fewer_ranks_of_a_node_copy_to_the_host_faster(text, out, into):
    target = Target.parse(text)
    assert (target.host_out_gb_s, target.host_in_gb_s) == (out, into)
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    "text", ["h100", "mi300x,ranks_per_node=4,link_gb_s=300.0", "cpu,memory_bytes=1024"]
)
def test_text_of_a_target_round_trips(text):
    assert Target.parse(str(Target.parse(text))) == Target.parse(text)
    assert str(Target.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10", r"unknown target 'h10'. Did you mean \"h100\"\? Known: a100"),
        ("", r"unknown target ''"),
        (
            "h100,link_gbs=3",
            r"cannot read 'link_gbs=3'; expected figure=value. Did you mean \"link_gb_s\"\?",
        ),
        ("h100,link_gb_s", r"cannot read 'link_gb_s'; expected figure=value"),
        ("h100,name=x", r"cannot read 'name=x'"),
        ("h100,routes=mori", r"cannot read 'routes=mori'"),
        ("h100,link_gb_s=fast", r"target 'h100', 'link_gb_s': got 'fast' \(str\); expected float"),
        ("h100,ranks_per_node=2.5", r"'ranks_per_node': got '2.5' \(str\); expected int"),
        *(
            (f"h100,launch_us={n}", f"launch_us must be greater than 0, got {n}")
            for n in (0, -1, "nan")
        ),
    ],
)
def test_wrong_text_says_what_is_wrong(text, message):
    with pytest.raises(OptionError, match=message):
        Target.parse(text)


@pytest.mark.parametrize(
    ("device", "architecture", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "", "h100"),
        ("NVIDIA H200", "", "h200"),
        ("NVIDIA A100-SXM4-80GB", "", "a100"),
        ("AMD Instinct MI325X", "gfx942", "mi325x"),
        ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", "mi300x"),
        ("AMD Radeon Graphics", "gfx950:sramecc+", "mi355x"),
        ("AMD Radeon Graphics", "gfx942", "mi300x"),
        ("Something New", "", "h100"),
    ],
)
def test_devices_are_recognised_by_what_they_report(device, architecture, name):
    assert target_of(device, architecture).name == name


@pytest.mark.parametrize(
    ("units", "gib", "name"),
    [(304, 192, "mi300x"), (304, 256, "mi325x"), (228, 128, "mi300a"), (80, 192, "mi308x"),
     (0, 0, "mi300x")],
)  # fmt: skip
def test_gfx942_devices_are_distinguished_without_a_name(units, gib, name):
    assert target_of("AMD Radeon Graphics", "gfx942:sramecc+:xnack-", units, gib << 30).name == name


def test_targets_say_which_copy_engine_routes_they_have():
    assert zpasses.Target is Target
    for name in ("mi300x", "mi308x", "mi355x"):
        assert TARGETS[name].routes == ("mori", "nccl_zero", "symm_mem")
    routes = TARGETS["h100"].routes, TARGETS["cpu"].routes
    assert routes == (("nccl_zero", "symm_mem"), ())
    names = ("mi300a", "mi325x", "mi355x", "h100")
    architectures = [TARGETS[name].architecture for name in names]
    assert architectures == ["gfx942", "gfx942", "gfx950", "sm90"]


def test_environment_names_the_target(monkeypatch):
    monkeypatch.setenv("ZPASSES_TARGET", "b200,launch_us=3")
    assert current_target() == Target.parse("b200,launch_us=3")
    monkeypatch.setenv("ZPASSES_TARGET", "b20")
    with pytest.raises(OptionError, match="unknown target 'b20'"):
        current_target()


def test_a_process_without_an_accelerator_has_the_cpu_target(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert current_target().name == "cpu"


def test_a_compile_plans_for_its_own_target_only_while_it_lasts(monkeypatch):
    monkeypatch.setenv("ZPASSES_TARGET", "a100")
    with use_target(TARGETS["mi300x"]):
        assert current_target().name == "mi300x"
        with use_target(None):
            assert current_target().name == "a100"
    assert current_target().name == "a100"


def test_uuid_of_a_pass_changes_with_the_target(monkeypatch):
    uuids = set()
    for text in ("h100", "mi300x", "h100,launch_us=3"):
        monkeypatch.setenv("ZPASSES_TARGET", text)
        uuids.add(GatherParams().uuid())
        monkeypatch.delenv("ZPASSES_TARGET")
        with use_target(Target.parse(text)):
            uuids.add(GatherParams().uuid())
    assert len(uuids) == 3


@pytest.mark.parametrize("has_mori", [False, True])
@pytest.mark.parametrize("obstacle", [None, "NCCL 2.28"])
def test_a_detected_target_has_only_routes_that_this_machine_has(monkeypatch, has_mori, obstacle):
    device = SimpleNamespace(
        name="AMD Instinct MI300X",
        gcnArchName="gfx942:sramecc+:xnack-",
        multi_processor_count=304,
        total_memory=192 << 30,
    )
    monkeypatch.delenv("ZPASSES_TARGET", raising=False)
    for name, value in (
        ("is_available", True),
        ("current_device", 0),
        ("device_count", 8),
        ("get_device_properties", device),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if has_mori else None)
    monkeypatch.setattr("zpasses.compat.zero_sm_obstacle", lambda: obstacle)
    found = Target.detect()
    assert planned_routes(found) == (("mori",) if has_mori else ())
    assert ("nccl_zero" in found.routes) == (obstacle is None)
    assert "symm_mem" in found.routes
    assert Target.parse(str(found)) == dataclasses.replace(found, routes=TARGETS["mi300x"].routes)
    # A named target is planned for whatever is installed here.
    assert planned_routes(Target.parse("mi300x")) == ("mori",)
