"""What Inductor's code takes beyond a plan counts within a budget, before code is made."""

import functools
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zpasses
import zpasses.backend.partitioner as partitioner
from tests.zpasses.cost.memory.allocations import write_no_kernels
from tests.zpasses.cost.memory.layers import TransposedNorm, stacked
from zpasses import compat
from zpasses.backend import step_trials
from zpasses.backend.counted_peaks import (
    _alike_between_operators,
    _in_order,
    _per_node,
    bytes_added,
)
from zpasses.backend.step_trials import StepTrials
from zpasses.cost.memory.code_memory import added_by_code, mark_added_by_code
from zpasses.cost.memory.liveness import bytes_within, liveness
from zpasses.graph.queries import copy_graph
from zpasses.pipeline.events import listen, observe_graphs
from zpasses.testing import fake_world

KIB = 1024


class KnownError(Exception):
    """Ends a compile."""


def compiled(model, batch, **options):
    """Compiles a step. Returns its graphs, and its peak by their liveness."""
    graphs, peaks = {}, [0]

    def keep(log):
        graphs.setdefault(log.kind, copy_graph(log.graph).graph)
        if log.kind in ("forward", "backward"):
            peaks.append(liveness(log.graph).peak_bytes)

    with fake_world(2) as mesh:
        zpasses.shard(model, mesh=mesh)
        step = torch.compile(
            model, backend="zpasses", options={"cache": False, "agreement": False, **options}
        )
        with observe_graphs(keep):
            step(*batch).square().mean().backward()
    return graphs, max(peaks)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), (torch.randn(32, 64),)


@pytest.mark.inductor
@pytest.mark.parametrize(("make", "copies"), [(TransposedNorm, True), (nn.Tanh, False)])
def test_copies_that_only_inductor_makes_are_found(make, copies):
    found = []

    def count(trials):
        graphs = trials.trial(1.0).graphs
        before = [liveness(gm.graph).peak_bytes for gm in graphs]
        patches = compat.within_planned_peak({}, bytes_within)
        added = bytes_added(graphs, trials.user_outputs, patches)
        for gm, sizes in zip(graphs, added, strict=True):
            mark_added_by_code(gm.graph, sizes)
        found.append((before, [liveness(gm.graph).peak_bytes for gm in graphs]))
        raise KnownError

    model, ((batch,), _) = stacked(make, layers=2)
    model = nn.Sequential(nn.Linear(batch.shape[1], batch.shape[1]), model)
    with listen(StepTrials, count), pytest.raises(Exception, match="Known"):
        compiled(model, (batch,), memory_budget="0%")
    ((before, after),) = found
    assert after[0] == pytest.approx(before[0], rel=0.01)
    assert (after[1] > 1.04 * before[1]) is copies
    assert after[1] < 1.5 * before[1]


def adding(nbytes, calls):
    """Counts these bytes more at the last node of each backward but its output."""

    def count(graphs, model_outputs, patches):
        calls.append(graphs)
        *_, last, output = graphs[1].graph.nodes
        return {}, {last.name: nbytes, output.name: nbytes}

    return count


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, False),
        ({"memory_budget": "64MiB"}, True),
        ({"memory_budget": "20%"}, True),
        ({"memory_budget": "64MiB", "codegen": "eager"}, False),
    ],
    ids=["without", "bytes", "percent", "eager"],
)
def test_code_is_counted_within_a_budget(options, counts, monkeypatch):
    calls = []
    monkeypatch.setattr(partitioner, "bytes_added", adding(0, calls))
    monkeypatch.setattr(compat, "inductor_codegen", lambda gm, *args: compat_eager(gm))
    compiled(*small(), **options)
    assert bool(calls) is counts


def compat_eager(gm):
    """Code that nothing compiles."""
    run = functools.partial(torch.fx.Interpreter(gm).run)

    def code(args):
        return run(*args)

    code._boxed_call = True
    return code


def test_plans_keep_what_code_takes_within_their_budget(monkeypatch):
    """Also the graph that passes and dumps see needs it."""
    monkeypatch.setattr(compat, "inductor_codegen", lambda gm, *args: compat_eager(gm))
    monkeypatch.setattr(partitioner, "bytes_added", adding(0, []))
    _, before = compiled(*small(), memory_budget="64MiB")
    monkeypatch.setattr(partitioner, "bytes_added", adding(512 * KIB, []))
    _, peak = compiled(*small(), memory_budget="64MiB")
    assert peak > before + 400 * KIB
    with pytest.raises(Exception, match=r"MemoryBudgetError.*needs \d+(\.\d)? KiB"):
        compiled(*small(), memory_budget=f"{peak - 128 * KIB}B")
    monkeypatch.undo()
    monkeypatch.setattr(compat, "inductor_codegen", lambda gm, *args: compat_eager(gm))
    compiled(*small(), memory_budget=f"{peak - 128 * KIB}B")


def test_a_plan_is_left_for_one_whose_code_fits(monkeypatch):
    """Code of the plan that saves all takes more; that of plans which recompute does not."""
    torch.manual_seed(0)
    layers = [each for _ in range(4) for each in (nn.Linear(64, 64), nn.GELU())]
    make = lambda: (nn.Sequential(*layers), (torch.randn(512, 64),))  # noqa: E731
    monkeypatch.setattr(compat, "inductor_codegen", lambda gm, *args: compat_eager(gm))
    first, peak = compiled(*make(), memory_budget="64MiB")
    saved = len(first["forward"].output_node().args[0])
    calls = []

    def count(graphs, model_outputs, patches):
        calls.append(len(graphs[0].graph.output_node().args[0]))
        memory = liveness(graphs[1].graph)
        return {}, ({memory.peak_node.name: 200 * KIB} if calls[-1] == saved else {})

    monkeypatch.setattr(partitioner, "bytes_added", count)
    layers[:] = [each for _ in range(4) for each in (nn.Linear(64, 64), nn.GELU())]
    leaner, needed = compiled(*make(), memory_budget=f"{peak + 64 * KIB}B")
    assert calls[0] == saved
    assert len(calls) >= 2
    assert needed <= peak + 64 * KIB
    assert sum(map(added_by_code, leaner["backward"].nodes)) == 0


@pytest.mark.inductor
@pytest.mark.parametrize("counted", [False, True], ids=["uncounted", "counted"])
def test_code_above_its_budget_is_told(counted, monkeypatch, caplog):
    """Plans count what code takes before it is made, and do not foresee all of it."""
    write_no_kernels(monkeypatch)
    monkeypatch.setattr(step_trials, "run_late", lambda graph: [])  # which makes room
    if not counted:
        monkeypatch.setattr(partitioner, "bytes_added", adding(0, []))
    model, (batch, _) = stacked(TransposedNorm)
    compiled(model, batch, memory_budget="0%", inductor={"fx_graph_cache": False})
    told = [each.message for each in caplog.records if "at its peak" in each.message]
    assert bool(told) is not counted
    if told:
        assert "code of backward takes" in told[0]
        assert "memory_budget='0%'" in told[0]


@pytest.mark.inductor
@pytest.mark.parametrize(
    "options",
    [
        {"memory_budget": "18MiB", "host_memory": "64MiB"},
        {"pipeline": "zero3{gather-params.encode=int8}", "memory_budget": "64MiB"},
        {"memory_budget": "64MiB", "zero_stage": 2},
    ],
    ids=["host", "encoded", "stage 2"],
)
def test_what_passes_move_counts_once(options, monkeypatch):
    """Code of these takes what its graphs show."""
    write_no_kernels(monkeypatch)
    torch.manual_seed(0)
    layers = [each for _ in range(4) for each in (nn.Linear(512, 512), nn.Tanh())]
    peaks = {}
    counted = []

    def count(*args, **kwargs):
        counted.append(bytes_added(*args, **kwargs))
        return counted[-1]

    def keep(log):
        graph = copy_graph(log.graph).graph
        peaks.setdefault(log.kind, []).append(liveness(log.graph).peak_bytes)
        mark_added_by_code(graph, {})
        peaks[log.kind].append(liveness(graph).peak_bytes)

    monkeypatch.setattr(partitioner, "bytes_added", count)
    with fake_world(2) as mesh, observe_graphs(keep):
        model = nn.Sequential(*layers)
        zpasses.shard(model, mesh=mesh)
        step = torch.compile(model, backend="zpasses", options={"cache": False, **options})
        step(torch.randn(2048, 512)).square().mean().backward()
    assert counted
    for kind in ("forward", "backward"):
        marked, plain = peaks[kind][:2]
        assert plain <= marked <= 1.005 * plain


def test_sizes_that_change_get_no_guards(monkeypatch):
    """Each lowering would guard some, and ranks count other plans."""
    found = []

    def count(*args, **kwargs):
        found.append(bytes_added(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(partitioner, "bytes_added", count)
    monkeypatch.setattr(compat, "inductor_codegen", lambda gm, *args: compat_eager(gm))
    model, (batch,) = small()
    torch._dynamo.mark_dynamic(batch, 0)
    compiled(model, (batch,), memory_budget="64MiB")
    assert set(found) == {None}


def step(call, live, is_kernel=True):
    return compat.CodeStep(call, is_kernel, live)


def chain(*names):
    graph = torch.fx.Graph()
    for name in names:
        graph.create_node("call_function", torch.sin, (), name=name)
    return list(graph.nodes)


def test_a_kernel_computes_no_node_after_what_runs_later():
    """It may be named after one that it only prepares, or be fused with a later one."""
    nodes = chain("a", "b", "c", "product", "d")
    steps = [step("c", 5), step("b", 3), step("product", 4, is_kernel=False), step("d", 2)]
    assert _per_node(nodes, steps) == [0, 5, 3, 4, 2]


def test_what_code_runs_elsewhere_places_nothing():
    """Here a wait, which the graph has early."""
    graph = torch.fx.Graph()
    started = graph.placeholder("started")
    graph.create_node(
        "call_function", torch.ops._c10d_functional.wait_tensor.default, (started,), name="wait"
    )
    for name in ("a", "b", "c"):
        graph.create_node("call_function", torch.sin, (), name=name)
    steps = [step("a", 5), step("wait", 1, is_kernel=False), step("c", 3)]
    assert _per_node(list(graph.nodes), steps)[2:] == [5, 1, 3]  # `b` is a part of another one
    steps = [step("c", 3), step("wait", 9, is_kernel=False), step("a", 5)]
    assert _per_node(list(graph.nodes), steps)[2:] == [5, 5, 5]


def test_between_two_steps_lives_what_both_leave():
    assert _per_node(chain("a", "b", "c", "d"), [step("a", 7), step("d", 4)]) == [7, 4, 4, 4]
    assert _per_node(chain("a", "b"), [step("a", 7), step("", 9)]) == [9, 9]
    assert _per_node(chain("a"), []) == [0]


def test_what_code_fills_at_the_end_moves_no_kernel_ahead():
    """The graph has the constant early."""
    nodes = chain("constant", "a", "b", "c")
    steps = [step("a", 5), step("b", 3), step("c", 2), step("constant", 4)]
    assert _per_node(nodes, steps) == [0, 5, 3, 4]


@given(st.lists(st.none() | st.integers(0, 7), max_size=10))
def test_as_many_places_as_possible_stay_in_order(places):
    found = _in_order(places)
    assert found == sorted(found)
    known = [each for each in places if each is not None]
    assert set(found) <= set(known or [0])
    orders = itertools.chain.from_iterable(
        itertools.combinations(known, size) for size in range(len(known) + 1)
    )
    longest = max(len(each) for each in orders if list(each) == sorted(each))
    assert sum(one == other for one, other in zip(found, places, strict=True)) >= longest


def test_kernels_between_operators_count_alike():
    steps = [step("a", 5), step("b", 3), step("product", 4, is_kernel=False), step("d", 2)]
    assert [each.live_bytes for each in _alike_between_operators(steps)] == [5, 5, 4, 2]


class Kernel:
    """A node of Inductor's scheduler."""

    scheduler = torch.nn.Module()  # of which no pass said what its peak may be

    def __init__(self, name, place, *needs):
        self.name, self.min_order = name, place
        self.unmet_dependencies = [Dependency(each) for each in needs]

    def get_buffer_names(self):
        return [self.name]


class Dependency:
    def __init__(self, name):
        self.name = name


def test_what_a_fused_kernel_needs_runs_in_the_order_of_the_graph():
    """Inductor sorts it by name."""
    from zpasses.compat.inductor_fused_order import FusedWithinPeak

    nodes = [
        Kernel("fused", 0, "buf101", "buf83"),
        Kernel("other", 1),
        Kernel("buf83", 2, "buf9"),
        Kernel("buf9", 3),
        Kernel("buf101", 4),
    ]
    ordered = [each.name for each in FusedWithinPeak(None, lambda call: 0)(nodes)]
    assert ordered == ["buf9", "buf83", "buf101", "fused", "other"]


def test_orders_that_form_a_circle_give_way():
    """A kernel never runs before what it reads is made."""
    from zpasses.compat.inductor_fused_order import FusedWithinPeak

    fused, reader = Kernel("fused", 1, "wait"), Kernel("reader", 0, "fused")
    wait = Kernel("wait", 2, "reader")
    ordered = FusedWithinPeak(None, lambda call: 0)
    assert ordered([fused, reader, wait]) == [fused, reader, wait]  # none can be first
    fused.unmet_dependencies[0].is_fake = True  # as the order of collectives
    assert ordered([fused, reader, wait]) == [fused, reader, wait]
    assert ordered([wait, reader, fused]) == [wait, reader, fused]
    fused.unmet_dependencies[0].mutating_buf = "zpasses_after_wait"
    assert ordered([wait, reader, fused]) == [fused, reader, wait]
