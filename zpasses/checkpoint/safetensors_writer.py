"""`zpasses.save_safetensors`: safetensors files, written tensor by tensor.

The format is a length (8 bytes, little-endian), a JSON header and the data of the tensors without
gaps. All sizes are known before the first tensor is gathered, so the header comes first and each
tensor follows as it arrives. One rank holds one full tensor at a time.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zpasses.checkpoint.model_tensors import (
    ModelTensor,
    agreed,
    check_no_step_under_way,
    gather_full,
    model_tensors,
    sharding_groups,
    writing_rank,
)
from zpasses.errors import AgreementError, OptionError, ShardingError
from zpasses.ranks.vote import DEFAULT_TIMEOUT_S

_OCCASION = "zpasses.save_safetensors"

_CODES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
DTYPE_CODES: Mapping[torch.dtype, str] = {
    getattr(torch, name): code for code, name in _CODES.items()
}
"""dtype -> its code in safetensors files."""

_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}iB": 1024**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*")


@dataclass(frozen=True)
class _File:
    """One file of the checkpoint."""

    name: str
    tensors: tuple[ModelTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(each.tensor.nbytes for each in self.tensors)


def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[str]:
    """Write the full model as safetensors. Call it on every rank.

    Parameters are gathered one after the other onto one rank, the first of the mesh, which writes
    each one before the next arrives. So no rank ever holds more than one full parameter. The folder
    looks as if transformers' `save_pretrained` had written it: `model.safetensors`, or
    `model-00001-of-00002.safetensors` and so on with `model.safetensors.index.json`. Names have no
    `_orig_mod.`. A tied weight is written once, under the name that `save_pretrained` keeps. Files
    appear under their names when they are complete, and earlier files of the same checkpoint are
    replaced.

    Args:
        model: a sharded module, a module that contains sharded ones, or `torch.compile` of one.
        path: a folder, which is created; or a file `*.safetensors`, whose name takes the place of
            `model`.
        max_shard_size: size of a file's tensors, in bytes or as text such as "5GB" (10^9 bytes) or
            "5GiB". A larger tensor gets a file of its own.
        metadata: further text for the header of each file.
        timeout_s: seconds to wait for the other ranks, in each gather and at the end: while one
            rank writes a tensor, the others wait.

    Returns:
        The names of the files that hold tensors, on every rank.

    Raises:
        OptionError: for a size that is none.
        ShardingError: on every rank, for a model with entries that are not tensors or are on meta,
            for metadata that is no text, if parameters have stepped in backward and
            `optimizer.step()` has not been called, and if the files cannot be written.
        AgreementError: on every rank, if another rank does not call it in time, passes another
            model, or has edited it otherwise.
    """
    most_bytes = _parse_size(max_shard_size)
    groups = sharding_groups(model)
    tensors: list[ModelTensor] = []
    described: list[Any] = []
    with agreed(groups, _OCCASION, timeout_s, described=described, model=model, what="the model"):
        _check_metadata(metadata or {})
        check_no_step_under_way(model)
        tensors += model_tensors(model)
        _check(tensors)
        described += [
            [each.names, str(each.tensor.dtype), list(each.tensor.shape)] for each in tensors
        ]
    folder, stem = _place(Path(path))
    files = _split(tensors, stem, most_bytes)
    header = {"format": "pt", **dict(metadata or {})}
    header |= {alias: each.name for each in tensors for alias in each.names[1:]}
    destination = writing_rank(model)
    # A map goes on after a gather that failed, and a generator would not.
    gather = functools.partial(gather_full, destination=destination, timeout_s=timeout_s)
    fulls = map(gather, [each.tensor for file in files for each in file.tensors])
    with agreed(groups, f"the end of {_OCCASION}", timeout_s):
        if not dist.is_initialized() or dist.get_rank() == destination:
            _write(files, folder, stem, header, fulls)
        else:
            _gather_the_rest(fulls)
    return [file.name for file in files]


def _check_metadata(metadata: Mapping[Any, Any]) -> None:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ShardingError(
                f"metadata is {{{key!r}: {value!r}}}, and safetensors files hold text only: "
                f"readers would refuse them. Give {{{str(key)!r}: {str(value)!r}}}."
            )


def _check(tensors: Sequence[ModelTensor]) -> None:
    for each in tensors:
        if each.tensor.is_meta:
            raise ShardingError(
                f"{each.name} is on meta and has no values. Call to_empty(device=...) and "
                "initialise or load the model first."
            )
        if each.tensor.dtype not in DTYPE_CODES:
            raise ShardingError(
                f"{each.name} is {each.tensor.dtype}, which safetensors files cannot hold. Convert "
                "it, or save the model with torch.distributed.checkpoint."
            )


def _parse_size(size: int | str) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or float(match[1]) == 0:
        raise OptionError(
            f"max_shard_size is {size!r}; expected bytes above 0, or text such as '5GB' or "
            "'500MiB'."
        )
    return int(float(match[1]) * _UNITS[match[2]])


def _place(path: Path) -> tuple[Path, str]:
    """Return the folder, and the stem of the files in it."""
    if path.suffix == ".safetensors":
        return path.parent, path.stem
    return path, "model"


def _split(tensors: Sequence[ModelTensor], stem: str, most_bytes: int) -> list[_File]:
    parts: list[list[ModelTensor]] = [[]]
    size = 0
    for each in tensors:
        if parts[-1] and size + each.tensor.nbytes > most_bytes:
            parts.append([])
            size = 0
        parts[-1].append(each)
        size += each.tensor.nbytes
    if len(parts) == 1:
        return [_File(f"{stem}.safetensors", _aligned(parts[0]))]
    return [
        _File(f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors", _aligned(part))
        for i, part in enumerate(parts, 1)
    ]


def _aligned(tensors: Sequence[ModelTensor]) -> tuple[ModelTensor, ...]:
    """Wide dtypes first, as safetensors orders them, so that every tensor is aligned."""
    return tuple(sorted(tensors, key=lambda each: -each.tensor.element_size()))


# --- the files ------------------------------------------------------------------------------------
def _header(file: _File, metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for each in file.tensors:
        start, end = end, end + each.tensor.nbytes
        entries[each.name] = {
            "dtype": DTYPE_CODES[each.tensor.dtype],
            "shape": list(each.tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(
    files: Sequence[_File],
    folder: Path,
    stem: str,
    metadata: Mapping[str, str],
    fulls: Iterator[Tensor | None],
) -> None:
    """Write the tensors, which come in the order of the files. Each is freed before the next."""
    paths = [folder / file.name for file in files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, path in zip(files, paths, strict=True):
            with _temporary(path).open("wb") as out:
                out.write(_header(file, metadata))
                out.writelines(map(_bytes_of, itertools.islice(fulls, len(file.tensors))))
                out.flush()
                os.fsync(out.fileno())
        _finish(folder, stem, files)
    except Exception as error:
        if not isinstance(error, AgreementError):
            with contextlib.suppress(Exception):  # the first error is the one to tell
                _gather_the_rest(fulls)
        with contextlib.suppress(OSError):
            for path in paths:
                _temporary(path).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise ShardingError(
            f"{folder} cannot be written: {error}. Free space or give another path."
        ) from error


def _gather_the_rest(fulls: Iterator[Tensor | None]) -> None:
    """Take part in the gathers that are left, also after one that fails: other ranks wait there.

    Raises:
        Exception: the first failure, at the end.
        AgreementError: at once, if another rank did not come to a gather.
    """
    failure: Exception | None = None
    while True:
        try:
            collections.deque(fulls, maxlen=0)
        except AgreementError:
            raise
        except Exception as error:
            failure = failure or error
        else:
            break
    if failure is not None:
        raise failure


def _bytes_of(full: Tensor | None) -> memoryview:
    assert full is not None
    flat = full.cpu().contiguous().view(-1)
    return (flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)).numpy().data


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.incomplete-{os.getpid()}")


def _finish(folder: Path, stem: str, files: Sequence[_File]) -> None:
    """Give complete files their names, write the index, and remove files of an earlier save."""
    index = folder / f"{stem}.safetensors.index.json"
    for file in files:
        _temporary(folder / file.name).replace(folder / file.name)
    if len(files) > 1:
        weight_map = {each.name: file.name for file in files for each in file.tensors}
        total = sum(file.nbytes for file in files)
        text = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _temporary(index).write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")
        _temporary(index).replace(index)
    else:
        index.unlink(missing_ok=True)
    pattern = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    for path in folder.iterdir():
        if pattern.fullmatch(path.name) and path.name not in {file.name for file in files}:
            path.unlink()
