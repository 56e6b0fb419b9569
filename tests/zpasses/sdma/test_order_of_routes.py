"""The routes of copy engines on simulated devices: their streams, events and kept memory order all
accesses, whatever the devices do first. Each test shows what happens without one of these.
"""

import pytest
import torch

from tests.simulated_routes import (
    SimulatedAllgather,
    SimulatedSymmMemory,
    record_ranks,
)
from zpasses import compat
from zpasses.sdma import mori_route, routes
from zpasses.sdma.mori_route import MoriRoute, _MoriState
from zpasses.sdma.symm_route import SymmRoute
from zpasses.testing.simulated_device import SimulatedStream

SEEDS = 60
wait = torch.ops._c10d_functional.wait_tensor


def part(rank, rows=4, turn=0):
    """A host tensor, also inside a device."""
    with compat.no_dispatch_modes():
        return _part(rank, rows, turn)


def _part(rank, rows, turn):
    return torch.arange(rows * 2.0).reshape(rows, 2) + 100 * rank + 1000 * turn


def whole(rows=4, turn=0):
    with compat.no_dispatch_modes():
        return torch.cat([_part(rank, rows, turn) for rank in (0, 1)])


# --- symmetric memory -----------------------------------------------------------------------------
def symm(device):
    return SymmRoute(SimulatedSymmMemory(device, 2))


def gather(device):
    """Gathers a value that nobody else holds, while compute goes on and takes new memory."""
    (full,) = symm(device).all_gather([device.put(part(device.rank)) * 2], 2, "0")
    other = torch.ones(4, 2) + 1
    return [wait(full) + 0, other]


def gather_out(device):
    out = torch.empty(8, 2)
    symm(device).all_gather_out(device.put(part(device.rank)) * 2, 2, "0", out)
    other = torch.ones(4, 2) + 1
    return [wait(out) + 0, other]


def reduce_scatter(device):
    given = device.put(whole()) * (device.rank + 1)
    reduced = symm(device).reduce_scatter(given, "sum", 2, "0")
    del given
    other = torch.ones(8, 2) + 1
    return [wait(reduced) + 0, other]


EXPECTED = {
    gather: lambda rank: whole() * 2,
    gather_out: lambda rank: whole() * 2,
    reduce_scatter: lambda rank: (whole() * 3)[4 * rank : 4 * rank + 4],
}
for_each_program = pytest.mark.parametrize("program", EXPECTED, ids=lambda each: each.__name__)


@for_each_program
def test_symmetric_memory_gives_the_same_in_every_order(program):
    schedule = record_ranks(2, program)
    for seed in range(SEEDS):
        for rank, (result, other) in enumerate(schedule.run(seed).outputs):
            assert torch.equal(result, EXPECTED[program](rank)), seed
            assert other.eq(2).all()


def without_keep(patch):
    patch.setattr(SimulatedStream, "keep", lambda stream, tensor: None)


def without_wait(patch):
    patch.setattr(routes.SideStreamWork, "wait", lambda work, timeout=None: True)


def without_follow(patch):
    patch.setattr(SimulatedStream, "follow_current", lambda stream: None)


@for_each_program
@pytest.mark.parametrize("broken", [without_keep, without_wait, without_follow])
def test_symmetric_memory_needs_each_of_its_orders(monkeypatch, program, broken):
    broken(monkeypatch)
    schedule = record_ranks(2, program)
    if (program, broken) == (gather_out, without_keep):
        return  # its own Work keeps the source
    assert schedule.first_difference(SEEDS) is not None


# --- mori -----------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def no_calls_before(monkeypatch):
    monkeypatch.setattr(MoriRoute, "_calls_started", 0)


def mori(device, handles=2, capacity=1 << 20):
    MoriRoute._calls_started = 0  # the ranks are one process here
    made = tuple(SimulatedAllgather(device, number, 2) for number in range(handles))
    return MoriRoute(_MoriState((0, 1), capacity, None, made, device.stream("mori")))


def mori_single(device):
    (full,) = mori(device).all_gather([device.put(part(device.rank)) * 2], 2, "0")
    other = torch.ones(4, 2) + 1
    return [wait(full) + 0, other]


def mori_pack(device):
    given = [device.put(part(device.rank, rows)) * 2 for rows in (4, 3)]
    fulls = mori(device).all_gather(given, 2, "0")
    del given
    other = torch.ones(4, 2) + 1
    return [*(wait(full) + 0 for full in fulls), other]


def mori_pieces(device):
    """More bytes than fit in a call."""
    (full,) = mori(device, capacity=16).all_gather([device.put(part(device.rank)) * 2], 2, "0")
    return [wait(full) + 0]


def mori_out(device):
    out = torch.empty(8, 2)
    mori(device).all_gather_out(device.put(part(device.rank)) * 2, 2, "0", out)
    return [wait(out) + 0]


MORI = {
    mori_single: [whole() * 2],
    mori_pack: [whole() * 2, torch.cat([part(0, 3), part(1, 3)]) * 2],
    mori_pieces: [whole() * 2],
    mori_out: [whole() * 2],
}
for_each_mori = pytest.mark.parametrize("program", MORI, ids=lambda each: each.__name__)


@for_each_mori
def test_mori_gives_the_same_in_every_order(program):
    schedule = record_ranks(2, program)
    for seed in range(SEEDS):
        for outputs in schedule.run(seed).outputs:
            for got, expected in zip(outputs, MORI[program], strict=False):
                assert torch.equal(got, expected), seed


def without_needs(patch):
    made = routes.SideStreamWork.__init__
    patch.setattr(
        routes.SideStreamWork, "__init__", lambda work, event, needs: made(work, event, ())
    )


@for_each_mori
@pytest.mark.parametrize("broken", [without_needs, without_wait, without_follow])
def test_mori_needs_each_of_its_orders(monkeypatch, program, broken):
    broken(monkeypatch)
    assert record_ranks(2, program).first_difference(SEEDS) is not None


def in_turn(handles, calls=4):
    def program(device):
        route, fulls = mori(device, handles), []
        for turn in range(calls):
            fulls += route.all_gather([device.put(part(device.rank, turn=turn))], 2, "0")
        return [wait(full) + 0 for full in fulls]

    return program


def wrong_turns(schedule):
    return sum(
        not torch.equal(full, whole(turn=turn))
        for seed in range(SEEDS)
        for outputs in schedule.run(seed).outputs
        for turn, full in enumerate(outputs)
    )


def test_two_handles_survive_a_slow_rank_and_one_does_not(monkeypatch):
    assert wrong_turns(record_ranks(2, in_turn(mori_route._NUM_HANDLES))) == 0
    monkeypatch.setattr(mori_route, "_NUM_HANDLES", 1)
    assert wrong_turns(record_ranks(2, in_turn(1))) > 0
