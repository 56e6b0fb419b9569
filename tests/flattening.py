"""Graphs that flatten tensors on the host, for tests.

They are traced for a CUDA device that need not exist, and run with the host in its place.
"""

import contextlib
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only

from zpasses import compat
from zpasses.passes import FlattenOnDevice
from zpasses.passes.writers import flatten_patterns
from zpasses.testing import (
    assert_equal_bits,
    copy_graph,
    fake_world,
)

CUDA = torch.device("cuda", 0)


def move(tensor, device=CUDA, **options):
    return torch.ops.aten._to_copy.default(tensor, device=device, **options)


def flatten(*tensors):
    """Concatenates tensors on the host and copies the result to the device, as many trainers do."""
    return move(
        torch._utils._flatten_dense_tensors(
            [move(tensor, "cpu") if tensor.is_cuda else tensor for tensor in tensors]
        )
    )


def trace(fn, tensors):
    """Returns the aten graph of `fn`. `(tensor, "device")` stands for a tensor on the device."""
    mode = compat.FakeTensorMode()
    return compat.trace_aten(fn, [_fake(mode, each) for each in tensors])


def _fake(mode, each):
    tensor, on_device = each if isinstance(each, tuple) else (each, None)
    if on_device is None:
        return mode.from_tensor(tensor)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)


def rewritten(gm, flatten_on_device, world_size=1, rank=0):
    """Returns a copy of the graph that the pass rewrote as this rank."""
    with fake_world(world_size, rank):
        copied = copy_graph(gm)
        flatten_on_device(copied.graph)
        copied.recompile()
        return copied


def on_host(gm):
    """Returns a copy of the graph with the host in the device's place, so that it can run."""
    gm = copy_graph(gm)
    for node in gm.graph.nodes:
        node.args, node.kwargs = tree_map_only(
            torch.device, lambda _: torch.device("cpu"), (node.args, node.kwargs)
        )
    gm.recompile()
    return gm


@contextlib.contextmanager
def host_as_device():
    """In this context, `flatten-on-device` takes the host for a device where a copy names it."""

    def names_device(node):
        return node.target is torch.ops.aten._to_copy.default and "device" in node.kwargs

    with patch.object(flatten_patterns, "_is_copy_to_device", names_device):
        yield


def assert_same_flat(gm, flatten_on_device, tensors, world_size=1):
    """Checks that all ranks' rewritten graphs equal the host's result bit for bit.

    Returns:
        The rewritten graphs.
    """
    graphs = [rewritten(gm, flatten_on_device, world_size, rank) for rank in range(world_size)]
    values = [each[0] if isinstance(each, tuple) else each for each in tensors]
    assert_equal_bits(
        on_host(gm), [on_host(graph) for graph in graphs], [list(values)] * world_size
    )
    return graphs


PLAIN = FlattenOnDevice(tier="plain")


DISTRIBUTED = FlattenOnDevice(tier="distributed", group="0", replicated=True)


TIERS = {"plain": PLAIN, "distributed": DISTRIBUTED}


def numbered(*shape, dtype=torch.float32, start=1):
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count).reshape(shape).to(dtype)


def padded(h, d):
    """One tensor from the host and one copied from the device, two elements of padding, and another
    dtype.
    """
    flat = torch.cat([h.view(-1), move(d, "cpu").view(-1)])
    return move(torch.nn.functional.pad(flat, (0, 2)), dtype=torch.bfloat16)


def two_tensors():
    return trace(padded, [numbered(2, 3), (numbered(4), "device")])
