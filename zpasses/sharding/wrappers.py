"""Wrappers around sharded models: `torch.compile`, whose names differ, adapters that come late, and
DistributedDataParallel, which cannot be right.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.sharding.accelerate_backend import explain_dynamo_backend
from zpasses.sharding.adapters import edit_adapters_as_shards, watch_late_adapter
from zpasses.sharding.module import ShardedModule, gathering_reads

log = logging.getLogger("zpasses")

_WRAPPER = "_orig_mod."


def prepare_for_wrappers(model: nn.Module) -> None:
    """Prepare a sharded model, and this process, for other libraries that wrap or edit it."""
    edit_adapters_as_shards(model)
    explain_dynamo_backend()
    _accept_compiled_names(model)


def on_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """A hook that sees when a module is put into a wrapper."""
    if child is None:
        return
    if name == "module" and isinstance(parent, DistributedDataParallel):
        _refuse_ddp(parent, child)
    elif name == "base_layer":
        watch_late_adapter(parent, name, child)
    elif name == "_orig_mod" and compat.is_optimized_module(parent):
        parent.register_load_state_dict_pre_hook(_add_wrapper_names)
        if _param_dtypes(child):
            parent.register_forward_hook(_explain_dtypes, always_call=True, with_kwargs=True)


# --- DistributedDataParallel ----------------------------------------------------------------------
def _refuse_ddp(parent: DistributedDataParallel, child: nn.Module) -> None:
    ignored: Any = getattr(parent, "parameters_to_ignore", ())
    for path, module in child.named_modules():
        for name in module._zpasses_specs if isinstance(module, ShardedModule) else ():
            full = f"{path}.{name}" if path else name
            if full not in ignored:
                raise ShardingError(
                    f"DistributedDataParallel around {type(child).__name__}, whose parameter "
                    f"{full} is sharded by zpasses: ranks hold different rows, which DDP would "
                    "overwrite with those of the first rank, and zpasses averages gradients "
                    "already. Leave DistributedDataParallel out and train the sharded model "
                    "itself; zpasses.coalesce_grad_reduction(model) takes the place of no_sync(). "
                    "If a trainer adds DDP, tell it that the model is distributed already."
                )


def check_no_ddp_inside(model: nn.Module) -> None:
    """Raise ShardingError if a model that is to be sharded is or contains DDP."""
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ShardingError(
                f"module {path or '(root)'} is DistributedDataParallel, which averages gradients "
                "of full parameters. Shard the plain model and leave DistributedDataParallel out."
            )


# --- torch.compile --------------------------------------------------------------------------------
def _add_wrapper_names(
    wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Before `torch.compile(model)` loads a state dict: accept names without `_orig_mod.`."""
    if not any(isinstance(module, ShardedModule) for module in wrapper.modules()):
        return
    for name in list(state_dict):
        if name.startswith(prefix) and not name.startswith(prefix + _WRAPPER):
            value = state_dict.pop(name)
            state_dict[prefix + _WRAPPER + name[len(prefix) :]] = value


def _param_dtypes(model: nn.Module) -> set[torch.dtype]:
    return {
        spec.param_dtype for _, spec, _ in gathering_reads(model) if spec.param_dtype is not None
    }


def _explain_dtypes(
    wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Log a hint if a compiled call fails whose inputs have another dtype than the parameters."""
    error = sys.exc_info()[1]
    if error is None or "dtype" not in str(error):
        return
    wanted = _param_dtypes(wrapper)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in wanted:
            log.error(
                "the model failed on an input of %s. Its parameters are gathered in %s, because "
                "zpasses.shard(param_dtype=...) converts parameters only. Convert the inputs, or "
                "run the model under torch.autocast and leave param_dtype out.",
                value.dtype,
                ", ".join(sorted(map(str, wanted))),
            )
            return


def _accept_compiled_names(model: nn.Module) -> None:
    """Let `model.load_state_dict` accept names that begin with `_orig_mod.`, which are those of
    `torch.compile(model)`.
    """
    # A model that was compiled before it was sharded is a wrapper that the hook has missed.
    compiled = compat.is_optimized_module(model)
    known: Any = _add_wrapper_names if compiled else _drop_wrapper_names
    if all(getattr(hook, "hook", None) is not known for hook in _load_hooks(model)):
        model.register_load_state_dict_pre_hook(known)


def _load_hooks(model: nn.Module) -> list[Any]:
    return list(getattr(model, "_load_state_dict_pre_hooks", {}).values())


def _drop_wrapper_names(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    start = prefix + _WRAPPER
    for name in list(state_dict):
        if name.startswith(start) and "_orig_mod" not in model._modules:
            state_dict[prefix + name[len(start) :]] = state_dict.pop(name)
