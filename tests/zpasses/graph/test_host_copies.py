"""Copies of saved values to the host and back: operators, rewritten graphs, and their order."""

import gc
import re

import pytest
import torch
from torch import fx
from torch._inductor.utils import run_and_get_code

from tests.streams import GraphBuilder, inputs_of, races_and_difference
from zpasses import compat
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.time.fused_kernels import use_fusion
from zpasses.errors import ZpassesError
from zpasses.graph.host_copies import (
    OFFLOAD,
    OFFLOAD_WAIT,
    RELOAD,
    RELOAD_WAIT,
    aligned,
    host_copy_of,
    is_on_host,
    offload_saved,
    offloadable_inputs,
    offloadable_values,
)
from zpasses.graph.queries import collective_of
from zpasses.graph.tags import Tag, add_tag
from zpasses.host.saved_arenas import host, loose

aten = torch.ops.aten
CPU = torch.device("cpu")


# --- operators ------------------------------------------------------------------------------------
VALUES = {
    "matrix": lambda: torch.randn(8, 6),
    "transposed": lambda: torch.randn(8, 6).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.randn(5, 7, dtype=torch.bfloat16),
    "scalar": lambda: torch.tensor(3.5),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_left_and_shares_no_memory(name):
    value, live = VALUES[name](), host.live
    copy = OFFLOAD_WAIT(OFFLOAD(value), value)
    back = RELOAD_WAIT(RELOAD(copy, CPU), copy, CPU)
    for each in (copy, back):
        assert torch.equal(each, value)
        assert each.stride() == value.stride()
        assert each.dtype == value.dtype
    assert len({each.data_ptr() for each in (value, copy, back)}) == 3
    assert host.live - live == value.numel() * value.element_size()
    del copy, each
    gc.collect()
    assert host.live == live


@pytest.mark.parametrize("name", VALUES)
def test_fake_values_are_as_the_real_ones(name):
    value = VALUES[name]()
    for op, args in ((OFFLOAD, ()), (RELOAD, (CPU,))):
        torch.library.opcheck(op, (value, *args), test_utils=("test_schema",))
        mode = compat.FakeTensorMode()
        with mode:
            fake = op(mode.from_tensor(value), *args)
        assert (fake.shape, fake.dtype, fake.device) == ((1,), torch.int64, CPU)
    host = OFFLOAD_WAIT(OFFLOAD(value), value)
    with mode:
        given = mode.from_tensor(value)
        fakes = OFFLOAD_WAIT(fake, given), RELOAD_WAIT(fake, given, CPU)
    for each in fakes:
        assert (each.shape, each.stride(), each.dtype) == (host.shape, host.stride(), host.dtype)


def test_host_memory_of_a_freed_value_serves_the_next():
    value = torch.randn(333)
    copy = OFFLOAD_WAIT(OFFLOAD(value), value)
    address, reserved = copy.data_ptr(), host.reserved
    del copy
    again = OFFLOAD_WAIT(OFFLOAD(value), value)
    assert (again.data_ptr(), host.reserved) == (address, reserved)
    del again
    before = host.reserved
    loose.release()
    assert host.reserved == before - aligned(4 * 333)


def test_a_copy_is_awaited_once_and_forgotten_if_nothing_awaits_it():
    value, live = torch.randn(100), host.live
    ticket = OFFLOAD(value)
    number = ticket.clone()
    OFFLOAD_WAIT(ticket, value)
    with pytest.raises(ZpassesError, match="awaited twice"):
        OFFLOAD_WAIT(number, value)
    ticket = OFFLOAD(value)
    assert host.live > live
    del ticket
    gc.collect()
    assert host.live == live


@pytest.mark.inductor
def test_inductor_keeps_the_order_and_frees_the_source_after_its_wait():
    def forward(x):
        y = x @ x
        ticket = OFFLOAD(y)
        z = (x.sin() @ x).relu() @ x
        host = OFFLOAD_WAIT(ticket, y)
        return (z @ x).sum(), host

    def backward(host, x):
        ticket = RELOAD(host, CPU)
        z = (x @ x).sin() @ x
        return (z * RELOAD_WAIT(ticket, host, CPU)).sum()

    x = torch.randn(64, 64)
    options = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    expected = forward(x)
    compiled = torch.compile(forward, options=options)
    found, (code,) = run_and_get_code(compiled, x)
    assert torch.equal(found[1], expected[1])
    lines = code[code.index("def call(") :].splitlines()

    def line(text):
        return next(at for at, each in enumerate(lines) if text in each)

    wait = line("offload_wait.default(")
    products = [at for at, each in enumerate(lines) if "extern_kernels.mm(" in each]
    assert line("offload.default(") < products[1] < products[2] < wait < products[3]
    source = lines[line("offload.default(")].partition("default(")[2].rstrip(")")
    assert wait < line(f"del {source}")
    reused = [each for each in lines[:wait] if f"= {source}; del" in each]
    assert not reused
    found, (code,) = run_and_get_code(torch.compile(backward, options=options), expected[1], x)
    lines = code[code.index("def call(") :].splitlines()
    products = [at for at, each in enumerate(lines) if "extern_kernels.mm(" in each]
    assert line("reload.default(") < products[0] < products[1] < line("reload_wait.default(")


# --- graphs ---------------------------------------------------------------------------------------
def names(*nodes):
    return [node.name for node in nodes]


def test_only_dense_values_of_forward_that_nothing_else_holds_may_leave():
    build = GraphBuilder("x", "y")
    x, y = build.inputs
    small = build.call(aten.sin.default, x)
    free = build.call(aten.mul.Tensor, small, y)
    twice = build.call(aten.cos.default, free)
    whole = build.call(aten.exp.default, twice)
    half = build.call(aten.slice.Tensor, whole, 0, 0, 2)
    base = build.call(aten.neg.default, x)
    view = build.call(aten.view.default, base, [8])
    turned = build.call(aten.t.default, build.call(aten.abs.default, x))
    mask = build.call(aten.gt.Scalar, twice, 0.0)
    unread = build.call(aten.sqrt.default, x)
    returned = build.call(aten.tan.default, x)
    saved = [small, free, twice, twice, half, base, view, turned, mask, unread, x, returned]
    fw = build.returns(returned, *saved)
    read = [each for each in dict.fromkeys(saved) if each is not unread]
    back = GraphBuilder(*names(*read))
    back.returns(*[back.call(aten.neg.default, node) for node in back.inputs])
    found = offloadable_values(fw.graph, back.graph, 1, least_bytes=1)
    assert names(*found) == names(small, free, turned)
    assert offloadable_values(fw.graph, back.graph, 1, least_bytes=33) == []


def drawn(seed):
    """A drawn forward and backward: backward reads what forward saves, in the reverse order."""
    generator = torch.Generator().manual_seed(seed)

    def below(n):
        return int(torch.randint(n, (1,), generator=generator))

    build = GraphBuilder("primals_1")
    values = [build.call(aten.sin.default, *build.inputs)]
    for _ in range(4 + below(5)):
        op = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor)[below(3)]
        values.append(build.call(op, values[below(len(values))], values[-1]))
        if below(3) == 0:
            values.append(build.call(aten.t.default, build.call(aten.t.default, values[-1])))
    saved = [each for each in values[:-1] if below(3)] or values[:1]
    fw = build.returns(values[-1], *saved)
    back = GraphBuilder(*names(*saved), "tangents_1")
    *inputs, grad = back.inputs
    for each in reversed(inputs):
        grad = back.call(aten.mul.Tensor, grad, each)
        if below(2):
            grad = back.call(aten.cos.default, grad)
    return fw, back.returns(grad)


def run(fw, bw, x):
    fw.recompile()
    bw.recompile()
    out, *saved = fw(x)
    return out, *bw(*saved, torch.ones_like(out))


@pytest.mark.parametrize("seed", range(25))
def test_drawn_graphs_with_values_on_the_host_have_the_same_bits(seed):
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(seed))
    expected = run(*drawn(seed), x)
    fw, bw = drawn(seed)
    found = offloadable_values(fw.graph, bw.graph, 1, least_bytes=1)
    chosen = names(*found[seed % 2 :])
    before = [liveness(each.graph).live_bytes for each in (fw, bw)]
    assert offload_saved(fw.graph, bw.graph, chosen, "test") == chosen
    assert all(map(torch.equal, run(fw, bw, x), expected))
    starts = [host_copy_of(node) for node in (*fw.graph.nodes, *bw.graph.nodes)]
    directions = [each.direction for each in starts if each is not None]
    assert directions == ["out"] * len(chosen) + ["in"] * len(chosen)
    assert not any(collective_of(node) for node in fw.graph.nodes)
    # Forward ends, and backward begins, with so much less on the device.
    after = [liveness(each.graph).live_bytes for each in (fw, bw)]
    assert before[0][-1] - after[0][-1] == 32 * len(chosen)
    assert before[1][0] - after[1][0] == 32 * len(chosen)
    for gm in (fw, bw):
        races, difference, _ = races_and_difference(gm, inputs_of(gm, 1), seeds=10)
        assert not races
        assert difference is None


def test_a_value_from_the_host_takes_memory_from_the_start_of_its_copy():
    build = GraphBuilder("saved", "tangents_1")
    saved, tangent = build.inputs
    started = build.call(RELOAD, saved, CPU)
    other = build.call(aten.sin.default, tangent)
    back = build.call(RELOAD_WAIT, started, saved, CPU)
    gm = build.returns(build.call(aten.mul.Tensor, other, back))
    assert is_on_host(saved)
    # tangent; + copy; + sin; - tangent; + product
    with use_fusion(False):
        live_bytes = liveness(gm.graph).live_bytes
    assert [each // 32 for each in live_bytes] == [1, 1, 2, 3, 2, 3, 1]


# --- order on streams -----------------------------------------------------------------------------
def _offloaded(build):
    x, y = build.inputs
    a = build.call(aten.sin.default, x)
    started = build.call(OFFLOAD, a)
    b = build.call(aten.cos.default, y)
    c = build.call(aten.add.Tensor, b, 1.0)
    host = build.call(OFFLOAD_WAIT, started, a)
    return a, started, b, c, host


def _overwrites_the_source(build, a, started, b, c, host):
    with build.graph.inserting_after(started):
        node = build.graph.call_function(aten.add_.Tensor, (a, 1.0))
    node.meta["val"] = a.meta["val"]
    return "writes to the input of the copy offload"


def _frees_the_source(build, a, started, b, c, host):
    host.args = (started, c)
    return "is the last to need a buffer that the copy offload"


def _never_waits(build, a, started, b, c, host):
    host.replace_all_uses_with(c)
    build.graph.erase_node(host)
    return r"offload_wait\(offload"


@pytest.mark.parametrize("fault", [_overwrites_the_source, _frees_the_source, _never_waits])
def test_a_copy_out_that_nothing_orders_is_refused_by_check_and_simulation(fault):
    for faulty in (False, True):
        build = GraphBuilder("x", "y")
        made = _offloaded(build)
        build.returns(made[-2], made[-1])
        text = fault(build, *made) if faulty else ""
        gm = torch.fx.GraphModule({}, build.graph)
        races, difference, _ = races_and_difference(gm)
        assert bool(races) == (difference is not None) == faulty
        if faulty:
            assert any(re.search(text, str(race)) for race in races)


@pytest.mark.parametrize("faulty", [False, True])
def test_a_host_value_that_is_freed_before_its_copy_has_ended_is_refused(faulty):
    build = GraphBuilder("saved", "tangents_1")
    saved, tangent = build.inputs
    started = build.call(RELOAD, saved, CPU)
    other = build.call(aten.sin.default, tangent)
    more = build.call(aten.cos.default, other)
    back = build.call(RELOAD_WAIT, started, other if faulty else saved, CPU)
    gm = build.returns(build.call(aten.mul.Tensor, more, back))
    races, difference, _ = races_and_difference(gm)
    assert bool(races) == (difference is not None) == faulty


# --- inputs that are saved ------------------------------------------------------------------------
def given_and_saved(saved, write=False, tagged=False):
    """Names of the inputs that may move, of a forward that saves some of its three inputs."""
    forward, backward, mode = fx.Graph(), fx.Graph(), compat.FakeTensorMode()
    with mode:
        values = [torch.empty(256, 256), torch.empty(256, 256), torch.empty(4, 4)]
    nodes = [forward.placeholder(f"given_{at}") for at in range(3)]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    if tagged:
        add_tag(nodes[0], Tag("shard", ("weight",), 1, origin="test"))
    if write:
        forward.call_function(aten.copy_.default, (nodes[0], nodes[2]))
    total = forward.call_function(aten.add.Tensor, (nodes[0], nodes[1]))
    total.meta["val"] = values[0] + values[1]
    forward.output((total, *[nodes[at] for at in saved]))
    read = [backward.placeholder(nodes[at].name) for at in dict.fromkeys(saved)]
    backward.output(tuple(backward.call_function(aten.neg.default, (each,)) for each in read))
    return [node.name for node in offloadable_inputs(forward, backward, 1)]


def test_inputs_that_forward_saves_may_move_unless_they_are_shards_small_or_written_to():
    assert given_and_saved([0, 1, 2]) == ["given_0", "given_1"]
    assert given_and_saved([1]) == ["given_1"]
    assert given_and_saved([0, 0, 1]) == ["given_1"]  # saved twice
    assert given_and_saved([0, 1], write=True) == ["given_1"]
    assert given_and_saved([0, 1], tagged=True) == ["given_1"]
