"""The full state of a prepared model on the main process, for code that writes it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zpasses.checkpoint.full import full_state_dict
from zpasses.checkpoint.model_tensors import (
    agree,
    gather_full,
    plain_name,
    sharding_groups,
    writing_rank,
)
from zpasses.errors import ZpassesError
from zpasses.integrations.joint_states import limit_s
from zpasses.sharding.module import unsharded_class
from zpasses.sharding.rnn import drop_weights


class CheckpointState(dict[str, Any]):
    """A state dict for a checkpoint, which keeps the names of the model.

    Without it, `save_pretrained` may rename and split tensors into an older format of the model.
    """


class AdapterStates(dict[str, Any]):
    """The names of adapters of PEFT, and for each what its file holds."""

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """In the block, `PeftModel.save_pretrained` writes these states. It would compute them
        anew from the parameters of the model, which takes all ranks."""
        from peft import peft_model

        original: Any = peft_model.get_peft_model_state_dict

        def prepared(model: Any, *args: Any, adapter_name: str = "default", **kwargs: Any) -> Any:
            return dict(self[adapter_name])

        peft_model.get_peft_model_state_dict = prepared
        try:
            yield
        finally:
            peft_model.get_peft_model_state_dict = original


@contextlib.contextmanager
def unsharded(model: nn.Module, state: dict[str, Any]) -> Iterator[None]:
    """In the block, a model on this rank is a plain one with these parameters, for code that writes
    modules one by one. It may also run the model, as sentence-transformers does for a model card.

    Args:
        state: what `full_state` or `full_state_dict` has gathered. Modules that it does not hold
            stay sharded.
    """
    full: dict[Tensor, nn.Parameter] = {}
    before: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []
    try:
        for prefix, module in model.named_modules():
            sharded = {
                name: plain_name(f"{prefix}.{name}" if prefix else name)
                for name, param in module._parameters.items()
                if isinstance(param, DTensor)
            }
            if not state.keys() >= set(sharded.values()):
                continue
            before.append((module, type(module), dict(module._parameters)))
            module.__class__ = unsharded_class(type(module))
            for name, known in sharded.items():
                param = module._parameters[name]
                assert param is not None
                full.setdefault(param, nn.Parameter(state[known], param.requires_grad))
                module._parameters[name] = full[param]
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, kind, params in before:
            if isinstance(module, nn.RNNBase):
                drop_weights(module)
            module.__class__ = kind
            module._parameters.update(params)


def takes_state_dict(save_pretrained: Callable[..., Any]) -> bool:
    """Whether a method `save_pretrained` can be given the state that it writes."""
    parameters = inspect.signature(save_pretrained).parameters
    return "state_dict" in parameters or any(
        each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()
    )


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is a PeftModel."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def full_state(model: nn.Module, *, every_rank: bool = False) -> dict[str, Any]:
    """Gather the state of a model, on the host. Call it on every rank.

    Only one rank gets it, unless `every_rank` is set. Of a model of PEFT, it holds what
    `save_pretrained` writes: the adapters, without the frozen base.

    Raises:
        AgreementError: on every rank, if another rank does not call it in time.
        ZpassesError: if an adapter has nothing to write.
    """
    if is_adapted(model):
        return adapter_states(model, every_rank=every_rank)
    return full_state_dict(
        model, cpu_offload=True, rank0_only=not every_rank, timeout_s=limit_s(model)
    )


def adapter_states(
    model: nn.Module,
    adapters: Collection[str] | None = None,
    *,
    every_rank: bool = False,
    **options: Any,
) -> AdapterStates:
    """Compute what PEFT writes of the adapters of a model, as `full_state` does.

    PEFT computes it on every rank, from the shards: some adapters save other tensors than their
    parameters, such as the prompts that a network makes.

    Args:
        adapters: their names; None takes all.
        options: further arguments of PEFT's `get_peft_model_state_dict`.
    """
    from peft import get_peft_model_state_dict

    sharded, configs = model.state_dict(), getattr(model, "peft_config", {})
    found: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for adapter in configs if adapters is None else adapters:
            found[adapter] = get_peft_model_state_dict(
                model, state_dict=sharded, adapter_name=adapter, **options
            )
    names = {adapter: [*state] for adapter, state in found.items()}
    agree(sharding_groups(model), "save_pretrained", limit_s(model), described=names)
    empty = [adapter for adapter, state in found.items() if not state]
    if empty or not found:
        raise ZpassesError(
            f"save_pretrained: PEFT finds no tensor of adapter {', '.join(empty) or '(none)'!r} of "
            f"{type(model).__name__}, so its file would be empty. Add the adapter, or pass the "
            "adapters to save as selected_adapters=[...]."
        )
    destination = None if every_rank else writing_rank(model)
    full = AdapterStates()
    for adapter, state in found.items():
        gathered = {name: _on_host(value, destination) for name, value in state.items()}
        if destination in (None, dist.get_rank()):
            full[adapter] = gathered
    return full


def _on_host(value: Any, destination: int | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    full = gather_full(value, destination)
    return None if full is None else full.cpu()
