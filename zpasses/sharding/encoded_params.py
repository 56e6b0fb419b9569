"""Frozen parameters whose shards rest encoded: `zpasses.encode_parameters`.

Each row is one record of codes and scales (zpasses.graph.encoding), so a parameter of R rows is a
parameter uint8[R, bytes of a record]. It is cut, gathered, moved, copied and saved as any other one
of that dtype, and whole blocks of values lie on each rank for any number of ranks. Each read
decodes what it has gathered, so no decoded copy outlives its readers.
"""

from __future__ import annotations

import logging
import math
from typing import Any, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import OptionError, ZpassesError
from zpasses.graph.encoding import ENCODED_DTYPES, Encoding, Format
from zpasses.graph.queries import nbytes
from zpasses.option_values import format_size
from zpasses.ranks.mesh_comparison import compare_shard_calls
from zpasses.runtime.layout import layout_of
from zpasses.runtime.param_value import as_sharded_parameter, param_value_of
from zpasses.sharding.module import check_is_module, gathering_reads, rest_encoded
from zpasses.sharding.param_spec import ParamShardSpec, RestingCodes

log = logging.getLogger("zpasses")

M = TypeVar("M", bound=nn.Module)


def encode_parameters(model: M, format: str, *, block: int | None = None) -> M:
    """Let the shards of a model's frozen parameters rest encoded, in place, and return the model.

    Gathers then move codes, and each read decodes them, with the values of decode(encode(row)) for
    each row of the parameter. The parameter gets another name, such as "weight_nf4_64", dtype and
    shape (torch.uint8, [rows, bytes of a record]) in `named_parameters`, state dicts and
    checkpoints; `module.weight` still reads its values. Encoded are parameters with two or more
    dimensions of fp32, bf16 or fp16 that are frozen and would become smaller. Scalars, vectors and
    trained parameters stay. Call it on every rank, after `zpasses.shard`, on the part of the model
    to encode, and before `zpasses.offload_parameters`. Nothing is communicated.

    Args:
        model: the model or a part of it, which has memory and its final values and dtypes. A
            parameter that is tied to one outside of that part is untied.
        format: "nf4" or "fp4" (4 bits per value), "int8", "fp8" or "mxfp8" (8 bits). See
            docs/encoding.md.
        block: most values of a row that share a scale; None is 64 for formats of 4 bits, 32 for
            mxfp8 and 128 for others.

    Raises:
        OptionError: for another format, or a block that is no number above 0.
        ZpassesError: for a model that is on meta, or has no parameter to encode, or one that is cut
            along another dimension than 0, is a part of tensor parallelism, or rests on the host.
        AgreementError: if another rank gives other arguments. A rank that called earlier raises it
            when it next compiles, steps an optimizer or waits for other ranks.
    """
    how = _encoding(format, block)
    check_is_module("encode_parameters", model)
    found: dict[DTensor, list[tuple[nn.Module, ParamShardSpec]]] = {}
    for module, spec, param in gathering_reads(model):
        if isinstance(param, DTensor) and spec.codes is None and _is_encodable(param, how):
            found.setdefault(param, []).append((module, spec))
    if not found:
        raise ZpassesError(_nothing_to_encode(model))
    names = {module: path for path, module in model.named_modules()}
    for param, places in found.items():
        module, spec = places[0]
        _check(param, spec, f"{names[module]}.{spec.name}".lstrip("."))
    meshes = {layout_of(param).whole_mesh: None for param in found}
    for mesh in meshes:
        given = {"format": str(how), "parameters": len(found)}
        compare_shard_calls(mesh, given, "encode_parameters")
    before = sum(nbytes(compat.local_of(param)) for param in found)
    after = sum(_encode(param, places, how) for param, places in found.items())
    log.info(
        "%s: %s of shards encoded as %s, %s",
        type(model).__name__,
        format_size(before),
        how,
        format_size(after),
    )
    return model


def _encoding(format: str, block: int | None) -> Encoding:
    if format not in get_args(Format):
        raise OptionError(
            f"encode_parameters, format: got {format!r}; expected one of "
            f"{', '.join(map(repr, get_args(Format)))}."
        )
    if block is not None and (not isinstance(block, int) or isinstance(block, bool) or block < 1):
        raise OptionError(
            f"encode_parameters, block: got {block!r}; expected values per scale, a whole number "
            "above 0, or None."
        )
    return Encoding.of(cast(Format, format), block)


def _is_encodable(param: DTensor, how: Encoding) -> bool:
    width = math.prod(param.shape[1:])
    return (
        not param.requires_grad
        and param.dim() > 1
        and param.dtype in ENCODED_DTYPES
        and param.numel() > 0
        and bool(how.record_bytes(width) < width * param.element_size())
    )


def _nothing_to_encode(model: nn.Module) -> str:
    reads = list(gathering_reads(model))
    if not reads:
        return (
            f"encode_parameters: {type(model).__name__} has no sharded parameter. Call "
            "zpasses.shard(model, mesh=...) first."
        )
    trained = sum(param is not None and param.requires_grad for *_, param in reads)
    encoded = sum(spec.codes is not None for _, spec, _ in reads)
    return (
        f"encode_parameters: of {len(reads)} parameters of {type(model).__name__}, {trained} are "
        f"trained, {encoded} are encoded already, and the rest would not become smaller: scalars, "
        "vectors, narrow matrices, or another dtype than fp32, bf16 and fp16. Freeze parameters "
        "first (requires_grad_(False)). Values that are trained cannot rest encoded."
    )


def _check(param: DTensor, spec: ParamShardSpec, name: str) -> None:
    layout = spec.layout
    if param.is_meta:
        problem = "is on meta. Call to_empty and load the model first."
    elif spec.device is not None:
        problem = "rests on the host. Call encode_parameters before offload_parameters."
    elif layout.inner_mesh is not None:
        problem = (
            "is a part of tensor or expert parallelism, whose pieces are not encoded. Call it on "
            "other parts of the model."
        )
    elif layout.dim != 0:
        problem = (
            f"is cut along dimension {layout.dim}, and records are rows. Let shard_placement_fn "
            "return None for it."
        )
    else:
        return
    raise ZpassesError(f"encode_parameters: parameter {name!r} {problem}")


def _encode(param: DTensor, places: list[tuple[nn.Module, ParamShardSpec]], how: Encoding) -> int:
    """Replace a parameter by its records. Returns their bytes on this rank."""
    rows, made = compat.local_of(param).detach(), None
    for module, spec in places:
        dtype = spec.param_dtype or param.dtype
        codes = RestingCodes(spec.name, tuple(param.shape[1:]), dtype, str(how))
        if made is None:
            made = records_parameter(codes.encoded(rows), param, spec)
        rest_encoded(module, spec.name, codes, made)
    assert made is not None
    return nbytes(compat.local_of(cast(Any, made)))


def records_parameter(records: Tensor, param: DTensor, spec: ParamShardSpec) -> nn.Parameter:
    """Make the sharded parameter that takes the place of one that is encoded.

    Args:
        records: of this rank's rows, uint8[any, bytes of a record].
        param: the parameter that goes.
    """
    shape = torch.Size([param.shape[0], records.shape[1]])
    made = nn.Parameter(spec.layout.wrap(records, shape), requires_grad=False)
    return as_sharded_parameter(made, spec.layout, param_value_of(param))
