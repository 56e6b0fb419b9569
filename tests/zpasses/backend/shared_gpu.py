"""Ranks that share one GPU, which NCCL refuses: their collectives take the way over the host.

The groups communicate through gloo, whose operators know tensors on CPUs only. Here they get
kernels for CUDA that copy to the host, communicate there, and copy back.
"""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

OPERATORS = (
    "allreduce_",
    "allreduce_coalesced_",
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "alltoall_base_",
    "broadcast_",
)


def _over_the_host(op, *args):
    sent = tree_map_only(torch.Tensor, torch.Tensor.cpu, args)
    result = op(*sent)
    work = result[-1] if isinstance(result, tuple) else result
    dist.Work.unbox(work).wait()
    # All of them write to their first argument. A write to another would count as an edit.
    for mine, there in zip(tree_leaves(args[0]), tree_leaves(sent[0]), strict=True):
        mine.copy_(there)
    return (args[0], work) if isinstance(result, tuple) else work


@functools.cache
def _kernels():
    library = torch.library.Library("c10d", "IMPL")
    for name in OPERATORS:
        op = getattr(torch.ops.c10d, name).default
        library.impl(name, functools.partial(_over_the_host, op), "CUDA", allow_override=True)
    return library


@functools.cache
def gpu_mesh(*shape):
    """Returns a mesh of all ranks on the GPU that they share: of one dimension, or `replicate` and
    `shard`.
    """
    _kernels()
    torch.cuda.set_device(0)
    backend, ranks = "cpu:gloo,cuda:gloo", torch.arange(dist.get_world_size())
    if len(shape) < 2:
        return DeviceMesh.from_group(dist.new_group(backend=backend), "cuda")
    grid, groups = ranks.view(shape), []
    for dim in range(2):
        made = [dist.new_group(row.tolist(), backend=backend) for row in grid.movedim(dim, 1)]
        groups += [each for each in made if each is not dist.GroupMember.NON_GROUP_MEMBER]
    names = "replicate", "shard"
    return DeviceMesh.from_group(groups, "cuda", mesh=grid, mesh_dim_names=names)
