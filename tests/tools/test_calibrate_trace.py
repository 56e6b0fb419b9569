"""Figures of a target from measured runs."""

import pytest

from tests.zpasses.inspect.graphs import dump_of, graph_of, replace, two_gathers
from tests.zpasses.inspect.measured_runs import gloo_run, measured
from zpasses.cost.time.target import TARGETS, Target
from zpasses.tools.calibrate import main
from zpasses.tools.calibrate_trace import (
    TraceCollective,
    TraceFigures,
    fit_target,
    read_figures,
    target_from_run,
)

CPU = TARGETS["cpu"]
MB = 10**6


def collective(moved, launch=200.0, gb_s=2.0, rounds=1):
    return TraceCollective(rounds, moved, launch + rounds * CPU.hop_us + moved / (gb_s * 1e3))


def test_the_fit_recovers_the_figures_of_exact_times():
    exact = tuple(collective(size, rounds=rounds) for size in (MB, 9 * MB) for rounds in (1, 2))
    found = fit_target(CPU, TraceFigures(exact, (300.0, 100.0), (50.0, 100.0)))
    assert found.launch_us == pytest.approx(200, rel=1e-3)
    assert found.link_gb_s == pytest.approx(2, rel=1e-3)
    assert found.hop_us == CPU.hop_us
    assert found.tflops == pytest.approx(CPU.tflops / 3, rel=1e-3)
    assert found.memory_gb_s == pytest.approx(CPU.memory_gb_s * 2, rel=1e-3)
    assert Target.parse(str(found)) == found


def test_a_latency_below_that_of_the_hops_stays_positive():
    fast = tuple(
        TraceCollective(1, size, 5.0 + size / 2e3) for size in (MB / 100, MB / 10, 9.0 * MB)
    )
    found = fit_target(CPU, TraceFigures(fast))
    assert 0 < found.hop_us + found.launch_us == pytest.approx(5, rel=1e-2)


def test_times_that_do_not_rise_with_the_bytes_say_nothing_of_the_link(caplog):
    flat = (TraceCollective(1, MB, 900.0), TraceCollective(1, 9 * MB, 800.0))
    found = fit_target(CPU, TraceFigures(flat, (300.0, 100.0)))
    assert (found.link_gb_s, found.launch_us) == (CPU.link_gb_s, CPU.launch_us)
    assert found.tflops != CPU.tflops
    assert "do not rise with their bytes" in caplog.text


def test_the_fit_needs_two_sizes():
    with pytest.raises(ValueError, match="collectives of 1 size within a node; expected at least"):
        fit_target(CPU, TraceFigures((collective(MB), collective(MB))))


def with_sizes():
    graph = two_gathers(early=True)
    nodes = [
        replace(each, collective=replace(each.collective, full_bytes=size))
        if (size := {"gather_w": 64_000, "gather_v": 640_000}.get(each.name))
        else each
        for each in graph.nodes
    ]
    return dump_of(graph_of("forward", (None, replace(graph, nodes=tuple(nodes)))))


def test_the_figures_are_those_of_joined_nodes_of_the_rank_that_waited_least(tmp_path):
    late = [{**each, "dur": each["dur"] + 10} for each in gloo_run() if "recv" in each["name"]]
    slower = [each for each in gloo_run() if "recv" not in each["name"]] + late
    (tmp_path / "slower").mkdir()
    runs = [measured(tmp_path, gloo_run(), with_sizes())]
    runs.append(measured(tmp_path / "slower", slower, with_sizes()))
    for order in (runs, runs[::-1]):
        found = read_figures(order, CPU)
        assert [each.moved_bytes for each in found.collectives] == [32_000, 320_000]
        assert [each.time_us for each in found.collectives] == [140, 230]
        assert sum(found.arithmetic + found.memory) == 2 * (500 + 16)


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no trace-rank"):
        target_from_run(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--measured", "DIR"], "has no trace-rank"),
        (["--trace", "t.json"], "--trace needs --measured DIR"),
    ],
)
def test_the_command_says_what_it_lacks(tmp_path, capsys, arguments, said):
    with pytest.raises(SystemExit):
        main([str(tmp_path) if each == "DIR" else each for each in arguments])
    assert said in capsys.readouterr().err
