import pytest
import torch

from zpasses import compat
from zpasses.cost.memory.collective_memory import scratch_bytes
from zpasses.graph.queries import collective_of, collectives, value_of
from zpasses.ranks.compared_collectives import digest
from zpasses.sdma.ops import (
    SDMA_ALL_GATHER,
    SDMA_ALL_GATHER_COALESCED,
    SDMA_ALL_GATHER_OUT,
    SDMA_REDUCE_SCATTER,
)
from zpasses.testing import SimulationError, fake_world, simulate

FUNCTIONAL = torch.ops._c10d_functional.all_gather_into_tensor.default
wait = torch.ops._c10d_functional.wait_tensor


@pytest.fixture
def single_rank(one_rank):
    """The name of a real group of one rank."""
    return one_rank.get_group().group_name


def test_schemas_take_the_group_last():
    for op in (
        SDMA_ALL_GATHER,
        SDMA_ALL_GATHER_OUT,
        SDMA_ALL_GATHER_COALESCED,
        SDMA_REDUCE_SCATTER,
    ):
        positional = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
        assert positional[-1] == "group_name"
        assert ("all_gather" in op.name()) != ("reduce_scatter" in op.name())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_operators_pass_opcheck(single_rank, dtype):
    x = torch.ones(4, 3).to(dtype)
    torch.library.opcheck(SDMA_ALL_GATHER, (x, 1, single_rank))
    torch.library.opcheck(SDMA_ALL_GATHER, (x[0, 0], 1, single_rank))
    torch.library.opcheck(SDMA_ALL_GATHER_COALESCED, ([x, x[:1]], 1, single_rank))
    torch.library.opcheck(SDMA_REDUCE_SCATTER, (x, "sum", 1, single_rank))
    torch.library.opcheck(SDMA_ALL_GATHER_OUT, (x, 1, single_rank), {"out": torch.zeros_like(x)})


def test_fake_values_are_those_of_the_functional_collectives():
    with fake_world(4), compat.FakeTensorMode():
        x, scalar = torch.empty(6, 3, dtype=torch.bfloat16), torch.empty(())
        functional = torch.ops._c10d_functional
        pairs = [
            (SDMA_ALL_GATHER(x, 4, "0"), functional.all_gather_into_tensor(x, 4, "0")),
            (
                SDMA_ALL_GATHER_COALESCED([x, x], 4, "0")[1],
                functional.all_gather_into_tensor_coalesced([x, x], 4, "0")[1],
            ),
            (
                SDMA_REDUCE_SCATTER(torch.empty(8, 2), "avg", 4, "0"),
                functional.reduce_scatter_tensor(torch.empty(8, 2), "avg", 4, "0"),
            ),
        ]
        for ours, theirs in pairs:
            assert (ours.shape, ours.dtype, ours.device) == (
                theirs.shape,
                theirs.dtype,
                theirs.device,
            )
        assert SDMA_ALL_GATHER(scalar, 4, "0").shape == (4,)


def graph_of(ranks=2, waits=True):
    with fake_world(ranks):

        def fn(x):
            started = SDMA_ALL_GATHER(x * 2, ranks, "0")
            return wait(started) if waits else started

        with torch.no_grad():
            return compat.trace_aten(fn, [torch.ones(2, 3)])


def test_graphs_recognise_the_ops_as_collectives():
    gm = graph_of()
    with fake_world(2):
        (node,) = [node for node in gm.graph.nodes if node.target is SDMA_ALL_GATHER]
        collective = collective_of(node)
    assert (collective.op, collective.group, collective.shapes, collective.nbytes) == (
        "sdma_all_gather",
        "0",
        ((2, 3),),
        24,
    )
    assert value_of(node).shape == (4, 3)


def test_simulated_ranks_gather_and_require_waits():
    inputs = [[torch.full((2, 3), float(rank))] for rank in range(2)]
    for run in simulate(graph_of(), inputs):
        assert torch.equal(run.outputs[0], torch.cat([value * 2 for (value,) in inputs]))
    with pytest.raises(SimulationError, match="wait"):
        simulate(graph_of(waits=False), inputs)


def gathering(op):
    return lambda x: wait(op(x, 2, "0"))


def test_ranks_that_swap_different_gathers_are_refused_before_they_communicate():
    """The name of the op is part of what ranks compare."""
    with fake_world(2):
        mode = compat.FakeTensorMode()
        with mode:
            x = torch.empty(2, 3)
        graphs = [
            compat.trace_aten(gathering(op), [x]).graph for op in (SDMA_ALL_GATHER, FUNCTIONAL)
        ]
        sequences = [[each for _, each in collectives(graph)] for graph in graphs]
    assert digest(sequences[0]) != digest(sequences[1])
    assert [each.nbytes for each in sequences[0]] == [each.nbytes for each in sequences[1]]


def test_several_tensors_in_one_call_take_memory_for_packing():
    with fake_world(2):
        mode = compat.FakeTensorMode()
        with mode:
            x = torch.empty(2, 3)

        def fn(x):
            return [wait(each) for each in SDMA_ALL_GATHER_COALESCED([x, x], 2, "0")], wait(
                SDMA_ALL_GATHER(x, 2, "0")
            )

        nodes = [node for node, _ in collectives(compat.trace_aten(fn, [x]).graph)]
        assert [scratch_bytes(node) for node in nodes] == [48 + 96, 0]
