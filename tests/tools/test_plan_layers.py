"""Plans of a step with many equal layers, of which four are captured."""

import json

import pytest
from click.testing import CliRunner

from zpasses.errors import OptionError
from zpasses.tools.capture.captured_step import CaptureError
from zpasses.tools.cli.main import cli
from zpasses.tools.plan.plan_request import PlanRequest
from zpasses.tools.plan.step_plans import plan_step

NET = "tests.tools.test_plan_blocks:net"
TARGET = "h100,link_gb_s=20,launch_us=1,hop_us=1"


def request(layers=6, rows=4096, **more):
    arguments = {"layers": layers, "rows": rows}
    return PlanRequest(NET, 2, TARGET, arguments=arguments, host_memory="1GiB", **more)


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


@pytest.mark.parametrize("more", [("--compile-blocks", "layers.*"), ("--backwards-per-step", "2")])
def test_options_that_do_not_go_together_are_refused(more):
    ran = CliRunner().invoke(cli, ["plan", NET, "--repeat-layers", "layers", *more])
    assert ran.exit_code == 2
    assert f"{more[0]} does not go together with --repeat-layers" in ran.output


@pytest.mark.slow(quick="test_too_few_layers_are_refused")
def test_model_without_equal_layers_is_refused():
    with pytest.raises(CaptureError, match="the step has no 4 equal layers"):
        plan_step(PlanRequest(NET, 2, TARGET, arguments={"rows": 4, "frozen": 8}, repeat="frozen"))
