"""zpasses: ZeRO as graph passes."""

from zpasses import ops as _ops  # registers the dialect, which code from a warm compile cache may call
from zpasses import sdma
from zpasses.accumulation import coalesce_grad_reduction
from zpasses.errors import AgreementError, OptionError, PassError, ShardingError, ZpassesError
from zpasses.options import Options
from zpasses.packing import pack_parameters
from zpasses.pipeline import Level, Pass, PassRecord, Pipeline
from zpasses.reads import shards
from zpasses.sharding import invalidate, pack_shards, shard
from zpasses.target import Target

__all__ = [
    "AgreementError",
    "Level",
    "OptionError",
    "Options",
    "Pass",
    "PassError",
    "PassRecord",
    "Pipeline",
    "ShardingError",
    "Target",
    "ZpassesError",
    "coalesce_grad_reduction",
    "invalidate",
    "pack_parameters",
    "pack_shards",
    "sdma",
    "shard",
    "shards",
]

__version__ = "0.1.0"

del _ops
