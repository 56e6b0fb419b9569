"""The order of copies and steps on asynchronous devices: simulated ones, and threads."""

import contextlib
import itertools
import random
import time

import pytest
import torch
from torch import nn

import zpasses
from tests.host_stream import HostStream
from tests.zpasses.optim.offloading import Net, assert_same_training, backward, optimizer_of, train
from zpasses.optim import offload
from zpasses.runtime.platform import register_platform
from zpasses.testing import SimulatedDevice

SEEDS = 30


class TwoMoments(torch.optim.Optimizer):
    """States of two sizes, one of them replaced in each step by a tensor that the step makes."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["moment"] = torch.zeros_like(param)
                    state["row"] = param.new_zeros(param.shape[-1:])
                state["moment"].mul_(0.5).add_(param.grad)
                state["row"] = state["row"] + state["moment"].sum(0)
                param.sub_(state["moment"] * state["row"], alpha=0.1)


class SimulatedArena:
    """Host memory that the simulated streams use."""

    def __init__(self, device, nbytes):
        self.bytes = device.put(torch.zeros(nbytes, dtype=torch.uint8))

    def tensor(self, offset, dtype, shape, stride):
        count = torch.Size(shape).numel() * dtype.itemsize
        flat = self.bytes.narrow(0, offset, count).view(dtype)
        return flat.as_strided(shape, stride, flat.storage_offset())


class SimulatedPlatform:
    def __init__(self, device):
        self._names, self._device = iter(("in", "out")), device

    def side_stream(self):
        return self._device.stream(next(self._names))


@contextlib.contextmanager
def platform(made):
    register_platform("cpu", made)
    try:
        yield
    finally:
        register_platform("cpu", None)


def recorded(monkeypatch, kind, options, steps=3, spoil=None):
    """What a device is given in some steps, each followed by work that reuses freed memory.

    Returns:
        The schedule. It returns the parameters, and the states on the host after a wait.
    """
    device = SimulatedDevice()
    monkeypatch.setattr(offload, "HostArena", lambda nbytes, _: SimulatedArena(device, nbytes))
    values = [torch.randn(6, 4), torch.randn(5, 4), torch.randn(3, 8), torch.randn(9, 2)]
    params = [nn.Parameter(device.put(each)) for each in values]
    with platform(SimulatedPlatform(device)):
        optimizer = kind(params)
        zpasses.offload_optimizer(optimizer, **options)
    if spoil is not None:
        spoil(monkeypatch, optimizer)
    with device:
        for number in range(steps):
            for param in params:
                param.grad = param.detach() * (number + 1)
            optimizer.step()
            for param in params:  # the next forward takes memory of the same sizes
                param.grad = None
                other = torch.empty(128, dtype=torch.uint8)
                other.fill_(7)
                del other
        states = [value for param in params for value in optimizer.state[param].values()]
        assert optimizer.state.on_the_way is None
    device.returns([*(param.detach() for param in params), *states])
    return device.schedule, optimizer


def expected(kind, steps=3):
    torch.manual_seed(0)
    values = [torch.randn(6, 4), torch.randn(5, 4), torch.randn(3, 8), torch.randn(9, 2)]
    params = list(map(nn.Parameter, values))
    optimizer = kind(params)
    for number in range(steps):
        for param in params:
            param.grad = param.detach() * (number + 1)
        optimizer.step()
    return [param.detach() for param in params] + [
        value for param in params for value in optimizer.state[param].values()
    ]


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)


CASES = [
    (kind, options)
    for kind in (momentum, TwoMoments)
    for options in ({"bucket_bytes": "1B"}, {"bucket_bytes": "256B"}, {}, {"device_bytes": "100B"})
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_no_order_of_the_streams_changes_a_bit(monkeypatch, kind, options):
    torch.manual_seed(0)
    schedule, _ = recorded(monkeypatch, kind, options)
    names = {name for _, name in schedule.streams}
    assert {"in", "out"} <= names
    assert schedule.first_difference(SEEDS) is None
    (found,) = schedule.run(seed=3).outputs
    assert all(map(torch.equal, found, expected(kind)))


def without(name, *, stream=None):
    """Spoils one kind of synchronisation of the streams."""

    def spoil(monkeypatch, optimizer):
        own = optimizer._zpasses_offload
        for each in (own._inward, own._outward) if stream is None else (getattr(own, stream),):
            monkeypatch.setattr(each, name, lambda *_: None)

    return spoil


def events_of(stream, which=lambda at: True, buckets=4):
    """Spoils the waits for a stream's events, by their numbers in a step."""

    def spoil(monkeypatch, optimizer):
        own = getattr(optimizer._zpasses_offload, stream)
        record, numbers = own.record, itertools.count()

        def recorded_event():
            event = record()
            if which(next(numbers) % (buckets + 1)):  # 0 is that of the step before
                event.wait = lambda: None
            return event

        monkeypatch.setattr(own, "record", recorded_event)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "bucket"),
    [
        (without("follow_current", stream="_inward"), "1B"),
        (without("follow_current", stream="_outward"), "1B"),
        (without("keep"), "1B"),
        (without("synchronize"), "1B"),
        (events_of("_inward"), "1B"),
        (events_of("_outward", lambda at: at > 0), "1B"),
        (events_of("_outward", lambda at: at == 0, buckets=2), "256B"),
    ],
    ids=[
        "in before memory is free",
        "out before the step",
        "reuse before out",
        "host before out",
        "step before in",
        "in before the bucket before it is out",
        "in before the last step is out",
    ],
)
def test_every_wait_is_needed(monkeypatch, spoil, bucket):
    torch.manual_seed(0)
    schedule, _ = recorded(monkeypatch, momentum, {"bucket_bytes": bucket}, spoil=spoil)
    assert schedule.first_difference(4 * SEEDS) is not None


# --- threads --------------------------------------------------------------------------------------
class SlowStream(HostStream):
    """A stream whose work starts late."""

    def __init__(self, seed):
        super().__init__(time_limit_s=60)
        self._delays = random.Random(seed)

    def run(self, work):
        delay = self._delays.choice((0.0, 0.0, 0.002, 0.01))
        super().run(lambda: (time.sleep(delay), work()))


class Slow:
    def __init__(self, seed):
        self._seed = seed

    def side_stream(self):
        self._seed += 1
        return SlowStream(self._seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("which", ["AdamW", "Lion"])
def test_late_copies_of_threads_change_no_bit(which, seed):
    model, other = Net(), Net()
    optimizer, plain = optimizer_of(model, which), optimizer_of(other, which)
    with platform(Slow(10 * seed)):
        zpasses.offload_optimizer(optimizer, bucket_bytes="1KiB", device_bytes="300B")
    for number in range(4):
        train(model, optimizer, [number])
        train(other, plain, [number])
        if number == seed:
            assert_same_training(model, optimizer, other, plain)
    assert_same_training(model, optimizer, other, plain)


def test_the_host_waits_only_where_it_reads_a_state():
    model = Net()
    optimizer = optimizer_of(model, "AdamW")

    class Never(HostStream):
        blocked = False

        def synchronize(self):
            assert not Never.blocked
            super().synchronize()

    class Platform:
        def side_stream(self):
            return Never(60)

    with platform(Platform()):
        zpasses.offload_optimizer(optimizer, bucket_bytes="1KiB")
    Never.blocked = True
    train(model, optimizer, range(3))
    backward(model, 3)
    Never.blocked = False
    assert optimizer.state.on_the_way is not None
    optimizer.state_dict()
    assert optimizer.state.on_the_way is None
