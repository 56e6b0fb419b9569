"""The training program of the suite `faults`: every rank runs `train`, and one of them meets a
fault.

The program trains a small model for a few steps, with a graph break in its forward. The fault
happens on one rank, at a drawn place of a drawn step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zpasses
from zpasses.pipeline.events import observe_graphs

__all__ = ["COMPILE_PLACES", "ENDINGS", "PLACES", "Fault", "Program", "RankResult", "train"]

PLACES = (
    "before the first compile",
    "in a pass",
    "in a backward pass of the compiler",
    "before forward",
    "between the graphs of forward",
    "before backward",
    "in backward",
    "before the optimizer step",
    "in the optimizer step",
    "after the optimizer step",
)
"""Where a rank can fail."""

COMPILE_PLACES = PLACES[:3]
"""Those that only the first step comes to."""

ENDINGS = ("raise", "raise and exit", "exit", "kill", "stop", "sleep beyond the limit")
"""What a failing rank does. The first stays alive after the exception left the program."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on one rank."""

    kind: str
    """One of ENDINGS, or what else the rank does differently."""
    rank: int
    step: int
    """Step in which it happens, from 0."""
    place: str = ""
    """One of PLACES, for ENDINGS."""


@dataclass(frozen=True)
class Program:
    """What all ranks are to run."""

    ranks: int
    stage: int
    steps: int
    micro_batches: int
    window: bool
    """Whether the micro-batches of a step share one `coalesce_grad_reduction`."""
    merged: bool
    """Whether buckets merge collectives; otherwise there is one per parameter."""
    limit_s: float
    """Option `agreement_timeout_s`."""
    fault: Fault
    scratch: str
    """Folder for the file that says when the fault happened."""


@dataclass(frozen=True)
class RankResult:
    """How a rank ended."""

    error: str
    """Type and text of the exception that ended training; "" if training ended normally."""
    right: bool
    """Whether the parameters are those of an unsharded run after as many steps."""
    steps: int
    """Steps that ended normally."""
    at: float
    """When training ended, as `time.time()`."""


class InjectedError(RuntimeError):
    """The exception of an injected fault."""


class _Layers(nn.Module):
    """Layers of equal shape, so that a mistaken parameter cannot be told from shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.order: tuple[str, ...] = ("a", "b", "c")
        self.injector: _Injector | None = None

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order[:2]:
            x = torch.tanh(getattr(self, name)(x))
        x = _between_graphs(self, x)
        for name in self.order[2:]:
            x = torch.tanh(getattr(self, name)(x))
        return self.head(x)  # type: ignore[no-any-return]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _between_graphs(model: _Layers, x: Tensor) -> Tensor:
    if model.injector is not None:
        model.injector.reach("between the graphs of forward")
    return x


class _Injector:
    """Lets the fault happen on its rank, at its place and step."""

    def __init__(self, program: Program) -> None:
        self._program, self._fault = program, program.fault
        self._mine = program.fault.rank == dist.get_rank()
        self.step = 0

    def reach(self, place: str) -> None:
        fault = self._fault
        if self._mine and fault.place == place and fault.step <= self.step:
            self._mine = False
            self._happen()

    def differs(self, kind: str) -> bool:
        """Whether this rank differs from the others in this step, in the given way."""
        mine = self._mine and self._fault.kind == kind and self._fault.step == self.step
        if mine:
            self.note_time()
        return mine

    def note_time(self) -> None:
        file = Path(self._program.scratch, "fault")
        if not file.exists():
            file.write_text(str(time.time()))

    def _happen(self) -> None:
        kind = self._fault.kind
        self.note_time()
        if kind in ("raise", "raise and exit"):
            raise InjectedError(f"injected into rank {dist.get_rank()}")
        if kind == "exit":
            os._exit(0)
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        elif kind == "sleep beyond the limit":
            time.sleep(self._program.limit_s + 12)
        elif kind == "sleep within the limit":
            time.sleep(self._program.limit_s / 3)
        else:
            raise AssertionError(kind)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, compiles reach the places that lie in the compiler."""

        def observe(observed: Any) -> None:
            backward = "backward" in observed.kind
            self.reach("in a backward pass of the compiler" if backward else "in a pass")

        with observe_graphs(observe):
            yield


def train(program: Program) -> RankResult:
    """Train, meet the fault, and compare this rank's shards with an unsharded run."""
    torch.manual_seed(0)
    model, reference = _Layers(), _Layers()
    reference.load_state_dict(model.state_dict())
    expected = _reference(reference, program)
    injector = _Injector(program)
    done, error = 0, ""
    try:
        with injector.watching():
            for _ in _steps(model, program, injector):
                done += 1
    except Exception as caught:
        if program.fault.kind == "raise and exit" and _is_injected(caught):
            os._exit(1)
        error = f"{type(caught).__name__}: {caught}"
    at = time.time()
    return RankResult(error, _equals(model, expected[done]), done, at)


def _is_injected(error: BaseException | None) -> bool:
    return error is not None and (
        "injected into" in str(error) and f"rank {dist.get_rank()}" in str(error)
    )


def _steps(model: _Layers, program: Program, injector: _Injector) -> Iterator[None]:
    """Each step of sharded training."""
    fault, mine = program.fault, program.fault.rank == dist.get_rank()
    injector.reach("before the first compile")
    mesh = init_device_mesh("cpu", (program.ranks,))
    if mine and fault.kind == "freezes a parameter":
        injector.note_time()
        model.b.weight.requires_grad_(False)
    zpasses.shard(model, mesh=mesh)
    options: dict[str, Any] = {
        "codegen": "eager",
        "agreement_timeout_s": program.limit_s,
        "zero_stage": program.stage,
    }
    if not program.merged:
        options["pipeline"] = _SINGLE[program.stage]
        del options["zero_stage"]
    if mine and fault.kind == "compiles another pipeline":
        injector.note_time()
        other = 2 if program.stage == 3 else 3
        options = (
            {**options, "zero_stage": other}
            if program.merged
            else {**options, "pipeline": _SINGLE[other]}
        )
    model.injector = injector
    compiled = torch.compile(model, backend="zpasses", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer.register_step_pre_hook(lambda *_: injector.reach("in the optimizer step"))
    for step in range(program.steps):
        injector.step = step
        if injector.differs("ends after fewer steps"):
            return
        if injector.differs("evaluates alone"):
            with torch.no_grad():
                compiled(_data(program, fault.rank, step, 0))
        _accumulate(compiled, model, program, injector)
        injector.reach("before the optimizer step")
        optimizer.step()
        if injector.differs("steps twice"):
            optimizer.step()
        optimizer.zero_grad()
        injector.reach("after the optimizer step")
        yield


def _accumulate(compiled: Any, model: _Layers, program: Program, injector: _Injector) -> None:
    count = program.micro_batches
    count += injector.differs("one more micro-batch")
    count -= injector.differs("one micro-batch less")
    window = zpasses.coalesce_grad_reduction(compiled) if program.window else None
    with window or contextlib.nullcontext():
        for micro in range(count):
            model.order = ("a", "b", "c")
            if injector.differs("reads in another order"):
                model.order = ("b", "a", "c")
            elif injector.differs("reads another layer"):
                model.order = ("a", "c", "c")
            elif injector.differs("skips a layer"):
                model.order = ("a", "b")
            injector.reach("before forward")
            x = _data(program, dist.get_rank(), injector.step, micro)
            if injector.differs("another batch size"):
                x = torch.cat([x, x])  # the mean of the loss stays what it was
            y = compiled(x)
            y.register_hook(lambda grad: injector.reach("in backward"))
            injector.reach("before backward")
            _loss(y).backward()


_SINGLE = {
    1: "merge-reads,gather-params,reduce-grads,cache-params,defer-reduction",
    2: "merge-reads,gather-params,reduce-grads,cache-params,defer-reduction",
    3: "merge-reads,gather-params,reduce-grads,reshard-after-forward,defer-reduction",
}
"""Pipelines with a collective per parameter."""


def _data(program: Program, rank: int, step: int, micro: int) -> Tensor:
    seed = (rank * program.steps + step) * 16 + micro
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


def _loss(y: Tensor) -> Tensor:
    return y.square().mean()


def _micro_batches(program: Program, rank: int, step: int) -> int:
    """How many micro-batches a rank runs in a step, if the right parameters depend on it: a window
    reduces once, after however many micro-batches each rank had.
    """
    fault, count = program.fault, program.micro_batches
    if program.window and (rank, step) == (fault.rank, fault.step):
        count += fault.kind == "one more micro-batch"
        count -= fault.kind == "one micro-batch less"
    return count


def _reference(model: _Layers, program: Program) -> list[dict[str, Tensor]]:
    """Parameters of unsharded training on the data of all ranks, after 0, 1, ... steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

    def now() -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    found = [now()]
    for step in range(program.steps):
        for rank in range(program.ranks):
            for micro in range(_micro_batches(program, rank, step)):
                (_loss(model(_data(program, rank, step, micro))) / program.ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(now())
    return found


def _equals(model: _Layers, expected: dict[str, Tensor]) -> bool:
    """Compare local shards, because a gather could wait for a rank that is gone."""
    for name, param in model.named_parameters():
        local = param.detach()
        full = expected[name]
        if isinstance(local, DTensor):
            local, full = local.to_local(), _own_rows(full)
        if local.shape != full.shape or not torch.allclose(local, full, rtol=1e-4, atol=1e-5):
            return False
    return True


def _own_rows(full: Tensor) -> Tensor:
    chunks = full.chunk(dist.get_world_size())
    rank = dist.get_rank()
    return chunks[rank] if rank < len(chunks) else full[:0]
