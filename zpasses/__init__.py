"""zpasses: ZeRO as graph passes.

What is named here is imported when it is first used, so that reading a dump (zpasses.dumps, zpasses.inspect, the command line) loads no
torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "AgreementError": "errors",
    "Level": "pipeline",
    "OptionError": "errors",
    "Options": "options",
    "Pass": "pipeline",
    "PassError": "errors",
    "PassRecord": "pipeline",
    "Pipeline": "pipeline",
    "ShardingError": "errors",
    "Target": "target",
    "ZpassesError": "errors",
    "coalesce_grad_reduction": "accumulation",
    "invalidate": "sharding",
    "pack_parameters": "packing",
    "pack_shards": "sharding",
    "shard": "sharding",
    "shards": "reads",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"zpasses.{_HOMES[name]}"), name)
    elif name in _MODULES:
        return importlib.import_module(f"zpasses.{name}")
    else:
        raise AttributeError(f"module 'zpasses' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_MODULES = ("agreement", "backend", "dumps", "errors", "inspect", "ops", "options", "pipeline", "sdma", "target", "testing")
"""Submodules that `import zpasses` alone makes available, as it did when everything was imported at once."""

if "torch" in sys.modules:
    importlib.import_module("zpasses.ops")  # registers the dialect, which code from a warm compile cache may call
