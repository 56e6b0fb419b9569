import json

import pytest

from zpasses import OptionError
from zpasses.cost.time.route_figures import calibrated_figures, machine_key, route_figures
from zpasses.cost.time.target import TARGETS
from zpasses.passes import Sdma

FIGURES = {"latency_us": 99.0, "gb_s": 300.0, "compute_slowdown": 1.1}


def written(path, architecture="gfx942", routes=("mori",), **versions):
    machine = {
        "architecture": architecture,
        "versions": versions,
        "routes": dict.fromkeys(routes, FIGURES),
    }
    path.write_text(
        json.dumps({"format": 1, "machines": {machine_key(architecture, versions): machine}})
    )
    return path


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_targets_have_figures_for_their_routes_and_say_where_they_are_from(target):
    figures = route_figures(target)
    assert set(figures) == {"c10d", *target.routes}
    for route, each in figures.items():
        assert each.source
        assert each.compute_slowdown >= 1
        assert ("uncalibrated" in each.source) == (target.name != "cpu")
        assert each.collective_slowdown >= 1
        assert route == "c10d" or each.compute_slowdown < figures["c10d"].compute_slowdown
        assert each.collective_slowdown <= figures["c10d"].collective_slowdown
        assert route == "c10d" or each.latency_us > figures["c10d"].latency_us
    assert route_figures(TARGETS["h100"]).get("mori") is None


def test_no_vendor_has_the_figures_of_another():
    sources = {
        name: {each.source for each in route_figures(target).values()}
        for name, target in TARGETS.items()
        if name != "cpu"
    }
    for name, found in sources.items():
        amd = name.startswith("mi")
        assert all(("MI300X" in source, "H100" in source) == (amd, not amd) for source in found)


def test_measured_figures_replace_priors_of_their_architecture(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "ZPASSES_CALIBRATION", str(written(tmp_path / "c.json", torch="2.13.0", mori="1.2.4"))
    )
    measured = route_figures(TARGETS["mi300x"]).get("mori")
    assert (measured.latency_us, measured.gb_s, measured.compute_slowdown) == (99.0, 300.0, 1.1)
    assert measured.source == "measured: gfx942 mori=1.2.4 torch=2.13.0"
    assert "uncalibrated" in route_figures(TARGETS["mi300x"]).get("c10d").source
    assert "uncalibrated" in route_figures(TARGETS["mi355x"]).get("mori").source
    assert set(route_figures(TARGETS["h100"])) == {"c10d", "nccl_zero", "symm_mem"}


def test_figures_of_this_torch_come_before_those_of_another(tmp_path, monkeypatch):
    path = written(tmp_path / "c.json", torch="0.1")
    content = json.loads(path.read_text())
    content["machines"] = {
        "mine": {
            "architecture": "gfx942",
            "versions": {"torch": "9.9"},
            "routes": {"mori": {**FIGURES, "gb_s": 1.0}},
        },
        **content["machines"],
    }
    path.write_text(json.dumps(content))
    monkeypatch.setattr("torch.__version__", "9.9")
    assert calibrated_figures(path, "gfx942")["mori"].gb_s == 1.0
    monkeypatch.setattr("torch.__version__", "0.1")
    assert calibrated_figures(path, "gfx942")["mori"].gb_s == 300.0


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 2, "machines": {}}', '{"format": 1, "machines": {"a": {}}}']
)
def test_an_error_names_a_file_that_is_not_a_calibration(tmp_path, monkeypatch, content):
    path = tmp_path / "c.json"
    path.write_text(content)
    monkeypatch.setenv("ZPASSES_CALIBRATION", str(path))
    with pytest.raises(
        OptionError,
        match=r"ZPASSES_CALIBRATION=.*c.json: .*Expected a file that `python -m zpasses.tools.calibrate` wrote",  # noqa: E501
    ):
        route_figures(TARGETS["mi300x"])
    monkeypatch.setenv("ZPASSES_CALIBRATION", str(tmp_path / "missing.json"))
    with pytest.raises(OptionError, match="No such file"):
        route_figures(TARGETS["mi300x"])


def test_uuid_of_the_pass_changes_with_the_calibration(tmp_path, monkeypatch):
    monkeypatch.setenv("ZPASSES_TARGET", "mi300x")
    before = Sdma().uuid()
    monkeypatch.setenv("ZPASSES_CALIBRATION", str(written(tmp_path / "c.json", torch="2.13.0")))
    assert Sdma().uuid() != before
