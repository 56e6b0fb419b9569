"""zpasses: ZeRO as graph passes.

Public names are imported on first use, so that code that only reads dumps (zpasses.dumps,
zpasses.inspect, the command line) does not import torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from zpasses.version import __version__

if TYPE_CHECKING:
    from zpasses import sdma
    from zpasses.accumulation import coalesce_grad_reduction
    from zpasses.backend.per_block import compile_blocks
    from zpasses.checkpoint.full import full_state_dict
    from zpasses.checkpoint.safetensors_reader import load_safetensors
    from zpasses.checkpoint.safetensors_writer import save_safetensors
    from zpasses.checkpoint.training_state import load_training_state, training_state
    from zpasses.cost.time.target import Target
    from zpasses.errors import (
        AgreementError,
        MemoryBudgetError,
        OptionError,
        PassError,
        ShardingError,
        ZpassesError,
    )
    from zpasses.optim.backward_step import step_in_backward
    from zpasses.optim.offload import offload_optimizer
    from zpasses.optim.offload_params import offload_parameters
    from zpasses.pipeline import Facts, Level, Options, Pass, PassRecord, Pipeline
    from zpasses.ranks.device_mesh import init_device_mesh
    from zpasses.sharding.clipping import clip_grad_norm_
    from zpasses.sharding.encoded_params import encode_parameters
    from zpasses.sharding.flat_buffers import pack_parameters
    from zpasses.sharding.module import local_shards
    from zpasses.sharding.shard import invalidate, pack_shards, shard

__all__ = [
    "AgreementError",
    "Facts",
    "Level",
    "MemoryBudgetError",
    "OptionError",
    "Options",
    "Pass",
    "PassError",
    "PassRecord",
    "Pipeline",
    "ShardingError",
    "Target",
    "ZpassesError",
    "__version__",
    "clip_grad_norm_",
    "coalesce_grad_reduction",
    "compile_blocks",
    "encode_parameters",
    "full_state_dict",
    "init_device_mesh",
    "invalidate",
    "load_safetensors",
    "load_training_state",
    "local_shards",
    "offload_optimizer",
    "offload_parameters",
    "pack_parameters",
    "pack_shards",
    "save_safetensors",
    "sdma",
    "shard",
    "step_in_backward",
    "training_state",
]

_HOMES = {
    "AgreementError": "zpasses.errors",
    "Facts": "zpasses.pipeline",
    "Level": "zpasses.pipeline",
    "MemoryBudgetError": "zpasses.errors",
    "OptionError": "zpasses.errors",
    "Options": "zpasses.pipeline",
    "Pass": "zpasses.pipeline",
    "PassError": "zpasses.errors",
    "PassRecord": "zpasses.pipeline",
    "Pipeline": "zpasses.pipeline",
    "ShardingError": "zpasses.errors",
    "Target": "zpasses.cost.time.target",
    "ZpassesError": "zpasses.errors",
    "clip_grad_norm_": "zpasses.sharding.clipping",
    "coalesce_grad_reduction": "zpasses.accumulation",
    "compile_blocks": "zpasses.backend.per_block",
    "encode_parameters": "zpasses.sharding.encoded_params",
    "full_state_dict": "zpasses.checkpoint.full",
    "init_device_mesh": "zpasses.ranks.device_mesh",
    "invalidate": "zpasses.sharding.shard",
    "load_safetensors": "zpasses.checkpoint.safetensors_reader",
    "load_training_state": "zpasses.checkpoint.training_state",
    "offload_optimizer": "zpasses.optim.offload",
    "offload_parameters": "zpasses.optim.offload_params",
    "pack_parameters": "zpasses.sharding.flat_buffers",
    "pack_shards": "zpasses.sharding.shard",
    "save_safetensors": "zpasses.checkpoint.safetensors_writer",
    "shard": "zpasses.sharding.shard",
    "local_shards": "zpasses.sharding.module",
    "step_in_backward": "zpasses.optim.backward_step",
    "training_state": "zpasses.checkpoint.training_state",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        return importlib.import_module(f"zpasses.{name}")
    else:
        raise AttributeError(f"module 'zpasses' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_MODULES = (
    "backend",
    "dumps",
    "errors",
    "graph",
    "inspect",
    "optim",
    "pipeline",
    "sdma",
    "testing",
)
"""Submodules that are available after `import zpasses`, without an import of their own."""

if "torch" in sys.modules:
    # Code from a warm compile cache may call the dialect's ops, so register them now.
    importlib.import_module("zpasses.graph.dialect")
