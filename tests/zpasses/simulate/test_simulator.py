import gc
import operator
import weakref

import pytest
import torch
from torch import fx

from zpasses.testing import SimulationError, simulate

aten, F = torch.ops.aten, torch.ops._c10d_functional
wait = F.wait_tensor.default


def program(write, inputs=1):
    """Builds a graph by hand: `write(graph, *placeholders)` returns the outputs."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") for i in range(inputs)]
    graph.output(write(graph, *given))
    return fx.GraphModule(torch.nn.Module(), graph)


def awaited(graph, op, *args):
    return graph.call_function(wait, (graph.call_function(op, args),))


def communicate(op, *args):
    """Builds a graph that starts one collective on its input and awaits it."""
    return program(lambda graph, x: (awaited(graph, op, x, *args),))


SUM = communicate(F.all_reduce.default, "sum", "0")


def outputs(gm, *inputs, groups=None):
    return [run.outputs[0] for run in simulate(gm, [[value] for value in inputs], groups)]


def ranks(*values, dtype=torch.float32):
    return [torch.tensor(value, dtype=dtype) for value in values]


# --- what collectives compute ---------------------------------------------------------------------
def test_all_gather_stacks_the_ranks_rows():
    gather = communicate(F.all_gather_into_tensor.default, 3, "0")
    for got in outputs(gather, *ranks([1, 2], [3, 4], [5, 6])):
        assert got.tolist() == [1, 2, 3, 4, 5, 6]


def test_reduce_scatter_gives_each_rank_its_block_of_the_sum():
    reduce = communicate(F.reduce_scatter_tensor.default, "sum", 2, "0")
    got = outputs(reduce, *ranks([1, 2], [10, 20]))
    assert [each.tolist() for each in got] == [[11], [22]]


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 9), ("avg", 3), ("max", 6), ("min", 1), ("product", 12)]
)
def test_all_reduce_combines(op, expected):
    assert outputs(communicate(F.all_reduce.default, op, "0"), *ranks(1, 2, 6)) == [expected] * 3


def test_sums_are_taken_in_rank_order():
    big, small = 2.0**24, 1.0
    lost, *_ = outputs(SUM, *ranks(big, small, small))
    kept, *_ = outputs(SUM, *ranks(small, small, big))
    assert (lost.item(), kept.item()) == (big, big + 2)


def test_average_divides_after_the_sum():
    tiny = torch.finfo(torch.float32).smallest_normal * 2**-22
    (got, *_) = outputs(communicate(F.all_reduce.default, "avg", "0"), *ranks(*[tiny] * 4))
    assert got.item() == tiny


def test_broadcast_gives_all_ranks_the_sources_value():
    assert outputs(communicate(F.broadcast.default, 1, "0"), *ranks(1, 2, 3)) == [2, 2, 2]


def exchanging(sent, received):
    return communicate(F.all_to_all_single.default, sent, received, "0")


def test_all_to_all_exchanges_uneven_parts():
    graphs = [exchanging([1, 2], [1, 1]), exchanging([1, 0], [2, 0])]
    runs = simulate(graphs, [ranks([1, 2]), ranks([3, 4])])
    assert [run.outputs[0].tolist() for run in runs] == [[1, 3, 4], [2]]
    graphs = [exchanging([1, 1], [1, 1]), exchanging([2, 0], [1, 1])]
    message = r"rank 0 of the group sends 1 rows to rank (0|1, which expects 2)"
    with pytest.raises(SimulationError, match=message):
        simulate(graphs, [ranks([1, 2]), ranks([3, 4])])


def test_coalesced_collectives_give_a_list():
    def write(graph, a, b):
        started = graph.call_function(F.all_gather_into_tensor_coalesced.default, ([a, b], 2, "0"))
        return [awaited(graph, operator.getitem, started, i) for i in range(2)]

    runs = simulate(program(write, 2), [ranks([1], [2, 2]), ranks([3], [4, 4])])
    assert [each.tolist() for each in runs[1].outputs] == [[1, 3], [2, 2, 4, 4]]
    assert (len(runs[0].collectives), runs[0].nbytes) == (1, 12)


def test_out_form_writes_to_out_which_may_contain_its_input():
    def write(graph, buffer, mine):
        gather = F.all_gather_into_tensor_out.default
        started = graph.call_function(gather, (mine, 2, "0"), {"out": buffer})
        return (graph.call_function(wait, (started,)), buffer)

    buffers = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])]
    inputs = [[buffer, buffer[i : i + 1]] for i, buffer in enumerate(buffers)]
    runs = simulate(program(write, 2), inputs)
    assert [each.tolist() for run in runs for each in run.outputs] == [[1, 2]] * 4
    assert runs[0].outputs[0].data_ptr() == buffers[0].data_ptr()


def test_in_place_form_changes_its_input():
    values = ranks([1, 2], [3, 4])
    simulate(communicate(F.all_reduce_.default, "sum", "0"), [[value] for value in values])
    assert [value.tolist() for value in values] == [[4, 6], [4, 6]]


def test_outputs_of_ranks_do_not_alias():
    first, second = outputs(SUM, *ranks([1.0], [2.0]))
    first.zero_()
    assert second.item() == 3


def test_dialect_gathers_uneven_shards_and_splits_gradients_unevenly():
    unshard, reduce_grad = (
        getattr(torch.ops.zpasses, name).default for name in ("unshard", "reduce_grad")
    )

    def write(graph, shard, grad):
        rows = graph.call_function(aten.sym_size.int, (shard, 0))
        full = graph.call_function(unshard, (shard, 3, torch.float64, None, "0"))
        reduction = (grad, 3, rows, torch.float32, torch.float64, "0")
        return full, graph.call_function(reduce_grad, reduction)

    shards, grad = ranks([1, 2], [3]), torch.tensor([2.0, 4.0, 6.0])
    runs = simulate(program(write, 2), [[shards[0], grad], [shards[1], grad * 2]])
    assert [run.outputs[0].tolist() for run in runs] == [[1, 2, 3]] * 2
    assert [run.outputs[1].tolist() for run in runs] == [[3, 6], [9]]
    assert [each.dtype for each in runs[0].outputs] == [torch.float64, torch.float32]
    gm = program(lambda graph, x: (graph.call_function(unshard, (x, 3, None, None, "0")),))
    message = r"rank 0 of the group of 2 holds 1 of 3 rows; expected 2"
    with pytest.raises(SimulationError, match=message):
        simulate(gm, [ranks([1]), ranks([2, 3])])


# --- groups ---------------------------------------------------------------------------------------
def summed(*groups, op="sum"):
    """A graph that reduces over one group after another."""

    def write(graph, x):
        for group in groups:
            x = awaited(graph, F.all_reduce.default, x, op, group)
        return (x,)

    return program(write)


def test_groups_communicate_among_themselves():
    graphs = [summed(f"pair{rank % 2}", "all") for rank in range(4)]
    groups = {"pair0": (0, 2), "pair1": (1, 3), "all": range(4)}
    runs = simulate(graphs, [ranks(v) for v in (1, 2, 3, 5)], groups)
    assert [run.outputs[0].item() for run in runs] == [4 + 7 + 4 + 7] * 4


def test_second_group_has_the_ranks_of_its_group():
    assert outputs(summed("0.reductions"), *ranks(1, 2), groups={"0": (0, 1)}) == [3, 3]


def test_collectives_of_two_groups_may_start_in_different_orders_without_waits_in_between():
    def started(first, second):
        def write(graph, x):
            calls = {
                name: graph.call_function(F.all_reduce.default, (x, "sum", name))
                for name in (first, second)
            }
            return [graph.call_function(wait, (calls[name],)) for name in ("a", "b")]

        return program(write)

    graphs, groups = [started("a", "b"), started("b", "a")], {"a": (0, 1), "b": (0, 1)}
    runs = simulate(graphs, [ranks(1), ranks(2)], groups)
    assert [run.outputs for run in runs] == [(3, 3), (3, 3)]


# --- what is refused ------------------------------------------------------------------------------
def test_ranks_that_wait_for_each_other_are_named():
    graphs, groups = [summed("a", "b"), summed("b", "a")], {"a": (0, 1), "b": (0, 1)}
    message = r"not by rank 1, which waits at node .* on group 'b'"
    with pytest.raises(SimulationError, match=message):
        simulate(graphs, [ranks(1), ranks(2)], groups)


BROADCAST = communicate(F.broadcast.default, 0, "0")
SILENT = program(lambda graph, x: (x,))


@pytest.mark.parametrize(
    ("graphs", "inputs", "message"),
    [
        ([SUM, BROADCAST], ranks([1, 2], [1, 2]),
         r"collective 0 is all_reduce\(float32\[2\], reduce_op=sum\) on rank 0 \(node .*"
         r"broadcast\(.*on rank 1"),
        ([SUM] * 2, [torch.ones(2), torch.ones(3)], r"ranks disagree on group '0'"),
        ([SUM] * 2, [torch.ones(2), torch.ones(2, dtype=torch.float64)],
         r"ranks disagree on group '0'"),
        ([summed("0", op="sum"), summed("0", op="avg")], ranks(1, 2),
         r"reduce_op=sum\) on rank 0.*reduce_op=avg\) on rank 1"),
        ([SUM, SILENT, SUM], ranks(0, 1, 2),
         r"would hang.*started by rank 0 \(.*\), rank 2 \(.*\), but not by rank 1, which ended"),
        ([communicate(F.all_gather_into_tensor.default, 3, "0")] * 2, ranks([1], [2]),
         r"passes group_size=3, but the group has 2 ranks"),
        ([communicate(F.isend.default, 0, 0, "0")], ranks(1), r"isend.* is not simulated"),
        ([program(lambda graph, x: (graph.call_function(aten.mm.default, (x, x)),))],
         ranks([1, 2]), r"rank 0, node .*mm.*RuntimeError"),
        ([program(lambda graph, x, y: (x,), 2)], ranks(1), r"takes more inputs than were given"),
    ],
    ids=["op", "shape", "dtype", "reduction", "end", "size", "unknown", "failure", "input"],
)  # fmt: skip
def test_what_would_hang_or_fail_is_refused(graphs, inputs, message):
    with pytest.raises(SimulationError, match=message):
        simulate(graphs, [[value] for value in inputs])


def test_unknown_groups_and_ranks_outside_of_a_group_are_refused():
    with pytest.raises(SimulationError, match=r"group 'b'; the groups given are 'a'"):
        simulate(summed("b"), [ranks(1)], {"a": [0]})
    outside = r"rank 1, node all_reduce.*group 'a', whose ranks are \[0\]"
    with pytest.raises(SimulationError, match=outside):
        simulate(summed("a"), [ranks(1), ranks(2)], {"a": [0]})
    with pytest.raises(ValueError, match=r"got 1 graphs and the inputs of 2 ranks"):
        simulate([SUM], [ranks(1), ranks(2)])


def around(during, in_place=False, wanted=True):
    """A graph in which `during(graph, x, started)` runs while an all-reduce is running."""

    def write(graph, x):
        view = graph.call_function(aten.slice.Tensor, (x, 0, 0, 1))
        op = F.all_reduce_.default if in_place else F.all_reduce.default
        started = graph.call_function(op, (x, "sum", "0"))
        found = during(graph, view if in_place else x, started)
        return found, graph.call_function(wait, (started,)) if wanted else x

    return program(write)


def doubled(graph, value):
    return graph.call_function(aten.mul.Tensor, (value, 2))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (around(lambda graph, _, started: doubled(graph, started)),
         r"rank 0.*mul.*reads all_reduce.* before wait_tensor"),
        (around(lambda _, __, started: started, wanted=False), r"before wait_tensor"),
        (around(lambda _, x, __: x, wanted=False), r"all_reduce.* is never awaited"),
        (around(lambda graph, view, _: doubled(graph, view), in_place=True),
         r"reads or writes what the collective all_reduce_.* is writing"),
        (around(lambda graph, x, _: graph.call_function(aten.zero_.default, (x,))),
         r"writes to the input of the collective"),
    ],
    ids=["read", "return", "no wait", "buffer", "input"],
)  # fmt: skip
def test_races_are_refused(graph, message):
    with pytest.raises(SimulationError, match=message):
        simulate(graph, [ranks([1, 2])])


def test_reading_the_input_of_a_running_collective_is_fine():
    gm = around(lambda graph, x, _: doubled(graph, x))
    _, second = simulate(gm, [ranks([1]), ranks([2])])
    assert second.outputs == (4, 3)


# --- running --------------------------------------------------------------------------------------
def test_values_are_freed_at_their_last_use():
    seen, alive = [], []

    def remember(x):
        made = x + 1
        seen.append(weakref.ref(made))
        return made

    def look(x):
        gc.collect()
        alive.append(seen[-1]() is not None)
        return x * 2

    def write(graph, x):
        first = graph.call_function(remember, (x,))
        second = graph.call_function(aten.mul.Tensor, (first, 3))
        return (graph.call_function(look, (second,)),)

    simulate(program(write), [ranks(1)])
    assert alive == [False]


def test_each_rank_draws_its_own_random_numbers_whatever_the_others_do():
    draw = program(lambda graph, x: (graph.call_function(aten.rand_like.default, (x,)),))
    state, zeros = torch.get_rng_state(), [ranks([0, 0])] * 2
    first, again = (
        [run.outputs[0].tolist() for run in simulate(draw, zeros, seed=3)] for _ in range(2)
    )
    assert first == again
    assert first[0] != first[1]
    assert torch.equal(torch.get_rng_state(), state)


def test_semantics_of_further_collectives_can_be_passed():
    library = torch.library.Library("zpasses_test_simulate", "DEF")
    library.define("gather_twice(Tensor x, str group_name) -> Tensor")
    op = torch.ops.zpasses_test_simulate.gather_twice.default

    def gather_twice(inputs, calls):
        return [torch.cat([*inputs, *inputs]) for _ in inputs]

    runs = simulate(communicate(op, "0"), [ranks([1]), ranks([2])], semantics={op: gather_twice})
    assert [run.outputs[0].tolist() for run in runs] == [[1, 2, 1, 2]] * 2
    assert runs[0].collectives[0].op == "gather_twice"
