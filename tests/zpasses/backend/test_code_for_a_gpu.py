"""What Inductor does on a GPU only, tried on the CPU.

tests/zpasses/backend/test_on_a_gpu.py runs it on a GPU.
"""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor.output_code import CompiledFxGraph
from torch.distributed.device_mesh import DeviceMesh

import zpasses
from zpasses import compat
from zpasses.errors import ShardingError


@pytest.mark.inductor
def test_backwards_that_keep_gradients_compile_where_outputs_are_padded(one_rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    plain = copy.deepcopy(model)
    zpasses.shard(model, mesh=one_rank)
    step = torch.compile(model, backend="zpasses", options={"zero_stage": 2})
    chunks = torch.randn(2, 4, 5)
    with (
        torch._inductor.config.patch(disable_padding_cpu=False),
        zpasses.coalesce_grad_reduction(model),
    ):
        for chunk in chunks:
            step(chunk).square().mean().backward()
            plain(chunk).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


class _Kernel:
    """As a Triton kernel of Inductor: it refuses to be pickled once it can run."""

    def __init__(self):
        self.launchers, self.lock = [threading.Lock()], None

    def __getstate__(self):
        assert not self.launchers, "pickle should not be called with after make_launchers()"
        return vars(self)

    def prepare_for_pickle(self):
        launchers, self.launchers = self.launchers, []
        return launchers

    def restore_after_unpickle(self, launchers):
        self.launchers = launchers


def _code(kernel):
    code = object.__new__(CompiledFxGraph)
    code._triton_bundle = SimpleNamespace(static_autotuners=[SimpleNamespace(kernel=kernel)])
    code.compiled_fn_runner = None  # its destructor asks for it
    return code


def test_code_of_kernels_that_have_run_is_stored():
    kernel = _Kernel()
    launchers = list(kernel.launchers)
    code = _code(kernel)
    assert compat.pack_code(code) is not None
    assert kernel.launchers == launchers


def test_code_that_refuses_to_be_pickled_is_not_stored(caplog):
    kernel = _Kernel()
    kernel.prepare_for_pickle = list
    code = _code(kernel)
    with caplog.at_level("INFO", "zpasses"):
        assert compat.pack_code(code) is None
    assert "cannot be pickled (" in caplog.text


def test_a_mesh_on_a_gpu_with_gloo_is_refused(one_rank):
    mesh = DeviceMesh("cuda", [0])
    with pytest.raises(ShardingError, match=r"Call init_process_group\('nccl'\)"):
        zpasses.shard(nn.Linear(2, 2), mesh=mesh)
