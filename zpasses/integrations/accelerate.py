"""Train with Hugging Face's accelerate.

    accelerator = Accelerator(gradient_accumulation_steps=4)
    prepare(accelerator, model)  # shards the model and compiles it in place
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Everything else is written as for other models: see docs/trainers.md.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from zpasses.checkpoint.full import full_state_dict
from zpasses.checkpoint.safetensors_writer import save_safetensors
from zpasses.errors import OptionError
from zpasses.integrations.joint_states import (
    broadcast_buffers,
    discard_states,
    fail_on_all_ranks,
    limit_s,
    load_states,
    save_states,
)
from zpasses.integrations.preparation import (
    finish_preparation,
    preparation_of,
    prepare_model,
    prepared,
)
from zpasses.integrations.pretrained import adopt
from zpasses.runtime.param_value import is_sharded_parameter
from zpasses.sharding.accelerate_backend import explain_dynamo_backend
from zpasses.sharding.replaced_params import check_current

M = TypeVar("M", bound=nn.Module)

explain_dynamo_backend()

FOLDER = "sharded_state"
"""Folder in a checkpoint of `save_state` that holds prepared models and their optimizers."""


def prepare(
    accelerator: Accelerator,
    model: M,
    *,
    mesh: DeviceMesh | None = None,
    options: Mapping[str, Any] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    pack_mb: float | None = None,
) -> M:
    """Shard `model`, compile it in place, and let `accelerator` train it. Returns `model`.

    Call it before the optimizer is created and before `accelerator.prepare`. The accelerator then
    also checkpoints the model in shards: see `ShardingAccelerator`.

    Two methods of the model change, where it has them. `save_pretrained` gathers what it writes, or
    takes `state_dict=accelerator.get_state_dict(model)` and runs on one rank. `generate` runs
    without compiled code and keeps ranks in step.

    Args:
        accelerator: its class becomes `ShardingAccelerator`. It still prepares other models as
            before.
        mesh: one-dimensional; None takes all ranks.
        options: options of the backend, such as {"zero_stage": 2}; None is stage 3.
        param_dtype: gather and compute in this dtype. The shards keep theirs.
        reduce_dtype: reduce gradients in this dtype.
        ignored_params: parameters to leave unsharded. Their gradients are not reduced.
        pack_mb: see `zpasses.shard`. None takes 64 if the model is on the host and the mesh on
            accelerators, so that each rank moves its own shards only.

    Raises:
        OptionError: for wrong options, or an accelerator that compiles or shards models itself.
        ShardingError: for a model that cannot be sharded, or without a process group.
    """
    shard_with(accelerator)
    prepare_model(
        model,
        mesh,
        options,
        param_dtype,
        reduce_dtype,
        ignored_params,
        pack_mb,
        caller="zpasses.integrations.accelerate.prepare",
    )
    adopt(model)
    return model


def shard_with(accelerator: Accelerator) -> None:
    """Make `accelerator` a `ShardingAccelerator`, in place.

    Raises:
        OptionError: if it is configured to compile, shard or wrap models itself.
    """
    if isinstance(accelerator, ShardingAccelerator):
        return
    if type(accelerator) is not Accelerator:
        raise OptionError(
            f"got {type(accelerator).__name__}; expected an accelerate.Accelerator. For a "
            "subclass, derive it from zpasses.integrations.accelerate.ShardingAccelerator instead."
        )
    plugin = accelerator.state.dynamo_plugin
    if plugin is not None and str(getattr(plugin.backend, "value", plugin.backend)) != "NO":
        raise OptionError(
            f"the Accelerator compiles with dynamo_backend={plugin.backend.value!r}; prepare() has "
            "compiled the model in place with zpasses. Leave dynamo_backend (in a Trainer: "
            "torch_compile, torch_compile_backend and torch_compile_mode) out, and pass "
            "options={...} to prepare()."
        )
    distributed = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if distributed in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise OptionError(
            f"the Accelerator is configured for {distributed}, which shards models itself. Start "
            "the script with plain torchrun and without that configuration; zpasses shards."
        )
    accelerator.__class__ = ShardingAccelerator


class ShardingAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator that trains models that were prepared with zpasses.

    - `prepare(model, ...)` leaves a prepared model unwrapped, applies autocast if `mixed_precision`
      asks for it, and shards adapters that were added since. It changes the methods that need all
      ranks, as `zpasses.integrations.accelerate.prepare` does.
    - `no_sync` and `accumulate` defer the reduction of gradients; `backward` reduces them once.
    - `clip_grad_norm_` clips by the norm over all ranks, and returns it as a plain tensor.
    - `get_state_dict` gathers the full state on the main process. It is empty on other ranks.
    - `save_model` writes safetensors, parameter by parameter.
    - `save_state` and `load_state` use torch.distributed.checkpoint: each rank writes its own rows,
      and the checkpoint loads on any number of ranks. Hooks get the prepared models, too, and their
      rows of this rank as `weights`. What a hook removes from `weights` is written nevertheless;
      models that it removes on load, on every rank, are not loaded.

    Call the saving methods on every rank.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]
    _save_model_state_pre_hook: OrderedDict[int, Callable[..., None]]
    _load_model_state_pre_hook: OrderedDict[int, Callable[..., None]]

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        if preparation_of(model) is None:
            return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]
        finish_preparation(model)
        adopt(model)
        # In evaluation mode, accelerate applies autocast and wraps the model in nothing.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)  # type: ignore[no-any-return]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        check_current(optimizer, "Create the optimizer after prepare().")
        return super().prepare_optimizer(optimizer, device_placement)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        preparation = preparation_of(model)
        with preparation.reduction.defer() if preparation else super().no_sync(model):
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:
            for model in self._prepared():
                stack.enter_context(prepared(model).reduction.backward())
            super().backward(loss, **kwargs)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        if preparation_of(model) is None:
            return super().get_state_dict(model, unwrap)
        return full_state_dict(model, cpu_offload=True, rank0_only=True, timeout_s=limit_s(model))

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        if preparation_of(model) is None or not safe_serialization:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        save_safetensors(model, save_directory, max_shard_size=max_shard_size)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        models, optimizers = self._prepared(), self._optimizers_of_prepared()
        if not models:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        together = _together(models)
        for model in models:
            broadcast_buffers(model, "Accelerator.save_state")

        def hide(_: list[nn.Module], weights: list[Any], folder: str) -> None:
            weights[:] = [each for each in weights if not isinstance(each, _Shards)]
            discard_states(os.path.join(folder, FOLDER), together)

        with (
            self._hidden(optimizers) as every_model,
            _around(self._save_model_state_pre_hook, functools.partial(_show, every_model), hide),
            fail_on_all_ranks(together, "Accelerator.save_state"),
        ):
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        save_states(os.path.join(folder, FOLDER), together, optimizers, with_model=True)
        return folder

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        models, optimizers = self._prepared(), self._optimizers_of_prepared()
        if not models:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        left: list[nn.Module] = []
        folder = ""

        def show(shown: list[nn.Module], path: str) -> None:
            nonlocal folder
            folder = os.path.join(path, FOLDER)
            shown[:] = every_model

        def hide(shown: list[nn.Module], _: str) -> None:
            left[:] = [each for each in shown if each in models]
            shown[:] = [each for each in shown if each not in models]

        with (
            self._hidden(optimizers) as every_model,
            _around(self._load_model_state_pre_hook, show, hide),
        ):
            super().load_state(input_dir, load_kwargs, **kwargs)
        if left not in ([], models):
            raise OptionError(
                f"load_state: hooks have removed {len(models) - len(left)} of {len(models)} "
                "prepared models, which one folder holds. Remove all that a hook has loaded, or "
                "none."
            )
        if not os.path.isdir(folder):
            raise OptionError(
                f"load_state: {os.path.dirname(folder)} has no folder {FOLDER!r}, which save_state "
                "writes for a prepared model. To load the weights of another checkpoint, use "
                "zpasses.load_safetensors(model, path)."
            )
        load_states(folder, _together(models), optimizers, with_model=bool(left))

    def _prepared(self) -> list[nn.Module]:
        return [each for each in self._models if preparation_of(each) is not None]

    def _optimizers_of_prepared(self) -> list[torch.optim.Optimizer]:
        prepared = {param for model in self._prepared() for param in model.parameters()}
        found = []
        for each in self._optimizers:
            params = [param for group in each.param_groups for param in group["params"]]
            if any(param in prepared or is_sharded_parameter(param) for param in params):
                found.append(each.optimizer)
        return found

    @contextlib.contextmanager
    def _hidden(self, optimizers: list[torch.optim.Optimizer]) -> Iterator[list[nn.Module]]:
        """accelerate saves and loads only what else it has prepared. Yields all models."""
        both: tuple[list[nn.Module], list[Any]] = self._models, self._optimizers
        self._models = [each for each in both[0] if preparation_of(each) is None]
        self._optimizers = [each for each in both[1] if each.optimizer not in optimizers]
        try:
            yield both[0]
        finally:
            self._models, self._optimizers = both


class _Shards(dict[str, Any]):
    """The state of a prepared model that hooks get: the rows of this rank."""


def _show(
    every_model: list[nn.Module], models: list[nn.Module], weights: list[Any], _: str
) -> None:
    """A hook that gives those after it all models, and for each a state."""
    others = iter(list(weights))
    models[:] = every_model
    weights[:] = [
        next(others) if preparation_of(each) is None else _Shards(each.state_dict())
        for each in every_model
    ]


@contextlib.contextmanager
def _around(
    hooks: OrderedDict[int, Callable[..., None]],
    first: Callable[..., None],
    last: Callable[..., None],
) -> Iterator[None]:
    """In the block, call `first` before the hooks and `last` after them."""
    added = RemovableHandle(hooks), RemovableHandle(hooks)
    for handle, hook in zip(added, (first, last), strict=True):
        hooks[handle.id] = hook
    hooks.move_to_end(added[0].id, last=False)
    try:
        yield
    finally:
        for handle in added:
            handle.remove()


def _together(models: list[nn.Module]) -> nn.Module:
    """One module of all models, for an optimizer of several models."""
    return nn.ModuleDict({str(number): model for number, model in enumerate(models)})
