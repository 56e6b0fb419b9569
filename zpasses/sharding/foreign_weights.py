"""Parameters of other libraries that hold codes: `zpasses.shard` takes those whose rows are whole
records, and refuses the others.

Taken are 4-bit weights of bitsandbytes (`Linear4bit`) and of torchao (`NF4Tensor`). They become
parameters that rest encoded, as those of `zpasses.encode_parameters`. In the dtype that they were
quantized from, they decode to the same bits. In another one, values are not rounded to the former.
To cut any other one as if it were plain data would separate codes from their scales.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zpasses.errors import ShardingError
from zpasses.graph.encoding import Encoding, join_records
from zpasses.sharding.param_spec import RestingCodes


@dataclass(frozen=True)
class ForeignWeight:
    """A parameter of another library, in terms of zpasses."""

    codes: RestingCodes
    rows: int
    packed: Tensor
    """Its codes, uint8[bytes]."""
    scales: Callable[[], Tensor]
    """Returns one scale per block, [blocks]."""

    def records(self) -> Tensor:
        """Returns the parameter that takes its place, uint8[rows, bytes of a record]."""
        how = Encoding.parse(self.codes.encoding)
        return join_records(self.scales(), self.packed, self.rows, how)


def foreign_weight(
    path: str, module: nn.Module, param: Any, param_dtype: torch.dtype | None
) -> ForeignWeight | None:
    """Returns what a parameter that holds codes of another library becomes; None for others.

    Args:
        path: its name in the model.
        module: what holds it.
        param_dtype: to which dtype it is decoded; None for its own.

    Raises:
        ShardingError: for one that cannot be cut by rows.
    """
    name = path.rpartition(".")[2]
    if (kind := _imported("bitsandbytes.nn", "Params4bit")) and isinstance(param, kind):
        return _of_bitsandbytes(path, name, module, param, param_dtype)
    for place in ("torchao.quantization", "torchao.dtypes"):  # since 0.18, and before
        if (kind := _imported(place, "NF4Tensor")) and isinstance(param, kind):
            return _of_torchao(path, name, param, param_dtype)
    if (kind := _imported("bitsandbytes.nn", "Int8Params")) and isinstance(param, kind):
        # Before model.to(device), it has the dtype of plain numbers, and no codes yet.
        raise _refusal(path, param, "its module reads scales, which zpasses cannot cut with it.")
    cls = type(param)
    if cls.__module__.startswith(("torch.", "zpasses.")):
        return None
    if hasattr(cls, "__tensor_flatten__") and not isinstance(param, DTensor):
        raise _refusal(path, param, "zpasses cannot cut the tensors that it consists of.")
    if issubclass(cls, nn.Parameter) and not param.is_floating_point():
        raise _refusal(
            path,
            param,
            f"it holds {str(param.dtype).removeprefix('torch.')}, which may be codes whose scales "
            "zpasses would not cut with them. If they are plain numbers, make it an nn.Parameter "
            "of torch, or a buffer. If they are codes:",
        )
    return None


def _imported(module: str, name: str) -> type[Any] | None:
    """Returns a class of a library, if the program has imported it."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def _refusal(path: str, param: Tensor, why: str) -> ShardingError:
    kind = f"{type(param).__module__.partition('.')[0]}'s {type(param).__name__}"
    return ShardingError(
        f"parameter {path} is {kind} {list(param.shape)}: {why} Load the model without that "
        "quantization, freeze what is not trained, and call zpasses.encode_parameters(model, "
        "'nf4') or 'int8' after zpasses.shard; or pass the parameter as ignored_params, so that "
        "each rank keeps all of it."
    )


# --- bitsandbytes ---------------------------------------------------------------------------------
def _of_bitsandbytes(
    path: str, name: str, module: nn.Module, param: Any, param_dtype: torch.dtype | None
) -> ForeignWeight:
    state, linear = param.quant_state, _imported("bitsandbytes.nn", "Linear4bit")
    if state is None or not param.bnb_quantized or param.is_meta:
        raise _refusal(path, param, "it has no codes yet, as model.to(device) makes them.")
    if linear is None or type(module).forward is not linear.forward or name != "weight":
        kind = type(module).__name__
        raise _refusal(path, param, f"its module, {kind}, has another forward than Linear4bit.")
    if "forward" in vars(module):
        raise ShardingError(
            f"the forward of module {path.rpartition('.')[0] or '(root)'} was replaced on the "
            "instance, as hooks of accelerate do. Remove them before zpasses.shard: "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True)."
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise _refusal(path, param, "it was packed for inference. Shard it before any forward.")
    rows, width = state.shape
    if width % state.blocksize:
        raise _refusal(path, param, _no_whole_blocks(width, state.blocksize))
    dtype = param_dtype or getattr(module, "compute_dtype", None) or state.dtype
    codes = RestingCodes(name, (width,), dtype, f"{state.quant_type}/{state.blocksize}")

    def scales() -> Tensor:
        found: Tensor = state.absmax
        if state.nested:
            functional: Any = sys.modules["bitsandbytes.functional"]
            found = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
        return found

    return ForeignWeight(codes, rows, param.detach().as_subclass(Tensor).view(torch.uint8), scales)


def _no_whole_blocks(width: int, block: int) -> str:
    return f"its rows of {width} values are not whole blocks of {block} values."


class DecodedLinear(nn.Linear):
    """What a Linear4bit of bitsandbytes becomes, whose weight reads decode.

    Its output has the bits of `bitsandbytes.matmul_4bit`, where that is a dequantization and a
    linear function: in training, on any device.
    """

    compute_dtype: torch.dtype | None

    def forward(self, x: Tensor) -> Tensor:
        given = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(given.dtype)
        return F.linear(given, self.weight.to(given.dtype), bias).to(x.dtype)


def take_over(module: nn.Module) -> None:
    """Let a module whose weight was foreign compute with the decoded weight."""
    linear = _imported("bitsandbytes.nn", "Linear4bit")
    if linear is not None and isinstance(module, linear):
        module.__class__ = DecodedLinear
        module.__dict__.pop("quant_state", None)


# --- torchao --------------------------------------------------------------------------------------
_TORCHAO = {
    torch.float32: "torchao_nf4",
    torch.bfloat16: "torchao_nf4_bf16",
    torch.float16: "torchao_nf4_fp16",
}
"""dtype of an NF4Tensor -> its format. It multiplies in that dtype."""


def _of_torchao(path: str, name: str, param: Any, param_dtype: torch.dtype | None) -> ForeignWeight:
    if param.requires_grad:
        raise _refusal(path, param, "it is trained. Freeze it: weight.requires_grad_(False).")
    if param.dim() != 2 or param.dtype not in _TORCHAO or not param.is_contiguous():
        raise _refusal(path, param, "it is no matrix of fp32, bf16 or fp16, or not contiguous.")
    rows, width = param.shape
    if width % param.block_size:
        raise _refusal(path, param, _no_whole_blocks(width, param.block_size))
    encoding = f"{_TORCHAO[param.dtype]}/{param.block_size}"
    codes = RestingCodes(name, (width,), param_dtype or param.dtype, encoding)

    def scales() -> Tensor:
        found: Tensor = param.dequantize_scalers(
            param.quantized_scalers, param.quantization_factor, param.scaler_block_size
        )
        return found

    return ForeignWeight(codes, rows, param.quantized_data, scales)
