"""Plans of a whole device: the step, what rests beside it, and the states of the optimizer."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zpasses
from tests.tools.planning import table_of
from zpasses.cost.time.target import TARGETS
from zpasses.optim import state_plan
from zpasses.optim.expected_states import expected_layouts
from zpasses.optim.state_buckets import nbytes_of, plan_states
from zpasses.option_values import parse_size
from zpasses.testing import fake_world
from zpasses.tools.capture.captured_step import run_capture
from zpasses.tools.cli.main import cli
from zpasses.tools.plan import resting_bytes
from zpasses.tools.plan.plan_picture import plan_figure
from zpasses.tools.plan.plan_request import PlanRequest, optimizer_class, optimizer_of
from zpasses.tools.plan.plan_table import Resting
from zpasses.tools.plan.plan_view import plan_view
from zpasses.tools.plan.resting_bytes import RestingBytes, _state_sizes
from zpasses.tools.plan.step_plans import plan_step

BLOCKS = "tests.tools.test_plan:blocks"
NET = "tests.tools.test_plan_blocks:net"
TARGET = "h100,host_in_gb_s=1,host_out_gb_s=1"
MIB = 1 << 20


def request(**more):
    return PlanRequest(BLOCKS, 4, TARGET, optimizer="adamw", **more)


def placed(points, resting, device_memory, host=1 << 40, n=1):
    """A table whose plans have these peaks and times, on a device of this memory."""
    found = table_of(points, [(9, 1.0), (9, 1.0)])
    asked = request(device_memory=f"{device_memory}B", backwards_per_step=n)
    target = replace(TARGETS["h100"], host_in_gb_s=1.0, host_out_gb_s=1.0, host_memory_bytes=host)
    return resting.in_table(replace(found, chosen=found.plans[-1]), asked, target)


# --- which plan -----------------------------------------------------------------------------------
points_drawn = st.lists(
    st.tuples(st.integers(1, 400), st.floats(1.0, 1000.0)),
    min_size=1,
    max_size=6,
    unique_by=lambda each: each[0],
)


@given(points_drawn, st.lists(st.integers(1, 40), max_size=8), st.integers(0, 900))
def test_the_fastest_plan_with_the_optimizer_is_chosen_and_no_total_exceeds_the_device(
    points, sizes, device
):
    resting = RestingBytes(Resting(30, 20, sum(sizes), "AdamW"), tuple(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resting_bytes, "BUCKET_BYTES", 16)
        found = placed(sorted(points), resting, device)
        for each in found.plans:
            use = each.device
            assert use.states_on_host + use.resting_bytes == 50 + sum(sizes)
            assert use.total_bytes >= use.resting_bytes + each.peak_bytes
            assert use.fits == (use.total_bytes <= device)
            option = parse_size(use.device_bytes or f"{sum(sizes)}B", "device_bytes")
            rests = plan_states(sizes, option, 16)
            assert rests.device_bytes == use.resting_bytes - 50
    fitting = [each for each in found.plans if each.fits_device]
    if not fitting:
        assert found.chosen is None
        assert "the leanest plan takes" in found.reason
    else:
        least = min(each.total_us + each.device.optimizer_us for each in fitting)
        assert found.chosen.with_optimizer_us * 0.999 <= least
        assert found.chosen in fitting


MANY = RestingBytes(Resting(100 * MIB, 100 * MIB, 64 * MIB, "AdamW"), (MIB,) * 64)


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(resting_bytes, "BUCKET_BYTES", MIB)


@pytest.mark.usefixtures("small_buckets")
def test_a_richer_step_is_weighed_against_more_states_on_the_device():
    # 1 GB/s: 32 MiB of states cost 33.6 ms a step.
    points = [(100 * MIB, 200e3), (134 * MIB, 180e3), (135 * MIB, 160e3)]
    lean, _, rich = placed(points, MANY, 364 * MIB).plans
    assert (lean.device.states_on_host, lean.device.optimizer_us) == (0, 0.0)
    assert rich.device.states_on_host == 37 * MIB  # and two buckets in flight
    assert rich.device.optimizer_us == pytest.approx(37 * MIB / 1e3)
    found = placed(points, MANY, 364 * MIB)
    assert found.chosen is found.plans[2]
    assert found.offload_call == 'zpasses.offload_optimizer(optimizer, device_bytes="27MiB")'
    assert "It is the fastest that fits in 381681664B, with the copies of states." in found.reason
    assert "With 398 MiB, all states stay and it takes 180 ms." in found.reason
    slower = [(100 * MIB, 200e3), (134 * MIB, 180e3), (135 * MIB, 170e3)]
    found = placed(slower, MANY, 364 * MIB)
    assert found.chosen is found.plans[0]
    assert found.offload_call is None
    # Over two micro-batches, the states travel once.
    assert placed(slower, MANY, 364 * MIB, n=2).chosen.total_us == 170e3


@pytest.mark.usefixtures("small_buckets")
def test_what_does_not_fit_the_host_is_not_chosen():
    points = [(100 * MIB, 200e3), (135 * MIB, 100e3)]
    assert placed(points, MANY, 364 * MIB).chosen.total_us == 100e3
    assert placed(points, MANY, 364 * MIB, host=36 * MIB).chosen.total_us == 200e3


def test_table_page_and_json_show_what_the_device_holds():
    found = placed([(100 * MIB, 200e3), (2000 * MIB, 100e3)], MANY, 1 << 30)
    text = plan_view(found).text()
    for each in ("rests", "states out", "with optimizer", "2.21 GiB, too much", "264 MiB"):
        assert each in text
    assert "A rank has 100 MiB of shards, 100 MiB of gradients and 64 MiB of states of" in text
    shown = found.to_json()
    assert shown["plans"][1]["device"]["fits"] is False
    assert shown["resting"]["state_bytes"] == 64 * MIB
    labels = {line.get_label() for line in plan_figure(found).axes[0].get_lines()}
    assert "with the optimizer" in labels
    plain = table_of([(10, 5.0), (20, 3.0)], [(30, 4.0), (9, 6.0)])
    assert "device" not in plain.plans[0].to_json()
    assert "rests" not in plan_view(plain).text().splitlines()[2]


# --- what rests -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "ASGD", "RMSprop", "Rprop"])
def test_states_on_meta_are_those_of_real_parameters(name):
    real = [nn.Parameter(torch.ones(shape)) for shape in ((6, 5), (7,), (), (0, 3))]
    wanted = expected_layouts(optimizer_class(name)(real))
    meta = [each.detach().to("meta") for each in real]
    assert _state_sizes(optimizer_of(name), meta) == tuple(map(nbytes_of, wanted.values()))
    assert optimizer_class("adafactor") is zpasses.optim.Adafactor


@pytest.mark.parametrize(
    ("text", "per_value"),
    [
        ("SGD", 0),
        ("sgd,momentum=0.9", 4),
        ("sgd, momentum = 0.9, nesterov=True, dampening=0", 4),
        ("adamw,betas=(0.9, 0.95),amsgrad=True", 12),
        ("rmsprop,momentum=0.9,centered=True", 12),
    ],
)
def test_settings_of_an_optimizer_say_what_it_holds(text, per_value):
    meta = [torch.empty(6, 500, device="meta")]
    assert sum(_state_sizes(optimizer_of(text), meta)) // 3000 == per_value


@pytest.mark.parametrize(("name", "per_byte"), [("sgd", 3), ("sgd,momentum=0.9", 5), ("adamw", 7)])
def test_the_step_of_the_optimizer_takes_the_time_of_its_memory_traffic(name, per_byte):
    target = replace(TARGETS["h100"], memory_gb_s=1.0)
    asked = replace(request(backwards_per_step=2), optimizer=name, target="h100,memory_gb_s=1")
    with fake_world(2) as mesh:
        model = zpasses.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), mesh=mesh)
        model[0].requires_grad_(False)
        rest = RestingBytes.of(model, asked).resting
    assert rest.gradient_bytes == rest.shard_bytes / 2
    whole = target.kernel_us + per_byte * rest.gradient_bytes / 1e3
    assert rest.optimizer_us == pytest.approx(whole / 2, rel=1e-3)  # Adam also counts its steps


def test_the_call_that_is_printed_puts_the_states_where_the_plan_has_them():
    with fake_world(4) as mesh:
        model = zpasses.shard(nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))), mesh=mesh)
        resting = RestingBytes.of(model, request())
        optimizer = torch.optim.AdamW(model.parameters())
        rest = resting.resting
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resting_bytes, "BUCKET_BYTES", 256 << 10)
            room = rest.shard_bytes + rest.gradient_bytes + rest.state_bytes // 2
            found = placed([(600 << 10, 1e3)], resting, room + (1 << 20))
        use = found.chosen.device
        assert 0 < use.states_on_host < rest.state_bytes
        zpasses.offload_optimizer(optimizer, device_bytes=use.device_bytes, bucket_bytes="256KiB")
        plan = state_plan(optimizer)
        assert plan.host_bytes == use.states_on_host
        assert plan.total_bytes == rest.state_bytes
        held = rest.shard_bytes + rest.gradient_bytes + plan.device_bytes
        assert held == use.resting_bytes
        params = list(model.parameters())
        assert rest.shard_bytes == sum(each.to_local().nbytes for each in params)
        params[0].requires_grad_(False)
        frozen = RestingBytes.of(model, request()).resting
        assert frozen.gradient_bytes == rest.shard_bytes - params[0].to_local().nbytes
        assert frozen.shard_bytes == rest.shard_bytes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--optimizer", "adamx"], "got 'adamx'. Did you mean \"Adamax\""),
        (["--optimizer", "sgd,momentun=0.9"], "SGD has no setting 'momentun'. Did you mean"),
        (["--optimizer", "sgd,momentum=-1"], "--optimizer 'sgd,momentum=-1': Invalid momentum"),
        (["--optimizer", "sgd,momentum"], "cannot read 'momentum'; expected setting=value"),
        (["--device-memory", "1GiB"], "the states of --optimizer NAME, which must be given"),
        (["--optimizer", "sgd", "--device-memory", "1GiB", "--memory", "1GiB"], "must not"),
        (["--optimizer", "sgd", "--device-memory", "much"], "--device-memory: got 'much'"),
        (["--mesh", "auto", "--points", "3"], "--points counts the plans of one mesh"),
        (["--mesh", "auto", "--device-memory", "1GiB"], "--optimizer NAME, which must be given"),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_capture(given, said):
    ran = CliRunner().invoke(cli, ["plan", BLOCKS, "--world", "4", *given])
    assert ran.exit_code == 2, ran.output
    assert said in ran.stderr


# --- whole plans ----------------------------------------------------------------------------------
@pytest.mark.slow(quick="test_a_richer_step_is_weighed_against_more_states_on_the_device")
@pytest.mark.usefixtures("small_buckets")
def test_the_command_chooses_step_and_states_together(tmp_path):
    arguments = ["plan", BLOCKS, "--world", "4", "--target", "h100,tflops=2", "--points", "3"]
    arguments += ["--optimizer", "AdamW", "--device-memory", "40MiB"]
    page = tmp_path / "plans.html"
    ran = CliRunner().invoke(cli, [*map(str, arguments), "--html", str(page), "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    (chosen,) = (each for each in found["plans"] if each["chosen"])
    fitting = [each for each in found["plans"] if each["device"]["fits"]]
    assert chosen["with_optimizer_us"] * 0.999 <= min(each["with_optimizer_us"] for each in fitting)
    assert chosen["device"]["total_bytes"] <= 40 * MIB
    assert found["options"]["memory_budget"] == chosen["memory_budget"]
    # One plan is made for the budget up to which all states stay.
    corner = 40 * MIB - sum(found["resting"][key] for key in _RESTING)
    assert any(0.998 * corner <= each["limit_bytes"] <= corner for each in found["plans"])
    assert "with the optimizer" in page.read_text()
    ran = CliRunner().invoke(cli, [*map(str, arguments[:-1]), "1MiB"])
    assert ran.exit_code == 1, ran.output
    assert "No plan fits. --device-memory 1MiB: the leanest plan takes" in ran.output


_RESTING = ("shard_bytes", "gradient_bytes", "state_bytes")


@pytest.mark.slow(quick="test_states_on_meta_are_those_of_real_parameters")
def test_layers_that_are_repeated_rest_like_those_of_a_capture():
    captured = []
    asked = PlanRequest(NET, 2, "h100", arguments={"layers": 6}, optimizer="adamw")
    run_capture(asked.capture(lambda model: captured.append(RestingBytes.of(model, asked))))
    repeated = plan_step(replace(asked, repeat="layers", points=2))
    assert repeated.resting == captured[0].resting
    blocks = plan_step(replace(asked, compile_blocks="layers.*"))
    assert blocks.resting == captured[0].resting
    assert all(each.device is not None for each in blocks.plans)


@pytest.mark.slow(quick="test_a_richer_step_is_weighed_against_more_states_on_the_device")
@pytest.mark.parametrize(
    ("page", "section"),
    [
        ("memory-budget", "## Plan a step"),
        ("memory-budget", "### States and step in one plan"),
        ("meshes", "### Which shape"),
        ("equal-blocks", "**Plan it.**"),
    ],
)
def test_the_documented_command_prints_the_documented_plans(page, section, tmp_path):
    text = Path(f"docs/{page}.md").read_text()
    _, command, _, shown, *_ = text[text.index(section) :].split("```")
    command = command.replace("\\\n", " ").replace("plans.html", str(tmp_path / "plans.html"))
    ran = CliRunner().invoke(cli, shlex.split(command)[2:])
    assert ran.exit_code == 0, ran.output
    printed = [line.rstrip() for line in ran.output.splitlines()]
    for line in shown.strip().splitlines():
        assert line == "..." or line in printed
