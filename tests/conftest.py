"""Set before torch's thread pools start; the rank processes of tests/ranks.py inherit it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging

import pytest
import torch
import torch.distributed as dist

from tests.roundtrip import round_trip_of
from zpasses.pipeline.observers import observe_graphs

# Torch's structured trace would drown what a failed test has to say.
logging.getLogger("torch.__trace").propagate = False


@pytest.fixture(autouse=True)
def leave_no_world_behind():
    """A test that fails inside a fake world must not take the next ones with it, nor lend them its
    compiled code."""
    yield
    if dist.is_initialized() and dist.get_backend() == "fake":
        dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def every_graph_survives_the_dump_format(tmp_path_factory):
    """Whatever this process compiles is described, written, read and compared."""
    folder = None

    def observe(log):
        nonlocal folder
        folder = folder or tmp_path_factory.mktemp("dump")
        round_trip_of(log, folder)

    with observe_graphs(observe):
        yield
