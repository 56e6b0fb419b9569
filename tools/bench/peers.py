"""The peers: ways to train the same model with data parallelism.

Each peer builds a `Trainer` on every rank from the same unsharded model. Optimizer, data and
measurements are the same for all peers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import zpasses
from zpasses.errors import OptionError, suggestion
from zpasses.pipeline import Options
from zpasses.tools.bench.model import GPT

LEARNING_RATE = 3e-4


class Trainer:
    """A model that is ready to train, and its optimizer.

    Args:
        step: maps (inputs, targets) to the loss.
        gradient_scale: factor of the loss in backward.
    """

    def __init__(
        self, model: nn.Module, step: Callable[..., Tensor], gradient_scale: float = 1.0
    ) -> None:
        self.model, self._forward, self._gradient_scale = model, step, gradient_scale
        self.untracked_bytes = 0
        """Memory that no Python object holds and that is kept between steps."""
        self.window: Callable[[int], AbstractContextManager[Any]] = _nothing
        """Number of backwards -> context around them, so that gradients are reduced once."""
        self.around: Callable[[bool], AbstractContextManager[Any]] = _nothing
        """Whether it is the last backward of a window -> context around it and its forward."""
        # A fused update takes parameters of one mesh.
        groups = [{"params": group} for group in _by_mesh(model.parameters())]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward. Returns the loss of this rank's batch."""
        loss = self._forward(inputs, targets)
        (loss if self._gradient_scale == 1.0 else loss * self._gradient_scale).backward()
        return loss.detach()

    def accumulate(
        self,
        data: Sequence[tuple[Tensor, Tensor]],
        once: bool,
        before_last: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """Run forward and backward per batch; gradients add up. Returns the mean loss.

        Args:
            once: reduce gradients in the last backward only, if the peer can.
            before_last: called before the last forward.
        """
        losses = []
        with self.window(len(data)) if once and len(data) > 1 else contextlib.nullcontext():
            for number, batch in enumerate(data, 1):
                if number == len(data):
                    before_last()
                with self.around(number == len(data) or not once):
                    losses.append(self.backward(*batch))
        return torch.stack(losses).mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradient_norm(self) -> float | None:
        """Norm of the averaged gradient of the whole model, between `backward` and `update`; None
        if the peer does not expose gradients.
        """
        norms = []
        for group in _by_mesh(self.model.parameters()):
            grads = [param.grad for param in group if param.grad is not None]
            norm: Any = nn.utils.get_total_norm(grads)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        return math.hypot(*norms)


def _nothing(_: object) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _by_mesh(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters of each device mesh."""
    found: dict[object, list[nn.Parameter]] = {}
    for param in params:
        found.setdefault(getattr(param, "device_mesh", None), []).append(param)
    return list(found.values())


_Build = Callable[[GPT, DeviceMesh], Trainer]


@dataclass(frozen=True)
class Peer:
    """One way to train."""

    name: str
    summary: str
    build: _Build
    needs: str | None = None
    """A module that must be importable."""
    install: str = ""
    """How to install that module."""
    ranks: int | None = None
    """Number of processes; None is the requested number."""
    reduces: bool = True
    """Whether gradients are averaged over ranks, exactly. If so, losses must equal those of other
    peers with the same worker.
    """
    worker: str = "zpasses.tools.bench.worker"
    """Module that measures the peer in the suite "train"."""
    any_mesh: bool = False
    """Whether it takes meshes of hybrid sharding, and models with tensor parallelism."""

    def missing(self) -> str | None:
        """Why the peer cannot run here, or None."""
        if self.needs is None:
            return None
        if importlib.util.find_spec(self.needs.partition(".")[0]) is None:
            return f"not installed: {self.install}"
        # In a separate process, because some of these packages change torch when they are imported.
        tried = subprocess.run(
            [sys.executable, "-c", f"import {self.needs}"],
            capture_output=True,
            text=True,
            check=False,
        )
        return (
            f"does not import: {tried.stderr.strip().splitlines()[-1]}"
            if tried.returncode
            else None
        )


def _compute(model: GPT, mesh: DeviceMesh) -> Trainer:
    return Trainer(model, torch.compile(model))


def _ddp(model: GPT, mesh: DeviceMesh) -> Trainer:
    wrapped = nn.parallel.DistributedDataParallel(
        model, process_group=mesh.get_group(), gradient_as_bucket_view=True
    )
    trainer = Trainer(wrapped, torch.compile(wrapped))
    trainer.untracked_bytes = sum(param.nbytes for param in model.parameters())  # DDP's buckets
    trainer.around = lambda last: contextlib.nullcontext() if last else wrapped.no_sync()
    return trainer


def _fsdp2(compiled: bool) -> _Build:
    def build(model: GPT, mesh: DeviceMesh) -> Trainer:
        for block in model.blocks:
            if compiled:
                block.compile(fullgraph=True)
            fully_shard(block, mesh=mesh)
        whole: Any = fully_shard(model, mesh=mesh)

        def around(last: bool) -> AbstractContextManager[Any]:
            whole.set_requires_gradient_sync(last)
            return contextlib.nullcontext()

        trainer = Trainer(model, model)
        trainer.around = around
        return trainer

    return build


def _with_window(trainer: Trainer) -> Trainer:
    trainer.window = lambda backwards: zpasses.coalesce_grad_reduction(
        trainer.model, backwards=backwards
    )
    return trainer


def _zpasses(**options: Any) -> _Build:
    def build(model: GPT, mesh: DeviceMesh) -> Trainer:
        zpasses.shard(model, mesh=mesh)
        compiled = torch.compile(model, backend="zpasses", options=options)
        return _with_window(Trainer(model, compiled))

    return build


class _EarlyTrainer(Trainer):
    """Parameters step in backward, where their gradients are freed."""

    def gradient_norm(self) -> float | None:
        return None


def _zpasses_early(**options: Any) -> _Build:
    def build(model: GPT, mesh: DeviceMesh) -> Trainer:
        zpasses.shard(model, mesh=mesh)
        trainer = _EarlyTrainer(model, torch.compile(model, backend="zpasses", options=options))
        zpasses.step_in_backward(trainer.optimizer)
        return _with_window(trainer)

    return build


def _zpasses_blocks(model: GPT, mesh: DeviceMesh) -> Trainer:
    zpasses.shard(model, mesh=mesh)
    zpasses.compile_blocks(model, "blocks.*", zero_stage=3)
    return _with_window(Trainer(model, model))


def _simple_fsdp(model: GPT, mesh: DeviceMesh) -> Trainer:
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    sharded = data_parallel(model, mesh, mode="fully_shard")
    return Trainer(
        sharded, torch.compile(sharded), gradient_scale=1 / mesh.size()
    )  # SimpleFSDP sums gradients over ranks


class _DeepSpeedTrainer(Trainer):
    """DeepSpeed runs backward and the update, and owns the gradients."""

    def __init__(self, model: GPT, stage: int) -> None:
        import deepspeed

        super().__init__(model, model)
        numel = sum(param.numel() for param in model.parameters())
        # DeepSpeed allocates buckets at their full size, by default 2 GB each.
        buckets = {
            "reduce_bucket_size": numel,
            "allgather_bucket_size": numel,
            "stage3_prefetch_bucket_size": numel,
        }
        config = {
            # required, but unused: the benchmark makes the batches
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, **buckets},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        self.window = lambda backwards: self._engine.coalesce_grad_reduction()

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._engine(inputs, targets)
        self._engine.backward(loss)
        return loss.detach()

    def update(self) -> None:
        self._engine.step()

    def gradient_norm(self) -> float | None:
        return None


def _deepspeed(stage: int) -> _Build:
    return lambda model, mesh: _DeepSpeedTrainer(model, stage)


def _owns_its_loop(model: GPT, mesh: DeviceMesh) -> Trainer:
    raise NotImplementedError


_DEEPSPEED = "DS_BUILD_OPS=0 pip install --no-build-isolation 'deepspeed>=0.19'"


def _all_peers() -> Iterator[Peer]:
    yield Peer("compute", "one process, no communication", _compute, ranks=1, reduces=False)
    yield Peer("compute-all", "one such process per rank", _compute, reduces=False)
    yield Peer("ddp", "DistributedDataParallel, compiled", _ddp)
    on_meshes: dict[str, tuple[str, _Build]] = {
        "fsdp2-eager": ("fully_shard per block and root", _fsdp2(compiled=False)),
        "fsdp2-compiled": ("the same, blocks compiled", _fsdp2(compiled=True)),
        **{
            f"zpasses-{stage}": (f"zpasses, ZeRO stage {stage}", _zpasses(zero_stage=stage))
            for stage in (1, 2, 3)
        },
        "zpasses-3-one-ahead": (
            "the same with fixed buckets, one in flight",
            _zpasses(pipeline="zero3-one-ahead"),
        ),
        "zpasses-3-early": (
            "ZeRO stage 3, parameters step in backward",
            _zpasses_early(zero_stage=3),
        ),
        "zpasses-3-blocks": ("ZeRO stage 3, blocks compiled one by one", _zpasses_blocks),
    }
    for name, (summary, build) in on_meshes.items():
        yield Peer(name, summary, build, any_mesh=True)
    both = "zero3{gather-params.encode=int8,reduce-grads.encode=int8}"
    summary, build = "ZeRO stage 3, one byte per value", _zpasses(pipeline=both)
    yield Peer("zpasses-3-int8", summary, build, reduces=False, any_mesh=True)
    for stage in (1, 2, 3):
        summary, build = f"DeepSpeed, ZeRO stage {stage}, eager", _deepspeed(stage)
        yield Peer(f"deepspeed-{stage}", summary, build, "deepspeed", _DEEPSPEED)
    yield Peer(
        "simple-fsdp",
        "torchtitan's SimpleFSDP, compiled",
        _simple_fsdp,
        "torchtitan.experiments.graph_trainer.simple_fsdp",
        "pip install 'torchtitan>=0.3'",
    )
    for name in ("ddp", "fsdp2", "zpasses-2", "zpasses-3"):
        yield Peer(
            f"trainer-{name}",
            f"Hugging Face's Trainer with {name}",
            _owns_its_loop,
            "transformers",
            "pip install 'zpasses[trainers]'",
            worker="zpasses.tools.bench.hf_trainer",
        )


PEERS: dict[str, Peer] = {peer.name: peer for peer in _all_peers()}
"""Every peer by name, in execution order."""


def peer_of(name: str) -> Peer:
    """Return the peer of a name: one of `PEERS`, or zpasses with other options, given as
    "zpasses:OPTION=VALUE:OPTION=VALUE", such as "zpasses:memory_budget=+8MiB". In a value, ";"
    stands for ",", which separates peers.

    Raises:
        OptionError: for an unknown name, or a wrong option.
    """
    if name in PEERS:
        return PEERS[name]
    kind, *texts = name.split(":")
    given = dict(text.replace(";", ",").partition("=")[::2] for text in texts)
    if kind != "zpasses" or not given or not all(given.values()):
        raise OptionError(
            f"got the peer {name!r}; expected zpasses:OPTION=VALUE, or one of "
            f"{', '.join(PEERS)}.{suggestion(name, PEERS)}"
        )
    options = {key: int(value) if value.isdecimal() else value for key, value in given.items()}
    Options.parse(options)
    return Peer(name, "zpasses with these options", _zpasses(**options), any_mesh=True)


def check_peers(names: Sequence[str]) -> None:
    """Raise OptionError for a name without a peer, or with one that only the suite "train" runs."""
    for name in names:
        if peer_of(name).worker != Peer.worker:
            raise OptionError(f"{name} owns its training loop; only the suite train runs it.")
