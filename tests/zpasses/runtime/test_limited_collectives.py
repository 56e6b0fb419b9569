"""Collectives outside of graphs give up after the limit of the program, not that of the group."""

import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zpasses
from zpasses import compat
from zpasses.testing import run_in_fresh_ranks

pytestmark = pytest.mark.processes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4, bias=False), nn.Linear(4, 8, bias=False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return self.b(self.a(x) * self.scale).square().mean()


def _step(kind):
    return lambda model, folder: kind(model.parameters(), lr=0.1).step()


CASES = {
    "all_reduce clip": lambda model, folder: zpasses.clip_grad_norm_(model.parameters(), 1.0),
    "all_reduce step": _step(zpasses.optim.Adafactor),
    "gather step": _step(zpasses.optim.Muon),
    "scatter step": _step(zpasses.optim.Muon),
    "all_gather_into_tensor full": lambda model, folder: zpasses.full_state_dict(
        model, timeout_s=1.0
    ),
    "broadcast full": lambda model, folder: zpasses.full_state_dict(model, timeout_s=1.0),
    "gather save": lambda model, folder: zpasses.save_safetensors(model, folder, timeout_s=1.0),
}
"""A collective that rank 1 never starts, and what ranks call."""


def _rank_1_leaves_in_each(folder):
    seen, store = {}, compat.default_store()
    for case, call in CASES.items():

        def leaves(*args, case=case, **kwargs):
            store.wait([f"rank 0 gave up: {case}"])
            raise SystemExit

        # A gloo group does not outlive a collective that gave up.
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        model = zpasses.shard(Net(), mesh=mesh)
        options = {"codegen": "eager", "agreement_timeout_s": 1.0}
        torch.compile(model, backend="zpasses", options=options)(torch.ones(2, 6)).backward()
        start = time.monotonic()
        try:
            if dist.get_rank() == 0:
                call(model, folder)
            else:
                with mock.patch.object(dist, case.split()[0], leaves):
                    call(model, folder)
        except SystemExit:
            pass
        except Exception as error:
            seen[case] = f"{type(error).__name__}: {error}", time.monotonic() - start
        store.set(f"rank {dist.get_rank()} gave up: {case}", "")
        dist.barrier()
    return seen


def test_collectives_outside_of_graphs_have_the_limit_of_the_program(tmp_path):
    first, second = run_in_fresh_ranks(_rank_1_leaves_in_each, str(tmp_path))
    assert first.ok, first.error
    assert second.result == {}
    for case in CASES:
        error, seconds = first.result[case]
        saves = "rank 1 of group .* did not reach the end of zpasses.save_safetensors within 1 s"
        waited = "rank 0 waited in a collective while running .*, for 1 s"
        assert re.match(f"AgreementError: ({saves if 'save' in case else waited})", error), case
        assert seconds < 20, case
