"""Fixtures of tests of the package."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


@contextlib.contextmanager
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def one_rank():
    """The mesh of a gloo group in which this process is alone."""
    with _alone() as mesh:
        yield mesh


@pytest.fixture(scope="module")
def one_rank_of_module():
    """The same mesh for all tests of a module."""
    with _alone() as mesh:
        yield mesh


@pytest.fixture(scope="module")
def one_gpu():
    """The mesh of a group of NCCL in which this process is alone, with its GPU."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()
