"""What all trainers need: shard a model, compile it in place, and reduce its gradients once per
optimizer step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.accumulation import GradientWindow, coalesce_grad_reduction
from zpasses.errors import ShardingError, ZpassesError
from zpasses.pipeline import Options
from zpasses.sharding.module import is_ignored
from zpasses.sharding.shard import shard

M = TypeVar("M", bound=nn.Module)

ATTRIBUTE = "_zpasses_preparation"
PACK_MB = 64.0
"""Size of the flat buffers in MiB, for a model on the host and a mesh on accelerators."""


class DeferredReduction:
    """Reduces the gradients of a model once per optimizer step, for trainers that say before a
    backward whether it is the last one of the step.

    Backwards inside `defer()` reduce nothing. The first one outside, which runs inside
    `backward()`, is the last one of a gradient window and reduces the sum, overlapped with its own
    compute.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._open: tuple[coalesce_grad_reduction, GradientWindow] | None = None
        self._depth = 0

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Backwards in the block add up gradients on this rank."""
        if self._open is None:
            block = coalesce_grad_reduction(self._model)
            self._open = block, block.__enter__()
        self._depth += 1
        try:
            yield
        except BaseException as error:
            self._close(error)
            raise
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Runs one backward in the block. If gradients are pending, and the block is not inside
        `defer()`, this backward reduces them.
        """
        if self._open is None or self._depth:
            yield
            return
        self._open[1].last()
        try:
            yield
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)

    def flush(self) -> None:
        """Reduce gradients that are still pending, such as those of a step that ended early."""
        if not self._depth:
            self._close(None)

    def _close(self, error: BaseException | None) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened[0].__exit__(type(error) if error else None, error, None)


@dataclass(frozen=True)
class Preparation:
    """How a model was prepared, so that adapters that are added later are sharded alike."""

    mesh: DeviceMesh
    options: Mapping[str, Any] | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reduction: DeferredReduction = field(repr=False)


def prepare_model(
    model: M,
    mesh: DeviceMesh | None = None,
    options: Mapping[str, Any] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    pack_mb: float | None = None,
    *,
    compiles: bool = True,
    caller: str,
) -> M:
    """Shard `model`, compile it in place and remember how. See the `prepare` of each trainer.

    Args:
        caller: the public function, for messages.

    Raises:
        ShardingError: for a model that cannot be sharded.
        OptionError: for wrong options of the backend.
    """
    if not isinstance(model, nn.Module) or hasattr(model, "_orig_mod"):
        raise ShardingError(
            f"{caller}: got {type(model).__name__}; expected a plain nn.Module that is not "
            "compiled yet. prepare() compiles it in place; pass options=... for the backend."
        )
    if preparation_of(model) is not None:
        raise ShardingError(
            f"{caller}: {type(model).__name__} is prepared already. Prepare a model once."
        )
    if not dist.is_initialized():
        raise ShardingError(
            f"{caller}: no process group. Start the script with torchrun, and create the trainer's "
            "arguments first (TrainingArguments or Accelerator), or call init_process_group()."
        )
    Options.parse(options)
    mesh = mesh or init_device_mesh(_device_type(), (dist.get_world_size(),))
    if pack_mb is None and mesh.device_type != "cpu" and _on_host(model):
        pack_mb = PACK_MB
    shard(
        model,
        mesh=mesh,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        ignored_params=ignored_params,
        pack_mb=pack_mb,
    )
    _move_buffers(model, mesh.device_type)
    if compiles:
        compat.compile_module(model, backend="zpasses", options=dict(options or {}))
    done = Preparation(mesh, options, param_dtype, reduce_dtype, DeferredReduction(model))
    setattr(model, ATTRIBUTE, done)
    return model


def preparation_of(model: object) -> Preparation | None:
    """Return how a model, or a model inside it, was prepared; None for another object."""
    if not isinstance(model, nn.Module):
        return None
    for module in model.modules():
        found = vars(module).get(ATTRIBUTE)
        if isinstance(found, Preparation):
            return found
    return None


def prepared(model: nn.Module) -> Preparation:
    """Return how a model was prepared.

    Raises:
        ZpassesError: if it was not.
    """
    found = preparation_of(model)
    if found is None:
        raise ZpassesError(f"{type(model).__name__} is not prepared for zpasses.")
    return found


def finish_preparation(model: nn.Module) -> Preparation:
    """Shard what was added to a prepared model since, such as adapters of PEFT, and compile the
    module that now contains it.
    """
    inner = prepared(model)
    if any(not isinstance(each, DTensor) and not is_ignored(each) for each in model.parameters()):
        shard(
            model,
            mesh=inner.mesh,
            param_dtype=inner.param_dtype,
            reduce_dtype=inner.reduce_dtype,
        )
        _move_buffers(model, inner.mesh.device_type)
    if ATTRIBUTE in vars(model):
        return inner
    compat.compile_module(model, backend="zpasses", options=dict(inner.options or {}))
    done = replace(inner, reduction=DeferredReduction(model))
    setattr(model, ATTRIBUTE, done)
    return done


def _device_type() -> str:
    if dist.get_backend() == "gloo":
        return "cpu"
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type


def _on_host(model: nn.Module) -> bool:
    return all(param.device.type == "cpu" for param in model.parameters())


def _move_buffers(model: nn.Module, device_type: str) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in (device_type, "meta"):
                module._buffers[name] = buffer.to(device_type)
