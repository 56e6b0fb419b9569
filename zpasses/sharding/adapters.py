"""Adapters of PEFT on sharded models: methods that edit weights run on the shards, and adapters
that were added after sharding are found.

PEFT merges an adapter by `base_layer.weight.data += ...`. On a sharded model that would write to a
gathered copy. So these methods of a sharded model run inside `local_shards`, as `reset_parameters`
does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zpasses.errors import ShardingError
from zpasses.ranks.vote import has_other_ranks
from zpasses.sharding.module import (
    ShardedModule,
    is_ignored,
    local_shards,
    sharded_class,
    unsharded_class,
)

__all__ = ["edit_adapters_as_shards", "watch_late_adapter"]

_EDITS = {
    "BaseTuner": (
        *("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload"),
        *("add_weighted_adapter", "_unload_and_optionally_merge"),
    ),
    "BaseTunerLayer": ("merge", "unmerge"),
}
"""Class of `peft.tuners.tuners_utils` -> its methods that edit weights."""


def _peft_class(name: str) -> type[Any] | None:
    """Return a class of PEFT, if the program has imported PEFT."""
    found = getattr(sys.modules.get("peft.tuners.tuners_utils"), name, None)
    return found if isinstance(found, type) else None


def edit_adapters_as_shards(model: nn.Module) -> None:
    """Give the adapter layers of a model classes whose edits run on the shards."""
    for module in model.modules():
        base = unsharded_class(type(module))
        edits = tuple(
            method
            for name, methods in _EDITS.items()
            if (cls := _peft_class(name)) is not None and isinstance(module, cls)
            for method in methods
            if hasattr(base, method)
        )
        if not edits:
            continue
        _stop_watching(module)
        if getattr(base, "_zpasses_edits_shards", False):
            continue
        made = _editing_class(base, edits)  # type: ignore[arg-type]
        if isinstance(module, ShardedModule):
            specs = tuple(module._zpasses_specs.values())
            made = sharded_class(made, specs)  # type: ignore[arg-type]
        module.__class__ = made


@functools.cache
def _editing_class(base: type[Any], edits: tuple[str, ...]) -> type[Any]:
    members: dict[str, Any] = {name: _on_shards(getattr(base, name)) for name in edits}
    members["_zpasses_edits_shards"] = True
    members["__module__"], members["__qualname__"] = base.__module__, base.__qualname__
    return type(base.__name__, (base,), members)


def _on_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def edit(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with local_shards(self), torch.no_grad():
            return original(self, *args, **kwargs)

    return edit


# --- adapters added after sharding ----------------------------------------------------------------
_HANDLE = "_zpasses_adapter_check"


def watch_late_adapter(parent: nn.Module, name: str, child: nn.Module) -> None:
    """Check each training forward of an adapter layer that is put around a sharded layer, until a
    call of `shard` has sharded it.
    """
    layer = _peft_class("BaseTunerLayer")
    if layer is None or name != "base_layer" or not isinstance(parent, layer):
        return
    if any(isinstance(module, ShardedModule) for module in child.modules()):
        setattr(parent, _HANDLE, parent.register_forward_pre_hook(_check_is_sharded))


def _stop_watching(module: nn.Module) -> None:
    handle = module.__dict__.pop(_HANDLE, None)
    if handle is not None:
        handle.remove()


def _check_is_sharded(module: nn.Module, args: Any) -> None:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return  # a compile has a check of its own
    left = [
        name
        for name, param in module.named_parameters()
        if param.requires_grad and not isinstance(param, DTensor) and not is_ignored(param)
    ]
    if left and any(map(has_other_ranks, _groups(module))):
        raise ShardingError(
            f"parameters {', '.join(left[:5])} of an adapter ({type(module).__name__}) were added "
            "after zpasses.shard and are not sharded: their gradients would not be averaged over "
            "ranks. Call zpasses.shard(model, mesh=...) again, and build the optimizer after that; "
            "or pass them as its ignored_params and average them yourself."
        )


def _groups(module: nn.Module) -> set[str]:
    return {
        name
        for each in module.modules()
        if isinstance(each, ShardedModule)
        for spec in each._zpasses_specs.values()
        for name in spec.layout.sharding_groups
    }
