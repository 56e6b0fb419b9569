"""`zpasses.load_safetensors`: each rank reads its own rows of a safetensors checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.checkpoint.model_tensors import (
    ModelTensor,
    agreed,
    encoding_advice,
    model_tensors,
    sharding_groups,
)
from zpasses.checkpoint.safetensors_writer import DTYPE_CODES
from zpasses.errors import ShardingError, some_of
from zpasses.ranks.vote import DEFAULT_TIMEOUT_S
from zpasses.runtime.param_value import mark_edited

_OCCASION = "zpasses.load_safetensors"
_INDEX = ".safetensors.index.json"


class LoadResult(NamedTuple):
    """What `load_safetensors` did not load. As the result of `load_state_dict`."""

    missing_keys: list[str]
    """Names of the model that the checkpoint lacks. Their values are unchanged."""
    unexpected_keys: list[str]
    """Names of the checkpoint that the model lacks."""


def load_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> LoadResult:
    """Load a safetensors checkpoint into a model in place. Call it on every rank.

    Each rank reads only its own rows of sharded parameters, and nothing is communicated but the
    result of the checks. Values are converted to the dtype of the model. A tied weight may have any
    of its names in the checkpoint. Nothing is changed before all ranks have checked all names and
    shapes.

    Args:
        model: a sharded module, a module that contains sharded ones, or `torch.compile` of one. If
            it was built on meta, call `to_empty(device=...)` first.
        path: a folder that `save_safetensors` or `save_pretrained` wrote, one of its files
            `*.safetensors`, or an index file `*.safetensors.index.json`.
        strict: raise if names are missing or unexpected. Shapes must be equal in any case.
        timeout_s: seconds to wait for the other ranks, which read at other speeds.

    Returns:
        The missing and the unexpected names; empty lists if `strict`.

    Raises:
        ShardingError: on every rank, if one of them finds names or shapes that do not match, cannot
            read the files, or holds a model on meta.
        AgreementError: on every rank, if another rank does not call it in time, or if checkpoints
            differ.
    """
    groups, plan = sharding_groups(model), _Plan()
    with agreed(groups, _OCCASION, timeout_s, described=plan.described, what="the checkpoint"):
        _make_plan(plan, model, Path(path), strict)
    with agreed(groups, f"the end of {_OCCASION}", timeout_s):
        try:
            _read(plan)
        except Exception as error:
            raise ShardingError(
                f"{path} cannot be read: {error}. The model is incomplete; load it again."
            ) from error
        finally:
            for each in plan.tensors:
                mark_edited(each.tensor, "load_safetensors")
    return LoadResult(plan.missing, plan.unexpected)


@dataclass
class _Plan:
    tensors: list[ModelTensor] = field(default_factory=list)
    by_file: dict[Path, list[tuple[str, Tensor]]] = field(default_factory=dict)
    """File -> names to read and the tensors that they go to."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    described: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Stored:
    """A tensor of the checkpoint."""

    file: Path
    shape: tuple[int, ...]
    code: str
    """Its dtype, as safetensors names it."""


# --- the checkpoint -------------------------------------------------------------------------------
def _files(path: Path) -> dict[Path, set[str] | None]:
    """File -> the names to take from it; None takes all."""
    if path.is_dir():
        return _files(_only_checkpoint(path))
    if not path.exists():
        raise ShardingError(
            f"there is no {path}. Give a folder that all ranks see and that holds safetensors; for "
            "a model of the Hugging Face hub, the folder that huggingface_hub.snapshot_download "
            "returns."
        )
    if not path.name.endswith(_INDEX):
        return {path: None}
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        found: dict[Path, set[str] | None] = {}
        for name, file in weight_map.items():
            names = found.setdefault(path.parent / file, set())
            assert names is not None
            names.add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardingError(
            f"{path} is not an index of safetensors files: expected a JSON object with "
            "'weight_map', from names to file names."
        ) from error
    lacking = sorted(file.name for file in found if not file.exists())
    if lacking:
        raise ShardingError(
            f"{path} names files that are not there: {_listed(lacking)}. Copy them next to it."
        )
    return found


def _only_checkpoint(folder: Path) -> Path:
    for name in (f"model{_INDEX}", "model.safetensors"):
        if (folder / name).exists():
            return folder / name
    found = sorted(folder.glob(f"*{_INDEX}")) or sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ShardingError(
            f"{folder} holds {_listed([each.name for each in found])}, and none is called "
            "model.safetensors. Give the path of one of them."
        )
    others = sorted(each.name for each in folder.glob("*.bin"))
    hint = f" It holds {_listed(others)}: save them as safetensors first." if others else ""
    raise ShardingError(f"{folder} holds no safetensors files.{hint}")


def _stored(path: Path) -> dict[str, _Stored]:
    found: dict[str, _Stored] = {}
    for file, names in _files(path).items():
        with _opened(file) as opened:
            inside = set(opened.keys())
            if names is not None and not names <= inside:
                raise ShardingError(
                    f"{file} lacks {_listed(sorted(names - inside))}, which the index names. The "
                    "files do not belong together; save or download them again."
                )
            for name in sorted(inside if names is None else names):
                part = opened.get_slice(name)
                found[name] = _Stored(file, tuple(part.get_shape()), part.get_dtype())
    return found


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        opened = safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ShardingError(
            f"{file} is not a complete safetensors file ({error}). Save or download it again."
        ) from error
    with opened as inside:
        yield inside


# --- the plan -------------------------------------------------------------------------------------
def _make_plan(plan: _Plan, model: nn.Module, path: Path, strict: bool) -> None:
    stored = _stored(path)
    plan.tensors += model_tensors(model)
    plan.described += [[name, each.shape, each.code] for name, each in sorted(stored.items())]
    wrong: list[str] = []
    used: set[str] = set()
    for each in plan.tensors:
        if each.tensor.is_meta:
            raise ShardingError(
                f"{each.name} is on meta and has no memory. Call to_empty(device=...) before "
                "load_safetensors."
            )
        names = [name for name in each.names if name in stored]
        used.update(names)
        if not names:
            plan.missing.append(each.name)
            continue
        for name in names:
            wrong += _mismatches(name, stored[name], each.tensor)
        plan.by_file.setdefault(stored[names[0]].file, []).append((names[0], each.tensor))
        for other in names[1:] if not wrong else ():
            wrong += _differences(names[0], other, stored, each.tensor)
    plan.unexpected += sorted(stored.keys() - used)
    if wrong or (strict and (plan.missing or plan.unexpected)):
        raise ShardingError(_complaint(model, path, plan, wrong))


def _mismatches(name: str, stored: _Stored, tensor: Tensor) -> list[str]:
    if stored.shape != tuple(tensor.shape):
        return [f"{name} is {list(stored.shape)} in the checkpoint and {list(tensor.shape)} here"]
    code = DTYPE_CODES.get(tensor.dtype, "")
    if stored.code != code and not (_is_float(stored.code) and _is_float(code)):
        return [f"{name} is {stored.code} in the checkpoint and {tensor.dtype} here"]
    return []


def _is_float(code: str) -> bool:
    return code.startswith(("F", "BF"))


def _differences(name: str, other: str, stored: Mapping[str, _Stored], tensor: Tensor) -> list[str]:
    """A checkpoint of an untied model may hold two values for what is one weight here."""
    rows = []
    for each in (name, other):
        with _opened(stored[each].file) as opened:
            rows.append(_own_part(opened, each, tensor))
    if torch.equal(*rows):
        return []
    return [f"{name} and {other} are one tied weight here, but the checkpoint's values differ"]


def _complaint(model: nn.Module, path: Path, plan: _Plan, wrong: Sequence[str]) -> str:
    parts = [f"{path} does not match {type(getattr(model, '_orig_mod', model)).__name__}."]
    if plan.missing:
        parts.append(f"Missing in the checkpoint: {_listed(plan.missing)}.")
    if plan.unexpected:
        parts.append(f"Unknown to the model: {_listed(plan.unexpected)}.")
    if wrong:
        parts.append(f"Different: {'; '.join(wrong[:8])}{' ...' if len(wrong) > 8 else ''}.")
    parts.append(_way_out(plan, wrong))
    return " ".join(parts)


def _way_out(plan: _Plan, wrong: Sequence[str]) -> str:
    if wrong:
        return "Build the model with the configuration of the checkpoint."
    if advice := encoding_advice(plan.missing, plan.unexpected):
        return advice
    for shorter, longer, where in (
        (plan.unexpected, plan.missing, "model"),
        (plan.missing, plan.unexpected, "checkpoint"),
    ):
        prefix = _common_prefix(shorter, longer)
        if prefix and where == "model":
            return f"The names of the model begin with {prefix!r}: load into that submodule."
        if prefix:
            return (
                f"The names of the checkpoint begin with {prefix!r}: save the submodule of that "
                "name, or load into a module that holds this model under it."
            )
    return (
        "Build the model with the configuration of the checkpoint, or pass strict=False to load "
        "the names that match."
    )


def _common_prefix(short: Sequence[str], long: Sequence[str]) -> str:
    """The prefix that turns each short name into one of the long ones; "" if there is none."""
    if not short or not long:
        return ""
    prefix = next((name[: -len(short[0])] for name in long if name.endswith(f".{short[0]}")), "")
    return prefix if prefix and {prefix + name for name in short} <= set(long) else ""


def _listed(names: Sequence[str], most: int = 8) -> str:
    return some_of(names, most)


# --- the values -----------------------------------------------------------------------------------
def _read(plan: _Plan) -> None:
    for file, wanted in plan.by_file.items():
        with _opened(file) as opened, torch.no_grad():
            for name, tensor in wanted:
                target = compat.local_part(tensor)
                if target.numel():
                    target.copy_(_own_part(opened, name, tensor))


def _own_part(opened: Any, name: str, tensor: Tensor) -> Tensor:
    """Read this rank's part of a tensor: all of one that is not sharded."""
    part: Tensor
    if not isinstance(tensor, DTensor) or compat.local_of(tensor).shape == tensor.shape:
        part = opened.get_tensor(name)
        return part
    own = compat.local_range(tensor.shape, tensor.device_mesh, tensor.placements)
    part = opened.get_slice(name)[tuple(slice(start, start + length) for start, length in own)]
    return part
