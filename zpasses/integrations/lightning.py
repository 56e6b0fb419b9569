"""Train with Lightning.

    trainer = lightning.Trainer(strategy=ZpassesStrategy(options={"zero_stage": 3}), ...)
    trainer.fit(module, loader)

See docs/trainers.md.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, empty

from zpasses import compat
from zpasses.checkpoint.model_tensors import gather_full
from zpasses.errors import ZpassesError
from zpasses.integrations.joint_states import (
    broadcast_buffers,
    fail_on_all_ranks,
    load_states,
    save_states,
)
from zpasses.integrations.preparation import (
    preparation_of,
    prepare_model,
    prepared,
)
from zpasses.integrations.pretrained import adopt
from zpasses.pipeline import Options
from zpasses.sharding.replaced_params import check_current
from zpasses.sharding.shard import shard

STATES = "sharded_state"
"""Folder in a checkpoint that holds the optimizers."""
TENSORS = "tensors"
"""Folder that holds entries of a checkpoint that have shards, such as `state_dict`."""
META = "meta.pt"
"""File that holds the other entries, and describes the tensors of these."""

_SAVED_INSIDE_OF_A_STEP = (
    "{} is saved between two micro-batches of a step, and does not hold the gradients that "
    "the step has summed so far. The first step of a run that resumes from it lacks them."
)


_NORMS_AS_NUMBERS = (
    "a hook before the optimizer's step made a plain tensor of norms of gradients, as "
    "lightning.pytorch.utilities.grad_norm does. They are DTensors, of which each rank has a part. "
    "Log param.grad.norm().full_tensor() of each parameter instead, on every rank."
)


class ZpassesStrategy(DDPStrategy):  # type: ignore[misc]
    """A strategy of Lightning that shards the LightningModule and compiles what it is made of.

    All parameters of the LightningModule are sharded before `configure_optimizers` runs. Its direct
    submodules are compiled in place, so put the network into one submodule. Code of the
    LightningModule itself, such as `training_step`, is not compiled. It may read parameters; each
    read gathers.

    Accumulation, clipping and precision are arguments of the Trainer, as always. Gradients are
    reduced once per optimizer step. With automatic optimization, the closure runs before
    `optimizer.step`, not inside it, so optimizers that call it several times are not supported.

    A checkpoint is a folder into which each rank writes its own rows. It loads on any number of
    ranks. Its name appears when it is complete. With `save_weights_only=True` it is a file with the
    full weights, as of other strategies, for `load_from_checkpoint`.

    Args:
        options: options of the backend, such as {"zero_stage": 2}; None is stage 3.
        param_dtype: gather and compute in this dtype; the shards keep theirs. The Trainer's
            `precision="bf16-mixed"` is autocast instead.
        reduce_dtype: reduce gradients in this dtype.
        pack_mb: see `zpasses.shard`. None takes 64 if the model is on the host and the mesh on
            accelerators.
        kwargs: `process_group_backend`, `timeout` and other arguments of DDPStrategy that do not
            concern DDP's wrapper.

    Raises:
        OptionError: for wrong options of the backend.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        pack_mb: float | None = None,
        **kwargs: Any,
    ) -> None:
        Options.parse(options)
        super().__init__(**kwargs)
        self._options = options
        self._sharding: dict[str, Any] = {
            "param_dtype": param_dtype,
            "reduce_dtype": reduce_dtype,
            "pack_mb": pack_mb,
        }

    model: Any
    _inside_of_a_step = False
    """Whether a backward has added to gradients, and the step's last one is still to come."""

    # --- setup ------------------------------------------------------------------------------------
    def setup(self, trainer: Any) -> None:
        self._inside_of_a_step = False  # of an earlier fit that failed
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if preparation_of(self.model) is None:
            mesh = init_device_mesh(self.root_device.type, (self.world_size,))
            prepare_model(
                self.model,
                mesh,
                self._options,
                **self._sharding,
                compiles=False,
                caller="ZpassesStrategy",
            )
            adopt(self.model)
            for child in _callable_children(self.model):
                options = dict(self._options or {})
                compat.compile_module(child, backend="zpasses", options=options)
            for average in _averages(trainer, self.root_device):
                shard(average, mesh=mesh, **self._sharding)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                check_current(optimizer, "Create the optimizer after prepare().")
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """The model is on its device since `setup`."""

    # --- gradients --------------------------------------------------------------------------------
    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._inside_of_a_step = True
        with prepared(self.model).reduction.defer():
            yield

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with prepared(self.model).reduction.backward():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        # The last backward of the step is in the closure, and reduces the gradients of the step.
        result = closure()
        self._inside_of_a_step = False
        try:
            return super().optimizer_step(optimizer, lambda: result, model, **kwargs)
        except RuntimeError as error:
            if "data is not allocated yet" not in str(error):
                raise
            raise ZpassesError(_NORMS_AS_NUMBERS) from error

    # --- buffers ----------------------------------------------------------------------------------
    def on_validation_start(self) -> None:
        broadcast_buffers(self.lightning_module, "the start of validation")

    def on_test_start(self) -> None:
        broadcast_buffers(self.lightning_module, "the start of the test")

    # --- checkpoints ------------------------------------------------------------------------------
    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The shards of this rank. `on_save_checkpoint` may edit the dict."""
        return dict(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}  # `save_checkpoint` writes it

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if "state_dict" in checkpoint:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        module = self.lightning_module
        for callback in module.trainer.callbacks:
            # These make the groups of the run that was saved when a fit starts. The checkpoint is
            # read after that.
            if isinstance(callback, BaseFinetuning):
                callback.on_fit_start(module.trainer, module)
        load_states(checkpoint["optimizer_states"], module, self.optimizers, with_model=False)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise ZpassesError(
                f"ZpassesStrategy.save_checkpoint: got storage_options={storage_options!r}; it "
                "writes folders with torch.distributed.checkpoint, which has none. Leave it out."
            )
        path = Path(self.broadcast(os.fspath(filepath)))
        part, earlier = (path.with_name(f"{path.name}.{word}") for word in ("part", "earlier"))
        module = self.lightning_module
        if self._inside_of_a_step:
            # Lightning saves here when it validates here, and after the first micro-batch of a run
            # that resumes, over what that has loaded. With DDP, the gradients are lost as well.
            rank_zero_warn(_SAVED_INSIDE_OF_A_STEP.format(path))
        else:
            # A run that resumes begins with the buffers of rank 0 on all ranks. So this one goes on
            # with them.
            broadcast_buffers(module, "ZpassesStrategy.save_checkpoint")
        # `save_weights_only` is an export: a file, as Lightning writes it.
        as_file = "optimizer_states" not in checkpoint
        with fail_on_all_ranks(module, "ZpassesStrategy.save_checkpoint"):
            if self.is_global_zero:
                _remove(part)
                (part.parent if as_file else part).mkdir(parents=True, exist_ok=True)
        sharded = {key: value for key, value in checkpoint.items() if _has_shards(value)}
        checkpoint.pop("optimizer_states", None)
        if as_file:
            checkpoint.update(_map_tensors(_on_first_rank, sharded))
        else:
            save_states(part / STATES, module, self.optimizers, with_model=False, drop_pending=True)
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # buffers are of rank 0
            save(sharded, storage_writer=FileSystemWriter(part / TENSORS), planner=planner)
            checkpoint.update(_map_tensors(_described, sharded))
        with fail_on_all_ranks(module, "ZpassesStrategy.save_checkpoint"):
            if self.is_global_zero:
                torch.save(checkpoint, part if as_file else part / META)
                _remove(earlier)
                if path.exists():  # never removed in place: a kill would leave a part of it
                    path.rename(earlier)
                part.rename(path)
                _remove(earlier)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        path = Path(self.broadcast(os.fspath(checkpoint_path)))
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if fitting and not (path / META).exists():
            raise ZpassesError(
                f"{path} is not a checkpoint that ZpassesStrategy resumes from, which is a folder "
                f"with {META}. To start from the weights in a file, such as one of "
                "save_weights_only=True, load them before fit: "
                "module.load_state_dict(torch.load(path)['state_dict'])."
            )
        weights_only = bool(weights_only)
        if path.is_file():
            return torch.load(path, map_location="cpu", weights_only=weights_only)
        loaded = torch.load(path / META, map_location="cpu", weights_only=weights_only)
        make = functools.partial(_empty, prepared(self.model).mesh)
        sharded = {key: _made(make, value) for key, value in loaded.items() if _is_described(value)}
        if sharded:
            load(sharded, checkpoint_id=os.fspath(path / TENSORS))
        return {**loaded, **sharded, "optimizer_states": path / STATES}


# --- entries of a checkpoint ----------------------------------------------------------------------
_DESCRIBED = "zpasses_tensor"


def _has_shards(value: Any) -> bool:
    return any(isinstance(leaf, DTensor) for leaf in compat.pytree.tree_leaves(value))


def _map_tensors(make: Callable[[torch.Tensor], Any], value: Any) -> Any:
    return compat.pytree.tree_map_only(torch.Tensor, make, value)


def _on_first_rank(tensor: torch.Tensor) -> torch.Tensor | None:
    full = gather_full(tensor, destination=0)
    return None if full is None else full.cpu()


def _described(tensor: torch.Tensor) -> dict[str, Any]:
    sharded = isinstance(tensor, DTensor)
    return {_DESCRIBED: [list(tensor.shape), tensor.dtype, sharded]}  # files hold plain types only


def _is_description(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == [_DESCRIBED]


def _is_described(value: Any) -> bool:
    leaves = compat.pytree.tree_leaves(value, is_leaf=_is_description)
    return any(map(_is_description, leaves))


def _made(make: Callable[[Any], Any], value: Any) -> Any:
    return compat.pytree.tree_map(
        lambda leaf: make(leaf) if _is_description(leaf) else leaf, value, is_leaf=_is_description
    )


def _empty(mesh: DeviceMesh, description: dict[str, Any]) -> torch.Tensor:
    shape, dtype, sharded = description[_DESCRIBED]
    if not sharded:
        return torch.empty(shape, dtype=dtype)
    placement = Shard(0) if shape else Replicate()
    return empty(shape, dtype=dtype, device_mesh=mesh, placements=[placement])


def _averages(trainer: Any, device: torch.device) -> Iterator[nn.Module]:
    """Models that Lightning's callbacks average weights in. They are copies of the LightningModule
    from before it was sharded.
    """
    for callback in trainer.callbacks:
        average = getattr(callback, "_average_model", None)
        if isinstance(average, nn.Module):
            params = list(average.parameters())
            # On another device, each update gathers the parameters.
            if params and all(param.device.type == device.type for param in params):
                yield average


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """Submodules with parameters that have a forward, and those inside of containers."""
    for child in module.children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_children(child)
        else:
            yield child
