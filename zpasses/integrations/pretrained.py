"""The methods `save_pretrained` and `generate` of prepared models, which need all ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zpasses.checkpoint.model_tensors import sharding_groups, writing_rank
from zpasses.integrations.full_states import (
    AdapterStates,
    CheckpointState,
    adapter_states,
    full_state,
    is_adapted,
    takes_state_dict,
    unsharded,
)
from zpasses.integrations.joint_states import fail_on_all_ranks, limit_s
from zpasses.ranks.vote import store_barrier

WITHOUT_STATE = (
    "save_pretrained without state_dict (call it on every rank, or call "
    "state = accelerator.get_state_dict(model) on every rank and then "
    "save_pretrained(folder, state_dict=state) on one)"
)
"""What ranks wait at. Errors and reports of other ranks quote it, so it holds the advice."""


def adopt(model: nn.Module) -> None:
    """Replace the methods of a prepared model, and of the modules in it, that need all ranks.

    `save_pretrained` gathers what it writes. With `state_dict`, it runs on one rank without the
    others. `generate` runs without compiled code and keeps ranks in step. Modules that were adopted
    before stay as they are.
    """
    module: Any
    for module in model.modules():
        if hasattr(type(module), "generate") and hasattr(module, "config"):
            # `generate` and Seq2SeqTrainer ask for it: ranks go on until all have finished.
            module._is_fsdp_managed_module = True
            _replace(module, "generate", _generate)
        if hasattr(type(module), "save_pretrained"):
            _replace(module, "save_pretrained", _save_pretrained)


def _replace(module: nn.Module, name: str, replacement: Callable[..., Any]) -> None:
    if name in vars(module):
        return
    original = getattr(module, name)
    # `copy.deepcopy` of the module copies a partial, which then holds the copy.
    bound = functools.partial(replacement, module, original)
    setattr(module, name, functools.update_wrapper(bound, original))


def _generate(_: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Each call of the model has one more token. Compiled code would be compiled for each."""
    with torch.compiler.set_stance("force_eager"):
        return original(*args, **kwargs)


def _save_pretrained(
    model: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    groups = sharding_groups(model)
    if not groups:  # inside of `unsharded`, for a module that contains it
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs)
    state = _argument(given, "state_dict")
    if state is not None:
        # On other ranks than the first, what was gathered for it is empty.
        writes = state or dist.get_rank() == writing_rank(model)
        return _write(model, original, given, state) if writes else None
    for group in groups:
        store_barrier(group, WITHOUT_STATE, limit_s(model))
    if is_adapted(model):
        embeddings = _argument(given, "save_embedding_layers", "auto")
        adapters = _argument(given, "selected_adapters")
        state = adapter_states(model, adapters, save_embedding_layers=embeddings)
    else:
        state = full_state(model)
    with fail_on_all_ranks(model, "save_pretrained"):
        return _write(model, original, given, state) if state else None


def _write(
    model: nn.Module,
    original: Callable[..., Any],
    given: inspect.BoundArguments,
    state: dict[str, Any],
) -> Any:
    """Write a gathered state, on this rank alone."""
    if isinstance(state, AdapterStates):
        with state.written():
            return original(*given.args, **given.kwargs)
    named = given.signature.parameters
    if takes_state_dict(original):
        into = given.arguments if "state_dict" in named else _extra_arguments(given)
        into["state_dict"] = state
    if isinstance(state, CheckpointState) and "save_original_format" in named:
        given.arguments["save_original_format"] = False
    # PEFT computes prompts from the parameters of the model, and other methods write these.
    with unsharded(model, state):
        return original(*given.args, **given.kwargs)


def _argument(given: inspect.BoundArguments, name: str, default: Any = None) -> Any:
    return {**_extra_arguments(given), **given.arguments}.get(name, default)


def _extra_arguments(given: inspect.BoundArguments) -> dict[str, Any]:
    """The keyword arguments that the method does not name. What is added to them is passed."""
    for each in given.signature.parameters.values():
        if each.kind is inspect.Parameter.VAR_KEYWORD:
            extra: dict[str, Any] = given.arguments.setdefault(each.name, {})
            return extra
    return {}
