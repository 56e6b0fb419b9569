import gc
import weakref

import pytest
import torch
from torch import fx

from zpasses.testing import SimulationError, simulate

F = torch.ops._c10d_functional
wait = F.wait_tensor.default


def program(write, inputs=1):
    """Builds a graph by hand: `write(graph, *placeholders)` returns the outputs."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") for i in range(inputs)]
    graph.output(write(graph, *given))
    return fx.GraphModule(torch.nn.Module(), graph)


def communicate(op, *args, **kwargs):
    """Builds a graph that starts one collective on its input and awaits it."""
    return program(
        lambda graph, x: (
            graph.call_function(wait, (graph.call_function(op, (x, *args), kwargs),)),
        )
    )


def outputs(gm, *inputs, groups=None):
    return [run.outputs[0] for run in simulate(gm, [[value] for value in inputs], groups)]


def ranks(*values, dtype=torch.float32):
    return [torch.tensor(value, dtype=dtype) for value in values]


# --- what collectives compute ---------------------------------------------------------------------
def test_all_gather_stacks_the_ranks_rows():
    for got in outputs(
        communicate(F.all_gather_into_tensor.default, 3, "0"), *ranks([1, 2], [3, 4], [5, 6])
    ):
        assert got.tolist() == [1, 2, 3, 4, 5, 6]


def test_reduce_scatter_gives_each_rank_its_block_of_the_sum():
    got = outputs(
        communicate(F.reduce_scatter_tensor.default, "sum", 2, "0"), *ranks([1, 2], [10, 20])
    )
    assert [each.tolist() for each in got] == [[11], [22]]


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 9), ("avg", 3), ("max", 6), ("min", 1), ("product", 12)]
)
def test_all_reduce_combines(op, expected):
    assert [
        each.item() for each in outputs(communicate(F.all_reduce.default, op, "0"), *ranks(1, 2, 6))
    ] == [expected] * 3


def test_sums_are_taken_in_rank_order():
    big, small = 2.0**24, 1.0
    (lost, _, _) = outputs(communicate(F.all_reduce.default, "sum", "0"), *ranks(big, small, small))
    (kept, _, _) = outputs(communicate(F.all_reduce.default, "sum", "0"), *ranks(small, small, big))
    assert (lost.item(), kept.item()) == (big, big + 2)


def test_average_divides_after_the_sum():
    tiny = torch.finfo(torch.float32).smallest_normal * 2**-22
    (got, *_) = outputs(communicate(F.all_reduce.default, "avg", "0"), *ranks(*[tiny] * 4))
    assert got.item() == tiny


def test_broadcast_gives_all_ranks_the_sources_value():
    assert [
        each.item() for each in outputs(communicate(F.broadcast.default, 1, "0"), *ranks(1, 2, 3))
    ] == [2, 2, 2]


def test_all_to_all_exchanges_uneven_parts():
    graphs = [
        communicate(F.all_to_all_single.default, [1, 2], [1, 1], "0"),
        communicate(F.all_to_all_single.default, [1, 0], [2, 0], "0"),
    ]
    runs = simulate(graphs, [ranks([1, 2]), ranks([3, 4])])
    assert [run.outputs[0].tolist() for run in runs] == [[1, 3, 4], [2]]


def test_all_to_all_with_parts_that_do_not_match_raises():
    graphs = [communicate(F.all_to_all_single.default, [1, 1], [1, 1], "0")] * 2
    graphs[1] = communicate(F.all_to_all_single.default, [2, 0], [1, 1], "0")
    with pytest.raises(
        SimulationError,
        match=r"rank 0 of the group sends 1 rows to rank 0|rank 0 of the group sends 1 rows to rank 1, which expects 2",  # noqa: E501
    ):
        simulate(graphs, [ranks([1, 2]), ranks([3, 4])])


def test_coalesced_collectives_give_a_list():
    def write(graph, a, b):
        started = graph.call_function(F.all_gather_into_tensor_coalesced.default, ([a, b], 2, "0"))
        import operator

        return [
            graph.call_function(wait, (graph.call_function(operator.getitem, (started, i)),))
            for i in range(2)
        ]

    runs = simulate(program(write, 2), [ranks([1], [2, 2]), ranks([3], [4, 4])])
    assert [each.tolist() for each in runs[1].outputs] == [[1, 3], [2, 2, 4, 4]]
    assert (len(runs[0].collectives), runs[0].nbytes) == (1, 12)


def test_out_form_writes_to_out_which_may_contain_its_input():
    def write(graph, buffer, mine):
        started = graph.call_function(
            F.all_gather_into_tensor_out.default, (mine, 2, "0"), {"out": buffer}
        )
        return (graph.call_function(wait, (started,)), buffer)

    buffers = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])]
    runs = simulate(
        program(write, 2), [[buffer, buffer[i : i + 1]] for i, buffer in enumerate(buffers)]
    )
    assert [each.tolist() for run in runs for each in run.outputs] == [[1, 2]] * 4
    assert runs[0].outputs[0].data_ptr() == buffers[0].data_ptr()


def test_in_place_form_changes_its_input():
    values = ranks([1, 2], [3, 4])
    simulate(communicate(F.all_reduce_.default, "sum", "0"), [[value] for value in values])
    assert [value.tolist() for value in values] == [[4, 6], [4, 6]]


def test_outputs_of_ranks_do_not_alias():
    first, second = outputs(communicate(F.all_reduce.default, "sum", "0"), *ranks([1.0], [2.0]))
    first.zero_()
    assert second.item() == 3


def test_dialect_gathers_uneven_shards_and_splits_gradients_unevenly():
    def write(graph, shard, grad):
        rows = graph.call_function(torch.ops.aten.sym_size.int, (shard, 0))
        full = graph.call_function(
            torch.ops.zpasses.unshard.default, (shard, 3, torch.float64, None, "0")
        )
        return full, graph.call_function(
            torch.ops.zpasses.reduce_grad.default,
            (grad, 3, rows, torch.float32, torch.float64, "0"),
        )

    shards = ranks([1, 2], [3], dtype=torch.float32)
    runs = simulate(
        program(write, 2),
        [[shard, torch.tensor([2.0, 4.0, 6.0]) * (rank + 1)] for rank, shard in enumerate(shards)],
    )
    assert [run.outputs[0].tolist() for run in runs] == [[1, 2, 3]] * 2
    assert [run.outputs[1].tolist() for run in runs] == [[3, 6], [9]]
    assert (runs[0].outputs[0].dtype, runs[0].outputs[1].dtype) == (torch.float64, torch.float32)


def test_dialect_refuses_a_rank_with_the_wrong_number_of_rows():
    gm = program(
        lambda graph, x: (
            graph.call_function(torch.ops.zpasses.unshard.default, (x, 3, None, None, "0")),
        )
    )
    with pytest.raises(
        SimulationError, match=r"rank 0 of the group of 2 holds 1 of 3 rows; expected 2"
    ):
        simulate(gm, [ranks([1]), ranks([2, 3])])


# --- groups ---------------------------------------------------------------------------------------
def test_groups_communicate_among_themselves():
    def write(graph, x):
        pair = graph.call_function(
            wait, (graph.call_function(F.all_reduce.default, (x, "sum", "pair")),)
        )
        return (
            graph.call_function(
                wait, (graph.call_function(F.all_reduce.default, (pair, "max", "all")),)
            ),
        )

    graphs = [program(write) for _ in range(4)]
    for rank, gm in enumerate(graphs):
        for node in gm.graph.nodes:
            if node.args and node.args[-1] == "pair":
                node.args = (*node.args[:-1], f"pair{rank % 2}")
    groups = {"pair0": (0, 2), "pair1": (1, 3), "all": range(4)}
    assert [
        run.outputs[0].item() for run in simulate(graphs, [ranks(v) for v in (1, 2, 3, 4)], groups)
    ] == [6] * 4


def test_second_group_has_the_ranks_of_its_group():
    gm = communicate(F.all_reduce.default, "sum", "0.reductions")
    assert outputs(gm, *ranks(1, 2), groups={"0": (0, 1)}) == [3, 3]


def test_collectives_of_two_groups_may_start_in_different_orders_without_waits_in_between():
    def started(first, second):
        def write(graph, x):
            calls = {
                name: graph.call_function(F.all_reduce.default, (x, "sum", name))
                for name in (first, second)
            }
            return [graph.call_function(wait, (calls[name],)) for name in ("a", "b")]

        return program(write)

    runs = simulate(
        [started("a", "b"), started("b", "a")], [ranks(1), ranks(2)], {"a": (0, 1), "b": (0, 1)}
    )
    assert [run.outputs for run in runs] == [(3, 3), (3, 3)]


def test_rank_outside_of_the_group_is_refused():
    with pytest.raises(
        SimulationError, match=r"rank 1, node all_reduce.*group 'a', whose ranks are \[0\]"
    ):
        simulate(communicate(F.all_reduce.default, "sum", "a"), [ranks(1), ranks(2)], {"a": [0]})


def test_unknown_group_names_the_known_ones():
    with pytest.raises(SimulationError, match=r"group 'b'; the groups given are 'a'"):
        simulate(communicate(F.all_reduce.default, "sum", "b"), [ranks(1)], {"a": [0]})


# --- what would hang ------------------------------------------------------------------------------
def test_another_op_on_one_rank_raises_and_names_both():
    graphs = [
        communicate(F.all_reduce.default, "sum", "0"),
        communicate(F.broadcast.default, 0, "0"),
    ]
    with pytest.raises(
        SimulationError,
        match=r"collective 0 is all_reduce\(float32\[2\], reduce_op=sum\) on rank 0 \(node .*broadcast\(.*on rank 1",  # noqa: E501
    ):
        simulate(graphs, [ranks([1, 2]), ranks([1, 2])])


@pytest.mark.parametrize(
    ("a", "b"),
    [(torch.ones(2), torch.ones(3)), (torch.ones(2), torch.ones(2, dtype=torch.float64))],
    ids=["shape", "dtype"],
)
def test_another_shape_or_dtype_raises(a, b):
    with pytest.raises(SimulationError, match=r"ranks disagree on group '0'"):
        simulate(communicate(F.all_reduce.default, "sum", "0"), [[a], [b]])


def test_another_reduction_raises():
    with pytest.raises(
        SimulationError, match=r"reduce_op=sum\) on rank 0.*reduce_op=avg\) on rank 1"
    ):
        simulate(
            [communicate(F.all_reduce.default, op, "0") for op in ("sum", "avg")],
            [ranks(1), ranks(2)],
        )


def test_rank_that_ends_early_is_named():
    silent = program(lambda graph, x: (x,))
    with pytest.raises(
        SimulationError,
        match=r"would hang.*started by rank 0 \(.*\), rank 2 \(.*\), but not by rank 1, which ended",  # noqa: E501
    ):
        simulate(
            [
                communicate(F.all_reduce.default, "sum", "0"),
                silent,
                communicate(F.all_reduce.default, "sum", "0"),
            ],
            [ranks(i) for i in range(3)],
        )


def test_ranks_that_wait_for_each_other_are_named():
    def one_by_one(first, second):
        def write(graph, x):
            for name in (first, second):
                x = graph.call_function(
                    wait, (graph.call_function(F.all_reduce.default, (x, "sum", name)),)
                )
            return (x,)

        return program(write)

    with pytest.raises(
        SimulationError, match=r"not by rank 1, which waits at node .* on group 'b'"
    ):
        simulate(
            [one_by_one("a", "b"), one_by_one("b", "a")],
            [ranks(1), ranks(2)],
            {"a": (0, 1), "b": (0, 1)},
        )


def test_wrong_group_size_is_refused():
    with pytest.raises(SimulationError, match=r"passes group_size=3, but the group has 2 ranks"):
        simulate(communicate(F.all_gather_into_tensor.default, 3, "0"), [ranks([1]), ranks([2])])


# --- what would race ------------------------------------------------------------------------------
def test_reading_before_the_wait_raises():
    def write(graph, x):
        started = graph.call_function(F.all_reduce.default, (x, "sum", "0"))
        doubled = graph.call_function(torch.ops.aten.mul.Tensor, (started, 2))
        return doubled, graph.call_function(wait, (started,))

    with pytest.raises(
        SimulationError, match=r"rank 0.*mul.*reads all_reduce.* before wait_tensor"
    ):
        simulate(program(write), [ranks(1), ranks(2)])


def test_returning_before_the_wait_raises():
    with pytest.raises(SimulationError, match=r"before wait_tensor"):
        simulate(
            program(lambda graph, x: (graph.call_function(F.all_reduce.default, (x, "sum", "0")),)),
            [ranks(1)],
        )


def test_collective_that_is_never_awaited_raises():
    def write(graph, x):
        graph.call_function(F.all_reduce.default, (x, "sum", "0"))
        return (x,)

    with pytest.raises(SimulationError, match=r"all_reduce.* is never awaited"):
        simulate(program(write), [ranks(1)])


def test_reading_a_buffer_that_a_collective_writes_raises():
    def write(graph, x):
        view = graph.call_function(torch.ops.aten.slice.Tensor, (x, 0, 0, 1))
        started = graph.call_function(F.all_reduce_.default, (x, "sum", "0"))
        doubled = graph.call_function(torch.ops.aten.mul.Tensor, (view, 2))
        return doubled, graph.call_function(wait, (started,))

    with pytest.raises(
        SimulationError, match=r"reads or writes what the collective all_reduce_.* is writing"
    ):
        simulate(program(write), [ranks([1, 2])])


def test_writing_to_the_input_of_a_running_collective_raises():
    def write(graph, x):
        started = graph.call_function(F.all_reduce.default, (x, "sum", "0"))
        graph.call_function(torch.ops.aten.zero_.default, (x,))
        return (graph.call_function(wait, (started,)),)

    with pytest.raises(SimulationError, match=r"writes to the input of the collective"):
        simulate(program(write), [ranks([1, 2])])


def test_reading_the_input_of_a_running_collective_is_fine():
    def write(graph, x):
        started = graph.call_function(F.all_reduce.default, (x, "sum", "0"))
        doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
        return doubled, graph.call_function(wait, (started,))

    assert simulate(program(write), [ranks(1), ranks(2)])[1].outputs == (4, 3)


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
        second = graph.call_function(torch.ops.aten.mul.Tensor, (first, 3))
        return (graph.call_function(look, (second,)),)

    simulate(program(write), [ranks(1)])
    assert alive == [False]


def test_node_that_fails_is_named():
    gm = program(lambda graph, x: (graph.call_function(torch.ops.aten.mm.default, (x, x)),))
    with pytest.raises(SimulationError, match=r"rank 0, node .*mm.*RuntimeError"):
        simulate(gm, [ranks([1, 2])])


def test_missing_input_is_reported():
    with pytest.raises(SimulationError, match=r"takes more inputs than were given"):
        simulate(program(lambda graph, x, y: (x,), 2), [ranks(1)])


def test_number_of_graphs_must_match_the_number_of_ranks():
    with pytest.raises(ValueError, match=r"got 1 graphs and the inputs of 2 ranks"):
        simulate([communicate(F.all_reduce.default, "sum", "0")], [ranks(1), ranks(2)])


def test_each_rank_draws_its_own_random_numbers_whatever_the_others_do():
    draw = program(lambda graph, x: (graph.call_function(torch.ops.aten.rand_like.default, (x,)),))
    state = torch.get_rng_state()
    first = [run.outputs[0] for run in simulate(draw, [ranks([0, 0]), ranks([0, 0])], seed=3)]
    again = [run.outputs[0] for run in simulate(draw, [ranks([0, 0]), ranks([0, 0])], seed=3)]
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
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


def test_collective_without_semantics_is_refused():
    gm = program(lambda graph, x: (graph.call_function(F.isend.default, (x, 0, 0, "0")),))
    with pytest.raises(SimulationError, match=r"isend.* is not simulated"):
        simulate(gm, [ranks(1)])
