"""Tests of the route through torch's symmetric memory. The parts that need a device are replaced;
the route has not run on a device.
"""

import torch

from tests.on_ranks import on_ranks
from zpasses import compat
from zpasses.sdma import symm_route
from zpasses.testing import fake_world

wait = torch.ops._c10d_functional.wait_tensor


class FunctionalMemory:
    """Symmetric memory whose collectives are functional ones, and whose stream is the host."""

    def __init__(self):
        self.kept = []

    @property
    def stream(self):
        return self

    def run(self, work):
        work()

    def record(self):
        return self

    def wait(self):
        pass

    def keep(self, tensor):
        self.kept.append(tensor.data_ptr())

    def all_gather(self, source, group):
        size = compat.process_group(group).size()
        return compat.functional.all_gather_into_tensor(source, size, group)

    def reduce_scatter(self, source, op, group):
        size = compat.process_group(group).size()
        return compat.functional.reduce_scatter_tensor(source, op, size, group)


@on_ranks(2)
def test_tensors_of_every_kind_are_gathered_as_bytes():
    import torch.distributed as dist

    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    memory = FunctionalMemory()
    route = symm_route.SymmRoute(memory)
    for make in (
        lambda each: torch.arange(6.0).reshape(3, 2) + each,
        lambda each: torch.full((3, 4), each, dtype=torch.int64).t(),
        lambda each: torch.tensor(float(each)),
        lambda each: torch.empty(0, 3),
        lambda each: torch.full((5,), each, dtype=torch.bool),
    ):
        parts = [make(each) for each in range(size)]
        expected = torch.cat([part.reshape(-1, *part.shape[1:]) for part in parts])
        full, other = route.all_gather([parts[rank], parts[rank]], size, group)
        assert torch.equal(wait(full), expected)
        assert torch.equal(wait(other), expected)
        out = torch.empty_like(expected)
        assert route.all_gather_out(parts[rank], size, group, out) is out
        assert torch.equal(wait(out), expected)
    assert memory.kept  # the copies run on another stream than the one that frees
    grads = torch.arange(4.0).reshape(4, 1) * (rank + 1)
    total = wait(route.reduce_scatter(grads, "sum", size, group))
    assert torch.equal(total, torch.arange(4.0).reshape(4, 1)[2 * rank : 2 * rank + 2] * 3)
    largest = wait(
        route.reduce_scatter(grads, "max", size, group)
    )  # not what torch's operator can do
    assert torch.equal(largest, torch.arange(4.0).reshape(4, 1)[2 * rank : 2 * rank + 2] * 2)


def test_unmet_conditions_are_reported(monkeypatch):
    with fake_world(2):

        def obstacle():
            return symm_route.local_obstacle("0", None, 1)

        assert obstacle() == "symmetric memory needs an accelerator"
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        assert obstacle() == "symmetric memory needs a group of backend nccl; this one is fake"
        monkeypatch.setattr("zpasses.compat.group_backend", lambda group: "nccl")
        assert obstacle() is None
        monkeypatch.setattr("zpasses.compat.symm_mem_module", lambda: __import__("no_such_module"))
        assert "this torch has no symmetric memory" in obstacle()
