"""Plans of a step for every memory budget, from Python, as a command and as a page."""

import dataclasses
import itertools
import json
import re
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.tools.planning import WORLD, figures, point_of, table_of
from tests.zpasses.models import Blocks
from zpasses import MemoryBudgetError, compat
from zpasses.backend.step_trials import StepTrials
from zpasses.graph.tags import tagged
from zpasses.inspect.escape import one_line
from zpasses.inspect.units import bytes_text
from zpasses.pipeline.events import listen, observe_graphs
from zpasses.tools.capture.captured_step import CaptureRequest, run_capture
from zpasses.tools.cli.main import cli
from zpasses.tools.plan import plan_picture
from zpasses.tools.plan.plan_picture import plan_figure, plan_page
from zpasses.tools.plan.plan_request import PlanRequest
from zpasses.tools.plan.plan_table import not_dominated
from zpasses.tools.plan.plan_view import plan_view
from zpasses.tools.plan.step_plans import plan_step

HERE = "tests.tools.test_plan"


def blocks(rows=1024, layers=4):
    return Blocks(256, layers, 512), torch.ones(rows, 256)


@pytest.mark.slow(quick="test_the_dry_run_says_which_gathers_would_be_swapped_and_what_that_gains")
def test_the_plan_shows_what_copy_engines_gain_and_why():
    target = "mi300x,launch_us=0.01,hop_us=0.01,link_gb_s=2"
    request, trials = PlanRequest(f"{HERE}:blocks", WORLD, target, points=2), []
    with listen(StepTrials, trials.append):
        found = plan_step(request)
    # They weigh what a run weighs; a slow test compares the graphs.
    assert trials[0]._copy_engines
    names = [name for each in ("zero2", "zero3") for name in (f"{each}, no copy engines", each)]
    assert [each.name for each in found.stages] == names
    for without, stage in (found.stages[:2], found.stages[2:]):
        assert stage.total_us < without.total_us
        assert any(": by mori: " in each for each in stage.routes)
        assert not without.routes
    text, routes = plan_view(found).text(), found.chosen.routes
    said = rf"^Copy engines run \d+ of {len(routes)} launches of gathers:$"
    assert re.search(said, text, re.MULTILINE)
    assert routes[0] in text
    assert found.to_json()["plans"][0]["routes"] == found.plans[0].routes
    plain = plan_step(PlanRequest(f"{HERE}:blocks", WORLD, "h100", points=2))
    assert [each.name for each in plain.stages] == ["zero2", "zero3"]
    assert not any(each.routes for each in (*plain.stages, *plain.plans))


class LargeHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(32, 32), nn.Linear(32, 2048)

    def forward(self, x):
        return self.head(self.layer(x).relu()).logsumexp(-1).sum()


def large_head():
    return LargeHead(), torch.ones(1024, 32)


@pytest.mark.slow(quick="test_backward_holds_no_call_of_a_chunk_whatever_it_recomputes")
def test_plans_with_chunks_of_the_loss_compute_gradients_in_forward():
    request = PlanRequest(
        f"{HERE}:large_head", WORLD, "h100", points=2, pipeline="chunk-loss,zero3"
    )
    trials = []
    with listen(StepTrials, trials.append):
        found = plan_step(dataclasses.replace(request, stages=False))
    lean = found.plans[0]
    assert lean.chunks > 1
    graphs = trials[0].in_chunks(lean.chunks).trial(1.0).graphs
    calls = [sum(map(compat.is_subgraph_call, gm.graph.nodes)) for gm in graphs]
    assert calls == [lean.chunks, 0]


@pytest.mark.slow(quick="test_the_host_makes_room_and_each_copy_out_comes_back")
def test_a_plan_with_memory_of_the_host_shows_what_it_moves():
    fast = "h100,tflops=20,host_out_gb_s=200,host_in_gb_s=200"
    request = PlanRequest(f"{HERE}:blocks", WORLD, fast, points=2, host_memory="8MiB")
    found = plan_step(request)
    lean = found.plans[0]
    assert 0 < lean.host_bytes <= 8 << 20
    assert found.options_of(lean)["host_memory"] == "8MiB"
    text = plan_view(found).text()
    assert bytes_text(lean.host_bytes) in text
    assert "host: bytes of them that rest there" in text
    assert lean.to_json()["host_bytes"] == lean.host_bytes
    plain = plan_step(dataclasses.replace(request, host_memory=None))
    assert plain.plans[0].peak_bytes > lean.peak_bytes
    assert " host" not in plan_view(plain).text()
    with pytest.raises(MemoryBudgetError, match="has 1 GiB for each of its 8 ranks"):
        plan_step(
            dataclasses.replace(
                request, target=f"{fast},host_memory_bytes={1 << 30}", host_memory="2GiB"
            )
        )


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return x.relu()


def unused_parameters():
    return Unused(), torch.ones(2, 3, requires_grad=True)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def broken():
    return Broken(), torch.ones(4, 8)


@pytest.fixture(scope="module")
def table():
    return plan_step(PlanRequest(f"{HERE}:blocks", WORLD, "h100", points=5))


# --- plans ---------------------------------------------------------------------------------------
@pytest.mark.slow(quick="test_budget_chooses_the_fastest_plan_within_it")
def test_plans_go_from_lean_to_fast(table):
    assert 4 <= len(table.plans) <= 6
    for lean, fast in itertools.pairwise(table.plans):
        assert lean.peak_bytes < fast.peak_bytes
        assert lean.total_us > fast.total_us
    assert all(each.peak_bytes <= each.limit_bytes for each in table.plans)
    assert all(each.bound_us <= each.total_us for each in (*table.plans, *table.stages))
    assert all(each.least_us <= each.total_us for each in table.plans)
    assert table.plans[0].least_us > table.plans[-1].least_us
    assert table.plans[0].kept_bytes < table.plans[-1].kept_bytes
    assert table.plans[0].activations < table.plans[-1].activations == 1.0
    assert table.chosen is table.plans[-1]
    assert table.reason == "It is the fastest, whatever its memory. More memory gains nothing."


def compiled_graphs(layers, options, pipeline="zero3"):
    graphs = {}
    with observe_graphs(lambda seen: graphs.update({seen.kind: seen.graph})):
        run_capture(
            CaptureRequest(
                f"{HERE}:blocks",
                None,
                WORLD,
                arguments={"layers": layers},
                options={"pipeline": pipeline, **options},
            )
        )
    return graphs


def assert_same_figures(row, layers, options, pipeline="zero3"):
    """The launches, peaks and times of a compile with these options are those of the row."""
    graphs = compiled_graphs(layers, options, pipeline)
    for name in ("forward", "backward"):
        found = figures(graphs[name])
        assert {key: row[name][key] for key in found} == pytest.approx(found, abs=0.06)


@pytest.mark.slow(quick="test_budget_chooses_the_fastest_plan_within_it")
def test_options_of_plans_and_stages_lead_to_their_graphs(table):
    for point in table.plans:
        assert_same_figures(point.to_json(), 4, table.options_of(point))
    for point in table.stages:
        options = {"target": "h100", "recompute_elementwise": point.name == "zero3"}
        assert_same_figures(point.to_json(), 4, options, point.name)


@pytest.mark.slow(quick="tests/zpasses/cost/plan/test_kept_params.py")
def test_micro_batches_share_what_is_cached(table):
    """The fastest plan gathers once per step, so a micro-batch takes less time than alone."""
    request = PlanRequest(f"{HERE}:blocks", WORLD, "h100", points=3, backwards_per_step=4)
    repeated = plan_step(request)
    fastest, alone = repeated.plans[-1], table.plans[-1]
    assert alone.cached_bytes == 0 < fastest.cached_bytes
    assert fastest.total_us < alone.total_us
    assert fastest.graphs["forward"].exposed_us < 0.9 * alone.graphs["forward"].exposed_us
    assert fastest.peak_bytes <= fastest.limit_bytes
    assert repeated.options["backwards_per_step"] == 4
    forward = compiled_graphs(4, repeated.options)["forward"]
    marked = [tag.nbytes for _, tag in tagged(forward, "full") if tag.cached]
    assert marked
    assert "cached" in str(plan_view(repeated).parts)


def test_dominated_points_are_left_out():
    points = [point_of(*each) for each in [(5, 9), (1, 20), (3, 12), (3, 14), (6, 9), (4, 13)]]
    assert [(each.peak_bytes, each.total_us) for each in not_dominated(points)] == [
        (1, 20),
        (3, 12),
        (5, 9),
    ]


# --- the command ---------------------------------------------------------------------------------
def run(*arguments):
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)])


SMALL = ("--world", WORLD, "--target", "h100", "--points", 2, "--arg", "layers=2")


def test_budget_chooses_the_fastest_plan_within_it(tmp_path):
    page = tmp_path / "plans.html"
    done = run(f"{HERE}:blocks", *SMALL, "--memory", "20MiB", "--html", page, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    (chosen,) = [each for each in found["plans"] if each["chosen"]]
    assert chosen["memory_budget"] == "20MiB"
    assert chosen["limit_bytes"] == 20 << 20 >= chosen["peak_bytes"]
    assert found["options"] == {"memory_budget": "20MiB", "target": "h100"}
    assert found["reason"].startswith("It is the fastest within 20MiB. ")
    within = [each for each in found["plans"] if each["peak_bytes"] <= 20 << 20]
    assert chosen["total_us"] == min(each["total_us"] for each in within)
    assert_same_figures(chosen, 2, found["options"])
    (zero3,) = [each for each in found["stages"] if each["name"] == "zero3"]
    assert_same_figures(zero3, 2, {"target": "h100", "recompute_elementwise": True})
    page = page.read_text()
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    labels = {each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")}
    names = {"plan for a budget", "chosen plan", "zero2, no budget", "zero3, no budget"}
    numbers = map(str, range(1, len(found["plans"]) + 1))
    assert {*names, "bound of each plan", "budget 20MiB", *numbers} <= labels
    assert "least of each budget" in labels
    assert all(0 < each["least_us"] <= each["total_us"] for each in found["plans"])
    assert zero3["least_us"] is None


def test_a_pipeline_is_planned_as_it_is_compiled():
    encoded = "zero3{gather-params.encode=int8}"
    found = json.loads(run(f"{HERE}:blocks", *SMALL, "--pipeline", encoded, "--json").stdout)
    assert found["pipeline"] == found["options"]["pipeline"] == encoded
    assert_same_figures(found["plans"][-1], 2, found["options"])
    (stage,) = found["stages"]
    assert stage["name"] == "pipeline"
    assert_same_figures(stage, 2, {"pipeline": encoded, "target": "h100"})


@pytest.mark.slow(quick="test_too_small_budget_says_what_is_missing_and_what_holds_the_memory")
def test_budget_that_nothing_fits_says_what_is_missing():
    done = run(f"{HERE}:blocks", *SMALL, "--memory", "1MiB")
    assert done.exit_code == 1
    assert "No plan fits. memory_budget='1MiB': the leanest plan, which saves" in done.output
    assert "MiB more than the budget" in done.output
    assert "zero2, no budget" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.py:blocks"], "there is no file none.py; expected MODULE:FUNCTION"),
        ([f"{HERE}:block"], "has no function 'block'. Did you mean \"blocks\"?"),
        ([f"{HERE}:blocks", "--target", "h1000"], 'Did you mean "h100"'),
        ([f"{HERE}:blocks", "--memory", "much"], "--memory: got 'much'; expected how far the peak"),
        ([f"{HERE}:blocks", "--memory", "auto"], "expected a size such as '70GiB'"),
        ([f"{HERE}:blocks", "--world", 1], "got 1; expected at least 2 ranks"),
        ([f"{HERE}:blocks", "--pipeline", "zero2"], "expected passes that gather again"),
        ([f"{HERE}:blocks", "--pipeline", "zero4"], "no pass is called 'zero4'"),
        ([f"{HERE}:unused_parameters"], "gathers no sharded parameters"),
        ([f"{HERE}:broken"], "compiled as 2 graphs with sharded parameters; expected one"),
    ],
)
def test_what_cannot_be_planned_is_an_error(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_page_that_cannot_be_written_is_an_error(tmp_path):
    page = tmp_path / "none" / "plans.html"
    done = run(f"{HERE}:blocks", *SMALL, "--html", page)
    assert done.exit_code == 2
    assert f"cannot write {page}: there is no folder {page.parent}" in done.stderr
    with mock.patch.object(plan_picture.importlib.util, "find_spec", return_value=None):
        done = run(f"{HERE}:blocks", *SMALL, "--html", tmp_path / "plans.html")
    assert done.exit_code == 2
    assert 'pip install "zpasses[plot]"' in done.stderr


# --- the page ------------------------------------------------------------------------------------


def test_without_scipy_the_least_time_is_left_out_and_the_legend_says_what_to_install():
    found = table_of([(10, 3.0), (20, 2.0)], [(30, 4.0), (9, 6.0)])
    text = plan_view(found).text()
    assert 'For the least time of each budget: pip install "zpasses[plan]"' in text
    plans = tuple(dataclasses.replace(each, least_us=1.25) for each in found.plans)
    text = plan_view(dataclasses.replace(found, plans=plans, chosen=plans[-1])).text()
    assert "least: what no plan within the budget can beat" in text
    assert "zpasses[plan]" not in text
    assert text.count("1.25 us") == 2


def test_a_smaller_budget_with_a_faster_plan_is_named():
    found = table_of([(10, 3.0), (20, 5.0)], [(30, 4.0), (9, 6.0)], memory=20)
    assert "fastest" not in found.reason
    assert "A smaller one, memory_budget='10B', leads to a faster plan: 3" in found.reason
    found = table_of([(10, 5.0), (20, 3.0)], [(30, 4.0), (9, 6.0)], memory=20)
    assert found.reason.startswith("It is the fastest within 20B.")


HOSTILE = "</title><script>alert(1)</script>\u202e\x1b[31m.py:step"


def test_names_are_escaped():
    found = table_of([(10, 5.0), (20, 3.0)], [(30, 4.0), (9, 6.0)], function=HOSTILE)
    page = plan_page(found)
    assert "<script" not in page
    assert one_line(HOSTILE)[-20:] in page
    assert "\u202e" not in page + plan_view(found).text()
    assert "\x1b" not in plan_view(found).text()


points_drawn = st.tuples(st.integers(1 << 10, 1 << 40), st.floats(0.5, 1e8))


@settings(max_examples=20)
@given(
    st.lists(points_drawn, min_size=1, max_size=12, unique_by=lambda each: each[0]),
    st.tuples(points_drawn, points_drawn),
    st.none() | st.integers(1, 1 << 41),
)
def test_every_point_and_a_budget_that_is_near_are_in_the_picture(points, stages, memory):
    found = table_of(sorted(points), stages, memory)
    (axes,) = plan_figure(found).axes
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    marks = [line for line in axes.get_lines() if line.get_linestyle() == "None"]
    for x, y in (point for line in marks for point in line.get_xydata()):
        assert left < x < right
        assert bottom < y < top
    most = max(each.peak_bytes for each in (*found.plans, *found.stages))
    if memory is not None and memory <= most:
        (budget,) = [line for line in axes.get_lines() if line.get_label().startswith("budget")]
        assert left < budget.get_xdata()[0] < right
