"""The tensors of a model that a checkpoint holds: names, tied names, and gathers of one tensor."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zpasses import compat
from zpasses.errors import AgreementError, ShardingError
from zpasses.graph.dialect import rows_per_rank
from zpasses.graph.padding import padded
from zpasses.ranks.agree import exchange, first_two
from zpasses.ranks.vote import TimeLimit, has_other_ranks
from zpasses.runtime.early_steps import has_stepped
from zpasses.runtime.edits import log_of, origin_of, owner_of
from zpasses.runtime.run_checks import limited_over
from zpasses.sharding.module import gathering_reads

_WRAPPER = "_orig_mod."
"""What `torch.compile(model)` adds to names."""

TIMEOUT = "timeout_s=... (of a trainer: options={'agreement_timeout_s': ...})"


@dataclass(frozen=True)
class ModelTensor:
    """A parameter or buffer of a model's state dict."""

    tensor: Tensor
    """The tensor itself: a DTensor, or a plain tensor that every rank holds."""
    names: tuple[str, ...]
    """Its names without `_orig_mod.`, the one to save first. Several if it is tied."""

    @property
    def name(self) -> str:
        return self.names[0]


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without what `torch.compile(model)` adds to it."""
    return name.replace(_WRAPPER, "")


def state_names(model: nn.Module) -> dict[str, Any]:
    """Name without `_orig_mod.` -> value, of everything in the state dict of a model.

    The values are the parameters and buffers themselves.

    Raises:
        ShardingError: if two names are equal without `_orig_mod.`.
    """
    found: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        plain = plain_name(name)
        if plain in found:
            raise ShardingError(
                f"two tensors of {type(model).__name__} are named {plain!r} without "
                f"{_WRAPPER!r}, which torch.compile adds. Rename one of them."
            )
        found[plain] = value
    return found


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Return the tensors of a model's state dict, each once, in its order.

    Raises:
        ShardingError: for an entry that is not a tensor, such as a module's extra state.
    """
    tied: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, value in state_names(model).items():
        if not isinstance(value, Tensor):
            raise ShardingError(
                f"{name!r} in the state dict of {type(model).__name__} is a "
                f"{type(value).__name__}, and safetensors files hold tensors only. Save the model "
                "with torch.distributed.checkpoint instead."
            )
        tied.setdefault(id(value), []).append(name)
        tensors[id(value)] = value
    dropped = _names_that_transformers_ties(model)
    # The order is stable, so the first name is kept that is not tied to another one.
    return [
        ModelTensor(tensors[key], tuple(sorted(names, key=lambda name: name in dropped)))
        for key, names in tied.items()
    ]


def _names_that_transformers_ties(model: nn.Module) -> frozenset[str]:
    """Names that `from_pretrained` ties to another one: `save_pretrained` leaves them out."""
    original = getattr(model, "_orig_mod", model)
    return frozenset(getattr(original, "all_tied_weights_keys", None) or ())


# --- ranks ----------------------------------------------------------------------------------------
def sharding_groups(model: nn.Module) -> list[str]:
    """Return the names of the process groups over which a model is sharded, sorted: also those of
    tensor and expert parallelism, over which whole parameters are gathered.
    """
    specs = [spec for _, spec, _ in gathering_reads(model)]
    inner = {
        compat.group_name(spec.layout.inner_mesh.get_group(dim))
        for spec in specs
        if spec.layout.inner_mesh is not None
        for dim in range(spec.layout.inner_mesh.ndim)
    }
    return sorted({*inner, *(name for spec in specs for name in spec.layout.sharding_groups)})


def check_no_step_under_way(model: nn.Module) -> None:
    """Raise ShardingError if a parameter has stepped in backward, and `optimizer.step()` has not
    been called.
    """
    for name, param in model.named_parameters():
        if has_stepped(param):
            raise ShardingError(
                f"{plain_name(name)} has stepped in backward (zpasses.step_in_backward), and a "
                "checkpoint would mix parameters before and after their step. Save after "
                "optimizer.step()."
            )


def writing_rank(model: nn.Module) -> int:
    """Return the global rank that keeps what only one rank keeps.

    It is the first rank of the largest mesh over which the model is sharded.
    """
    mesh = largest_mesh(model)
    if mesh is not None:
        return int(mesh.mesh.min())
    return compat.global_rank() if _ranks() else 0


def largest_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the largest mesh over which the model is sharded; None if it is not sharded."""
    meshes = (spec.layout.whole_mesh for _, spec, _ in gathering_reads(model))
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def _ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def agree(
    groups: Iterable[str],
    occasion: str,
    timeout_s: float,
    *,
    described: Any = None,
    model: nn.Module | None = None,
    failure: str | None = None,
    what: str = "what they hold",
) -> None:
    """Raise on every rank if one of them failed, or describes another model or checkpoint.

    Args:
        groups: names of the process groups, in one order on all ranks.
        occasion: what the ranks are doing.
        timeout_s: seconds to wait for the other ranks.
        described: what must be equal on all ranks: plain JSON values.
        model: one whose parameters must be the same, after the same edits.
        failure: why this rank cannot go on.
        what: what `described` describes, for the error.

    Raises:
        ShardingError: if a rank failed.
        AgreementError: if ranks differ, or if one does not come in time.
    """
    failures = {} if failure is None else {dist.get_rank() if _ranks() else 0: failure}
    different: list[int] = []
    # Every vote is held, also after a failure: ranks of another group wait in it. A failure reaches
    # ranks that share no group with it in the rounds after the first.
    groups = list(groups)
    for _ in groups:
        for group in groups:
            compared = json.dumps([described, _edits_of(model, group)])
            digest = hashlib.sha256(compared.encode()).hexdigest()[:16]
            failed, (_, *others) = exchange(
                group,
                occasion,
                [min(failures.items(), default=None), digest],
                TimeLimit(timeout_s, TIMEOUT),
                merge=lambda answers: [
                    min((failed for failed, _ in answers if failed), default=None),
                    first_two([digest for _, digest in answers]),
                ],
            )
            if failed is not None:
                failures[int(failed[0])] = failed[1]
            different += [compat.group_ranks(group)[at] for at, _ in others]
    if failures:
        rank, text = min(failures.items())
        raise ShardingError(f"{occasion} failed on rank {rank}: {text}")
    if different:
        raise AgreementError(
            f"{occasion}: ranks differ in {what}; rank {different[0]} differs from the first rank "
            "of its group. Every rank must pass the same model and the same checkpoint, and make "
            "the same edits and steps before."
        )


def _edits_of(model: nn.Module | None, group: str) -> list[int]:
    """Numbers of the parameters that a group shards, and of all edits of them. Experts of other
    groups may have other values.
    """
    log = log_of(group)
    return [
        origin_of(param)
        for param in (model.parameters() if model is not None else ())
        if (owner := owner_of(param)) is not None and any(each is log for each in owner.logs)
    ]


@contextlib.contextmanager
def agreed(
    groups: Iterable[str],
    occasion: str,
    timeout_s: float,
    *,
    described: Any = None,
    model: nn.Module | None = None,
    what: str = "what they hold",
) -> Iterator[None]:
    """If the block fails on a rank, raise on every rank at its end. Call it on every rank.

    The block must not communicate after what may fail on one rank only.

    Args:
        groups: names of the process groups, in one order on all ranks.
        occasion: what the block does, for the error.
        timeout_s: seconds to wait for the other ranks.
        described: what must be equal on all ranks at the end of the block: plain JSON values.
        model, what: as for `agree`.

    Raises:
        ShardingError: on every rank, if the block failed on one.
        AgreementError: if ranks differ, or if one does not come in time.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    if isinstance(failure, ShardingError):
        text = str(failure)
    try:
        agree(
            groups, occasion, timeout_s, described=described, model=model, failure=text, what=what
        )
    except Exception as error:
        if failure is not None:
            raise error from failure
        raise


# --- gathers --------------------------------------------------------------------------------------
_GATHER = "a gather of a model's tensor"


def _limit(timeout_s: float | None) -> TimeLimit | None:
    return None if timeout_s is None else TimeLimit(timeout_s, TIMEOUT)


def gather_full(
    tensor: Tensor, destination: int | None = None, timeout_s: float | None = None
) -> Tensor | None:
    """Return a copy of the full tensor, detached, with memory of its own.

    Call it on every rank of the tensor's mesh.

    Args:
        tensor: a DTensor, or a plain tensor, which every rank holds.
        destination: global rank that gets the tensor. The others get None. None gives it to all.
            If the mesh lacks that rank, no rank of it gets the tensor.
        timeout_s: seconds to wait for the other ranks; None takes the limit of the graphs that ran.

    Raises:
        AgreementError: if another rank does not come in time.
        RuntimeError: if this rank lacks memory for the full tensor. If it is the destination of
            rows, it has taken part in the gather, and the next one may follow.
    """
    wanted = destination is None or not _ranks() or dist.get_rank() == destination
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return _own_copy(tensor) if wanted else None
    with limited_over(tensor.device_mesh, _GATHER, _limit(timeout_s)):
        return _gather_whole(tensor, destination, wanted=wanted)


def _gather_whole(tensor: DTensor, destination: int | None, *, wanted: bool) -> Tensor | None:
    mesh = tensor.device_mesh
    if compat.local_of(tensor).device.type == "cpu" != mesh.device_type:  # it rests on the host
        local = compat.local_of(tensor).to(mesh.device_type)
        tensor = compat.make_dtensor(local, mesh, tensor.placements, tensor.shape)
    local = compat.local_of(tensor)
    if mesh.ndim > 1 or not (tensor.placements[0].is_replicate() or _is_rows(tensor)):
        full = tensor.full_tensor()  # sharded by something else
        return _own_copy(full) if wanted else None
    if tensor.placements[0].is_replicate() or mesh.size() == 1:
        return _own_copy(local) if wanted else None
    if tensor.numel() == 0:
        return local.new_empty(tensor.shape) if wanted else None
    return _gather_rows(tensor, local, destination)


def copy_of_first_rank(
    tensor: Tensor, mesh: DeviceMesh | None, timeout_s: float | None = None
) -> Tensor:
    """Return a copy of a plain tensor, such as a buffer, as the first rank of the mesh has it.

    Call it on every rank of the mesh. The dimensions come in one order on all ranks. Names of
    groups would not: the value of another rank would reach some.

    Args:
        timeout_s: as for `gather_full`.

    Raises:
        AgreementError: if another rank does not come in time.
    """
    copy = _own_copy(tensor)
    with limited_over(mesh, _GATHER, _limit(timeout_s)):
        for dim in range(mesh.ndim if mesh is not None and copy.numel() else 0):
            group = cast(DeviceMesh, mesh).get_group(dim)
            if has_other_ranks(compat.group_name(group)):
                as_bytes = copy.view(-1).view(torch.uint8)  # not all backends know all dtypes
                dist.broadcast(as_bytes, group=group, group_src=0)
    return copy


def _own_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _is_rows(tensor: DTensor) -> bool:
    placement = tensor.placements[0]
    return type(placement) is Shard and placement.dim == 0


def _gather_rows(tensor: DTensor, local: Tensor, destination: int | None) -> Tensor | None:
    """Gather as bytes, because backends differ in the dtypes that they know."""
    group, ranks = tensor.device_mesh.get_group(), tensor.device_mesh.size()
    block = rows_per_rank(tensor.shape[0], ranks)
    sent = padded(local, block).view(-1).view(torch.uint8)
    if destination is not None and destination not in dist.get_process_group_ranks(group):
        return None
    if destination is not None and dist.get_rank() != destination:
        dist.gather(sent, None, dst=destination, group=group)
        return None
    try:
        gathered = torch.empty(ranks * sent.numel(), dtype=torch.uint8, device=sent.device)
    except RuntimeError:
        if destination is not None:  # the other ranks send in any case, into what is thrown away
            dist.gather(sent, [torch.empty_like(sent)] * ranks, dst=destination, group=group)
        raise
    if destination is None:
        dist.all_gather_into_tensor(gathered, sent, group=group)
    else:
        dist.gather(sent, list(gathered.chunk(ranks)), dst=destination, group=group)
    full = gathered.view(tensor.dtype).view(ranks * block, *tensor.shape[1:])
    # A view would keep the padding alive, and files of its storage would contain it.
    return full if full.shape == tensor.shape else full[: tensor.shape[0]].clone()


_ENCODED = re.compile(r"(.+?)_(?:torchao_)?(?:int8|m?x?fp8|nf4|fp4)(?:_bf16|_fp16)?_\d+")


def encoding_advice(missing: Iterable[str], held: Iterable[str]) -> str | None:
    """Returns what to do about a parameter that rests encoded in the model or in the checkpoint,
    and otherwise in the other; None if there is none.

    Args:
        missing: names that the checkpoint lacks.
        held: names that it has.
    """

    def stem(name: str) -> str:
        found = _ENCODED.fullmatch(name)
        return name if found is None else found[1]

    wanted = {stem(name): name for name in missing}
    for name in held:
        if (other := wanted.get(stem(name), name)) != name:
            do = (
                "Load it before zpasses.encode_parameters."
                if stem(name) == name
                else "Call zpasses.encode_parameters with this format before you load it."
            )
            return f"The checkpoint has {name} in place of {other}. {do}"
    return None
