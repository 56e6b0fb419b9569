"""Adapters of PEFT on sharded models: methods that edit weights run on the shards, and adapters
that were added after sharding are found.

PEFT merges an adapter by `base_layer.weight.data += ...`. On a sharded model that would write to a
gathered copy. So these methods of a sharded model run inside `local_shards`, as `reset_parameters`
does. AdaLoRA computes with what `named_parameters` returns, so it gets full parameters there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zpasses.errors import ShardingError
from zpasses.ranks.vote import has_other_ranks
from zpasses.sharding.module import (
    ShardedModule,
    gathering_reads,
    is_ignored,
    local_shards,
    sharded_class,
    unsharded_class,
)

_EDITS = {
    "BaseTuner": (
        *("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload"),
        *("add_weighted_adapter", "_unload_and_optionally_merge"),
    ),
    "BaseTunerLayer": ("merge", "unmerge"),
}
"""Class of `peft.tuners.tuners_utils` -> its methods that edit weights."""


def _peft_class(name: str, module: str = "tuners_utils") -> type[Any] | None:
    """Return a class of PEFT, if the program has imported PEFT."""
    found = getattr(sys.modules.get(f"peft.tuners.{module}"), name, None)
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
    adaptive = _peft_class("AdaLoraModel", "adalora.model")
    if adaptive is not None and issubclass(base, adaptive):
        members["forward"] = _with_full_adapters(base.forward)
        members["update_and_allocate"] = _allocating(base.update_and_allocate)
        resize = "resize_state_dict_by_rank_pattern"
        members[resize] = _resizing(getattr(base, resize))
    members["_zpasses_edits_shards"] = True
    members["__module__"], members["__qualname__"] = base.__module__, base.__qualname__
    return type(base.__name__, (base,), members)


def _on_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def edit(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if original.__name__ in _MERGES:
            _check_are_exact(self)
        with local_shards(self), torch.no_grad():
            return original(self, *args, **kwargs)

    return edit


_MERGES = frozenset({"merge", "unmerge", "merge_adapter", "unmerge_adapter", "merge_and_unload"})


def _check_are_exact(adapted: nn.Module) -> None:
    """Raise ShardingError if a layer with an adapter rests encoded."""
    kind = _peft_class("BaseTunerLayer") or ()
    layers = [each for each in adapted.modules() if isinstance(each, kind)]
    for layer in layers:
        for module, spec, _ in gathering_reads(layer):
            if spec.codes is not None:
                raise ShardingError(
                    f"merge into parameter {spec.attribute!r} of a {type(module).__name__}, which "
                    f"rests encoded ({spec.codes.encoding}): codes would round the adapter away. "
                    "Save the adapter, load the exact base model, and merge there."
                )


# --- AdaLoRA --------------------------------------------------------------------------------------
def _with_full_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    """`AdaLoraModel.forward`, which regularizes the adapters that `named_parameters` returns."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        reads = functools.partial(_full_adapters, self.model)
        model = SimpleNamespace(forward=self.model.forward, named_parameters=reads)
        return original(_stand_in(self, model), *args, **kwargs)

    return forward


def _full_adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, _ in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            module, _, last = name.rpartition(".")
            yield name, getattr(model.get_submodule(module), last)


def _allocating(original: Callable[..., Any]) -> Callable[..., Any]:
    """`AdaLoraModel.update_and_allocate`, which ranks the triplets of all adapters by parameters
    and gradients, and masks the worst. Every rank does so, on full tensors.
    """

    @functools.wraps(original)
    def update_and_allocate(self: Any, global_step: int) -> None:
        shards = {name: p for name, p in self.model.named_parameters() if "lora_" in name}
        full = {}
        for name, param in shards.items():
            full[name] = _full(param.detach())
            full[name].grad = None if param.grad is None else _full(param.grad)
        original(_stand_in(self, SimpleNamespace(named_parameters=full.items)), global_step)
        with torch.no_grad():
            for name, param in shards.items():
                if "lora_E" in name:
                    param.copy_(full[name])

    return update_and_allocate


def _resizing(original: Callable[..., Any]) -> Callable[..., Any]:
    """`AdaLoraModel.resize_state_dict_by_rank_pattern`, which leaves masked rows out."""

    @functools.wraps(original)
    def resize(self: Any, rank_pattern: Any, state_dict: dict[str, Any], name: str) -> Any:
        full = {key: _full(value) for key, value in state_dict.items()}
        return original(self, rank_pattern, full, name)

    return resize


def _stand_in(adapted: Any, model: Any) -> Any:
    """An AdaLoraModel around another model."""
    return SimpleNamespace(
        model=model,
        peft_config=adapted.peft_config,
        trainable_adapter_name=adapted.trainable_adapter_name,
        rankallocator=getattr(adapted, "rankallocator", None),
    )


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


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
    return {name for _, spec, _ in gathering_reads(module) for name in spec.layout.sharding_groups}
