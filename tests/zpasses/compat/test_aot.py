"""What the partitioner leaves to forward and backward."""

import operator
from concurrent.futures import ThreadPoolExecutor

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx
from torch._functorch import config as functorch_config
from torch._prims import rng_prims
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from zpasses import compat
from zpasses.compat.aot import _record_wrapped_values

aten = torch.ops.aten


def _module(graph):
    return fx.GraphModule({}, graph)


def _halves(views, *, also_input=False, change=False):
    """A forward that saves views of its input, and a backward that multiplies by them.

    Args:
        views: how many.
        also_input: whether it saves the input, too.
        change: whether it writes to the input.
    """
    forward, backward = fx.Graph(), fx.Graph()
    x, buffer = forward.placeholder("x"), forward.placeholder("buffer")
    saved = [buffer] if also_input else []
    value = buffer
    for _ in range(views):
        value = forward.call_function(aten.t.default, (value,))
    out = forward.call_function(aten.mm.default, (x, value))
    if change:
        forward.call_function(aten.copy_.default, (buffer, out))
    forward.output((out, *saved, value))
    places = [backward.placeholder(each.name) for each in (*saved, value)]
    grad = backward.placeholder("tangents_1")
    backward.output((backward.call_function(aten.mm.default, (grad, places[-1])), None))
    return _module(forward), _module(backward)


def _names(module):
    return [node.name for node in module.graph.find_nodes(op="placeholder")]


def test_an_input_is_saved_in_place_of_its_views():
    x, buffer, grad = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3)
    for views, also_input in ((1, False), (2, False), (1, True)):
        forward, backward = _halves(views, also_input=also_input)
        expected = backward(*forward(x, buffer)[1:], grad)[0]
        compat.save_inputs_of_views(forward, backward, 1)
        saved = forward(x, buffer)[1:]
        assert len(saved) == 1
        assert saved[0] is buffer
        assert _names(backward) == ["buffer", "tangents_1"]
        assert torch.equal(backward(*saved, grad)[0], expected)


def test_views_of_an_input_that_forward_changes_and_other_values_stay():
    for forward, backward in (_halves(1, change=True), _halves(0)):
        before = [str(each.graph) for each in (forward, backward)]
        compat.save_inputs_of_views(forward, backward, 1)
        assert [str(each.graph) for each in (forward, backward)] == before


def test_zeros_of_derivatives_become_memory_that_may_be_written_to():
    graph = fx.Graph()
    x = graph.placeholder("x")
    zeros = graph.call_function(
        aten._efficientzerotensor.default, ([3],), {"dtype": torch.float64, "device": "cpu"}
    )
    graph.output((x, zeros))
    compat.materialize_zeros(graph)
    made = _module(graph)(torch.ones(1))[1]
    made.add_(1)
    assert torch.equal(made, torch.ones(3, dtype=torch.float64))


def _joint():
    """A joint graph with its inputs, as AOTAutograd hands it to the partitioner."""
    found = []

    def keep(gm, inputs, **kwargs):
        found.append((compat.clone_graph_module(gm), list(inputs), kwargs))
        return compat.partition(gm, inputs, **kwargs)

    def boxed(gm, inputs):
        return make_boxed_func(gm.forward)

    def compiled(gm, inputs):
        return compat.aot_compile(gm, inputs, boxed, boxed, boxed, keep)

    torch.compiler.reset()
    weight, x = torch.randn(4, requires_grad=True), torch.randn(3, 4)
    step = torch.compile(lambda x: torch.tanh(x * weight).cos().sum(), backend=compiled)
    step(x).backward()
    expected = torch.autograd.grad(torch.tanh(x * weight).cos().sum(), weight)[0]
    assert torch.allclose(weight.grad, expected)
    return found[0]


def test_the_partitioner_makes_the_same_graphs_and_no_code(monkeypatch):
    gm, inputs, kwargs = _joint()
    with functorch_config.patch(cse=False):
        copied = compat.clone_graph_module(gm)
        torches = min_cut_rematerialization_partition(copied, inputs, compiler="inductor", **kwargs)
    written = []
    generate = fx.Graph.python_code
    monkeypatch.setattr(
        fx.Graph, "python_code", lambda *args, **more: written.append(1) or generate(*args, **more)
    )
    halves = compat.partition(gm, inputs, **kwargs)
    assert not written
    assert [str(each.graph) for each in halves] == [str(each.graph) for each in torches]
    assert halves[1].code == torches[1].code
    assert written


def test_other_threads_generate_code_beside_a_partition():
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    with compat.no_recompiles():
        assert not hasattr(_module(graph), "_code")
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(_module, graph).result()(3) == 3
    assert _module(graph)(3) == 3


def test_wrapped_operators_get_the_values_of_what_they_run():
    """Of a checkpoint: on a CPU with the state of the generator, and on accelerators without."""
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in ("query", "key", "value")]
    state = graph.placeholder("fwd_rng_state_0")
    wrappers = rng_prims.run_and_save_rng_state, rng_prims.graphsafe_run_with_rng_state
    saving = graph.call_function(wrappers[0], (attention, *operands, 0.0, True))
    states = graph.call_function(operator.getitem, (saving, 0))
    plain = graph.call_function(
        wrappers[1], (attention, *operands, 0.0, True), {"rng_state": state}
    )
    graph.output((saving, states, plain))
    with compat.FakeTensorMode(shape_env=ShapeEnv()) as mode:
        for each in operands:
            each.meta["val"] = torch.empty(2, 4, 128, 16)
        states.meta["val"] = mode.from_tensor(
            torch.get_rng_state(), symbolic_context=dynamic_in_all(1)
        )
    assert states.meta["val"]._has_symbolic_sizes_strides
    _record_wrapped_values(graph)
    shapes = [(2, 4, 128, 16), (2, 4, 128)]
    random_state, made = saving.meta["val"]
    assert [tuple(each.shape) for each in made] == shapes
    assert [tuple(each.shape) for each in plain.meta["val"]] == shapes
    assert random_state is states.meta["val"]
    assert random_state.nbytes == torch.get_rng_state().nbytes
    assert not compat.has_symbols(_module(graph))


def dynamic_in_all(dims):
    return StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * dims)
