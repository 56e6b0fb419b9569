"""Encodings of values: a code of 8 or 4 bits per value, and one scale per block of values.

    zpasses::encode(value, count, parts, encoding) -> records, uint8[parts * record_bytes]
    zpasses::encode_with_feedback(value, residual!, count, parts, encoding) -> the same
    zpasses::decode(records, shape, parts, dtype, encoding) -> tensor
    zpasses::decode_mean(records, shape, parts, dtype, encoding) -> tensor

A record holds the scales and codes of `count` values, so that one launch of a collective moves
both. Gathers and reductions may encode what they communicate, with 8 bits. The shards of a frozen
parameter may rest encoded, one record per row (zpasses.sharding.encoded_params). All operators
compute in fp32. Passes, dumps and plans see one node each; `expand_encodings` replaces them by the
operators of torch that they are made of, right before code generation, so that Inductor fuses them
with what computes and reads their values.

What a block of values decodes to:

- Zeros, and blocks of zeros, stay zero. int8 drops the sign of a zero.
- A block with an infinity or a NaN decodes to NaN in all its values: no infinity becomes finite.
- Values far below the largest of their block become zero: below 1/254 of it (int8), below 5e-6 of
  it (fp8, mxfp8), below 0.04 of it (nf4), or below 0.0026 of it (fp4). A block of denormal numbers
  below 4e-43 becomes zero in formats of 8 bits, since its scale is.
- Values near the largest number of fp32 may decode to infinities: 448 * 2**120 is none.

`count` values are cut into ceil(count / block) blocks of equal width, the last of which is padded
with zeros. So no block is wider than `block`, and a record has less than one code of padding per
block, and less than 16 bytes at its end. Of two codes of 4 bits, the first has the higher bits.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019) encodes the sum of a value and a
residual, and keeps what rounding has lost of the sum as the next residual. Residuals are fp32, as
the arithmetic is, and have the shape of the blocks: then the sum, its codes and the next residual
are one loop over the blocks, which writes the residual in place. Where a block is not finite, its
next residual is zero.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from zpasses import compat
from zpasses.graph.padding import padded_last, rounded_up

Format = Literal["int8", "fp8", "mxfp8", "nf4", "fp4"]
"""int8: integers from -127 to 127 and fp32 scales. fp8: float8_e4m3fn and fp32 scales. mxfp8:
float8_e4m3fn and scales that are powers of two, one byte each. nf4 and fp4: positions in a table of
16 numbers, and fp32 scales, the largest magnitudes; those of bitsandbytes.
"""

ENCODED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes whose values can be encoded."""

_TABLES: dict[str, tuple[float, ...]] = {
    # Quantiles of the normal distribution (QLoRA, appendix E).
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    # A sign, two bits of exponent and one of mantissa, with other bits for the least numbers.
    "fp4": (
        *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0),
        *(0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
        *(0.0, -0.0052083334885537624, -0.6666666865348816, -1.0),
        *(-0.3333333432674408, -0.5, -0.1666666716337204, -0.25),
    ),
}
"""What codes of 4 bits stand for, as a share of the scale: numbers of fp32."""


def _bf16(number: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    rounded: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return rounded


# torchao's table has four digits, rounded to the dtype in which it multiplies.
_digits = [round(each, 4) for each in _TABLES["nf4"]]
_TABLES["torchao_nf4"] = struct.unpack("<16f", struct.pack("<16f", *_digits))
_TABLES["torchao_nf4_bf16"] = tuple(map(_bf16, _digits))
_TABLES["torchao_nf4_fp16"] = struct.unpack("<16e", struct.pack("<16e", *_digits))
_MOST: dict[str, float] = {"int8": 127.0, "fp8": 448.0, **dict.fromkeys(_TABLES, 1.0)}
"""The largest code."""
_BLOCKS = {"mxfp8": 32, **dict.fromkeys(_TABLES, 64)}
"""Values per scale, if not 128."""
_FEEDBACK = "feedback"
_ALIGNMENT = 16
"""Bytes of which the size of a record is a multiple."""
_INFINITY, _MAGNITUDE = 0x7F800000, 0x7FFFFFFF
"""Bits of fp32. The bits of magnitudes are ordered as magnitudes are, with NaN last."""
_FEW_PARTS = 16
"""Most parts whose sum is written out for Inductor, one addition each."""


@dataclass(frozen=True)
class Encoding:
    """How values are encoded; as text "int8/128", or "int8/128/feedback"."""

    format: str
    """A `Format`, or one of weights of torchao."""
    block: int
    """Most values per scale."""
    feedback: bool = False
    """Whether what rounding loses of a gradient is added to the next gradient of the parameter.
    Until code generation, the residual is no argument, and counts as zero
    (`zpasses.graph.error_feedback`)."""

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """Parses what `str` of an encoding returns.

        Raises:
            ValueError: for other text.
        """
        name, _, rest = text.partition("/")
        block, _, more = rest.partition("/")
        known = name in {*get_args(Format), *_TABLES} and more in ("", _FEEDBACK)
        if not known or not block.isdecimal() or int(block) < 1:
            raise ValueError(
                f"got the encoding {text!r}; expected a format of {', '.join(get_args(Format))} "
                "and the values per scale, such as 'int8/128'."
            )
        return cls(name, int(block), bool(more))

    @classmethod
    def of(cls, name: Format, block: int | None, *, feedback: bool = False) -> Encoding:
        """Returns the encoding of a format: None is 128 values per scale, 32 of mxfp8, or 64 of
        formats of 4 bits.
        """
        return cls(name, block or _BLOCKS.get(name, 128), feedback)

    def __str__(self) -> str:
        return f"{self.format}/{self.block}" + (f"/{_FEEDBACK}" if self.feedback else "")

    def record_bytes(self, count: Any) -> Any:
        """Returns the bytes of a record of `count` values, scales included."""
        return _Layout.of(self, count).record_bytes

    def residual_shape(self, count: int, parts: int) -> tuple[int, int, int]:
        """Returns the shape of the residual of `parts` records: [parts, blocks, values]."""
        layout = _Layout.of(self, count)
        return parts, layout.blocks, layout.width


@dataclass(frozen=True)
class _Layout:
    """A record: the scales, then the codes, then unused bytes."""

    encoding: Encoding
    blocks: Any
    width: Any
    """Values per block, padding included."""

    @classmethod
    def of(cls, encoding: Encoding, count: Any) -> _Layout:
        blocks = -(-count // encoding.block)
        return cls(encoding, blocks, -(-count // blocks) if blocks else 0)

    @property
    def scale_bytes(self) -> Any:
        return self.blocks * (1 if self.encoding.format == "mxfp8" else 4)

    @property
    def codes(self) -> Any:
        return self.blocks * self.width

    @property
    def code_bytes(self) -> Any:
        return -(-self.codes // 2) if self.encoding.format in _TABLES else self.codes

    @property
    def record_bytes(self) -> Any:
        return rounded_up(self.scale_bytes + self.code_bytes, _ALIGNMENT)


# --- arithmetic -----------------------------------------------------------------------------------
def _encoded(value: Tensor, count: int, parts: int, encoding: str) -> Tensor:
    layout = _Layout.of(Encoding.parse(encoding), count)
    return _records(layout, *_codes(layout.encoding, _blocks(value, count, parts, layout)))


def _encoded_with_feedback(
    value: Tensor, residual: Tensor, count: int, parts: int, encoding: str
) -> Tensor:
    layout = _Layout.of(Encoding.parse(encoding), count)
    # The sum is not written to the residual first: Inductor fuses the second write of a buffer with
    # earlier reads of other elements of it (`fusable_weak_dep`, torch 2.13).
    total = residual + _blocks(value, count, parts, layout)
    scales, codes = _codes(layout.encoding, total)
    rest = total - codes.to(torch.float32) * scales[:, :, None]
    residual.copy_(torch.where(rest.isfinite(), rest, 0.0))
    return _records(layout, scales, codes)


def _blocks(value: Tensor, count: int, parts: int, layout: _Layout) -> Tensor:
    """Returns values in fp32, padded with zeros, as [parts, blocks, width]."""
    flat = value.reshape(-1).to(torch.float32)
    flat = padded_last(flat, parts * count).view(parts, count)
    return padded_last(flat, layout.codes).view(parts, layout.blocks, layout.width)


def _codes(how: Encoding, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales, [parts, blocks], of fp32 (mxfp8: exponents, uint8), and the codes,
    [parts, blocks, width].
    """
    largest = (blocks.view(torch.int32) & _MAGNITUDE).amax(2)
    lost = largest >= _INFINITY
    scales, scaled = (_scaled_by_powers if how.format == "mxfp8" else _scaled)(
        how, blocks, largest, lost
    )
    scaled = torch.where(lost[:, :, None], 0.0, scaled)
    if how.format in _TABLES:
        return scales, _nearest(scaled, _TABLES[how.format])
    if how.format == "int8":
        return scales, scaled.round().to(torch.int8)
    return scales, scaled.to(torch.float8_e4m3fn)


def _records(layout: _Layout, scales: Tensor, codes: Tensor) -> Tensor:
    parts, how = codes.shape[0], layout.encoding
    if how.format in _TABLES:
        codes = _packed(codes.view(parts, layout.codes))
    as_bytes = scales if how.format == "mxfp8" else _as_bytes(scales)
    record = torch.cat([as_bytes, codes.view(torch.uint8).view(parts, layout.code_bytes)], 1)
    return padded_last(record, layout.record_bytes).reshape(-1)


def _nearest(values: Tensor, table: Sequence[float]) -> Tensor:
    """Returns the position of the nearest number of a table, uint8; the lower of two numbers."""
    first = {number: at for at, number in reversed(list(enumerate(table)))}
    (lower, at), *others = sorted(first.items())
    found = torch.full_like(values, at, dtype=torch.uint8)
    for number, at in others:
        found = torch.where(values > (lower + number) / 2, at, found)
        lower = number
    return found


def _packed(codes: Tensor) -> Tensor:
    """Returns codes of 4 bits, uint8[parts, n], as uint8[parts, ceil(n / 2)]."""
    high, low = (
        padded_last(codes, codes.shape[1] + codes.shape[1] % 2).unflatten(1, (-1, 2)).unbind(2)
    )
    packed: Tensor = (high << 4) | low
    return packed


def _looked_up(packed: Tensor, table: Sequence[float]) -> Tensor:
    """Returns what codes that `_packed` returned stand for, fp32[parts, 2 * bytes].

    In generated code by selections, as it would need a table as a constant. One by one, these would
    take ten times the memory of the result.
    """
    if not isinstance(packed, compat.FakeTensor):
        pairs = packed.new_tensor([*itertools.product(table, table)], dtype=torch.float32)
        return F.embedding(packed.to(torch.int32), pairs).flatten(1)
    shifts = torch.arange(4, -1, -4, device=packed.device)
    codes = (packed.to(torch.int32)[:, :, None] >> shifts.to(torch.int32)).flatten(1)
    found: list[Any] = list(table)
    for bit in range(4):
        is_set = (codes & (1 << bit)) != 0
        found = [torch.where(is_set, *pair) for pair in zip(found[1::2], found[::2], strict=True)]
    values: Tensor = found[0].to(torch.float32)
    return values


def _scaled(how: Encoding, blocks: Tensor, largest: Tensor, lost: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales, and the values as multiples of them."""
    most = _MOST[how.format]
    scale = largest.view(torch.float32) / most
    usable = torch.where(lost | (scale == 0), 1.0, scale)
    scale = torch.where(lost, torch.nan, scale)
    # A quotient exceeds the largest code by its rounding, or where the scale is denormal.
    return scale, (blocks / usable[:, :, None]).clamp(-most, most)


# Inductor fuses this arithmetic. It runs a view in a dtype of another size as a call of its own.
def _as_bytes(scale: Tensor) -> Tensor:
    """Returns positive numbers of fp32, [parts, n], as uint8[parts, 4 * n], lowest byte first."""
    bits = scale.view(torch.int32)
    several = torch.stack([(bits >> shift) & 255 for shift in (0, 8, 16, 24)], 2)
    return several.to(torch.uint8).flatten(1)


def _from_bytes(several: Tensor) -> Tensor:
    """Returns what `_as_bytes` was given, [parts, n], of uint8[parts, n, 4]."""
    lowest, *others = several.to(torch.int32).unbind(2)
    for number, each in enumerate(others, 1):
        lowest = lowest | (each << 8 * number)
    return lowest.view(torch.float32)


def _scaled_by_powers(
    how: Encoding, blocks: Tensor, largest: Tensor, lost: Tensor
) -> tuple[Tensor, Tensor]:
    """As `_scaled`, by the least power of two with which no value exceeds 448 = 1.75 * 2**8."""
    exponent, mantissa = largest >> 23, largest & 0x7FFFFF
    scale = (exponent - 8 + (mantissa > 0x600000).to(torch.int32)).clamp(min=0)
    inverse = ((254 - scale) << 23).view(torch.float32)
    return torch.where(lost, 255, scale).to(torch.uint8), blocks * inverse[:, :, None]


def _decoded_blocks(records: Tensor, layout: _Layout, parts: int) -> Tensor:
    """Returns the blocks of each record in fp32, [parts, blocks, width]."""
    rows = records.view(parts, layout.record_bytes)
    scales = rows[:, : layout.scale_bytes]
    if layout.encoding.format == "mxfp8":
        bits = scales.to(torch.int32)
        # 2**-127 is a denormal number, and 255 says NaN.
        bits = torch.where(bits == 0, 0x400000, torch.where(bits == 255, 0x7FC00000, bits << 23))
        scale = bits.view(torch.float32)
    else:
        scale = _from_bytes(scales.view(parts, layout.blocks, 4))
    codes = rows[:, layout.scale_bytes : layout.scale_bytes + layout.code_bytes]
    table = _TABLES.get(layout.encoding.format)
    if table is not None:
        values = _looked_up(codes, table)[:, : layout.codes]
    else:
        codes = codes.view(torch.int8 if layout.encoding.format == "int8" else torch.float8_e4m3fn)
        values = codes.to(torch.float32)
    return values.reshape(parts, layout.blocks, layout.width) * scale[:, :, None]


def _as_rows(blocks: Tensor, count: int, shape: list[int]) -> Tensor:
    """Returns blocks without their padding as the first rows of a tensor.

    Args:
        blocks: [parts, blocks, width], contiguous.
        count: values per part.
        shape: [rows, ...].
    """
    parts, codes = blocks.shape[0], blocks.shape[1] * blocks.shape[2]
    if blocks.device.type != "cpu":
        return blocks.view(parts, codes)[:, :count].reshape(-1, *shape[1:])[: shape[0]]
    # Inductor stores what `as_strided` reads. Without that, it would fuse the decode with a reader
    # of some of the rows, and split the reader's loop into blocks: `CppScheduling.try_loop_split`
    # leaves out the last one if it is not full (torch 2.13).
    if codes == count:
        return torch.as_strided(blocks, shape, _contiguous_strides(shape))
    rows = torch.as_strided(blocks, (parts, count), (codes, 1))
    return rows.reshape(-1, *shape[1:])[: shape[0]]


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides


def _decoded(
    records: Tensor, shape: list[int], parts: int, dtype: torch.dtype, encoding: str
) -> Tensor:
    count = -(-shape[0] // parts) * math.prod(shape[1:])
    blocks = _decoded_blocks(records, _Layout.of(Encoding.parse(encoding), count), parts)
    return _as_rows(blocks.to(dtype), count, shape)


def _decoded_mean(
    records: Tensor, shape: list[int], count: int, parts: int, dtype: torch.dtype, encoding: str
) -> Tensor:
    blocks = _decoded_blocks(records, _Layout.of(Encoding.parse(encoding), count), parts)
    total, *others = blocks.unbind()
    for each in others:
        total = total + each
    return _as_rows((total / parts).to(dtype)[None], count, shape)


# --- operators ------------------------------------------------------------------------------------
_library = torch.library.Library("zpasses", "FRAGMENT")
for _schema in (
    "encode(Tensor value, SymInt count, SymInt parts, str encoding) -> Tensor",
    "encode_with_feedback(Tensor value, Tensor(a!) residual, SymInt count, SymInt parts, "
    "str encoding) -> Tensor",
    "decode(Tensor records, SymInt[] shape, SymInt parts, ScalarType dtype, str encoding)"
    " -> Tensor",
    "decode_mean(Tensor records, SymInt[] shape, SymInt count, SymInt parts, ScalarType dtype, "
    "str encoding) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

ENCODE: compat.OpOverload = torch.ops.zpasses.encode.default
ENCODE_WITH_FEEDBACK: compat.OpOverload = torch.ops.zpasses.encode_with_feedback.default
DECODE: compat.OpOverload = torch.ops.zpasses.decode.default
DECODE_MEAN: compat.OpOverload = torch.ops.zpasses.decode_mean.default


def _encode_fake(value: Tensor, count: int, parts: int, encoding: str) -> Tensor:
    size = parts * Encoding.parse(encoding).record_bytes(count)
    return value.new_empty((size,), dtype=torch.uint8)


def _encode_with_feedback_fake(
    value: Tensor, residual: Tensor, count: int, parts: int, encoding: str
) -> Tensor:
    return _encode_fake(value, count, parts, encoding)


def _decode_fake(
    records: Tensor, shape: list[int], parts: int, dtype: torch.dtype, encoding: str
) -> Tensor:
    return records.new_empty(shape, dtype=dtype)


def _decode_mean_fake(
    records: Tensor, shape: list[int], count: int, parts: int, dtype: torch.dtype, encoding: str
) -> Tensor:
    return records.new_empty(shape, dtype=dtype)


_REFERENCES: dict[compat.OpOverload, Callable[..., Tensor]] = {
    ENCODE: _encoded,
    ENCODE_WITH_FEEDBACK: _encoded_with_feedback,
    DECODE: _decoded,
    DECODE_MEAN: _decoded_mean,
}
_FAKES: tuple[Callable[..., Tensor], ...] = (
    _encode_fake,
    _encode_with_feedback_fake,
    _decode_fake,
    _decode_mean_fake,
)
for (_op, _reference), _fake in zip(_REFERENCES.items(), _FAKES, strict=True):
    _library.impl(_op, _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(_op, _fake, lib=_library)


def encode(value: Tensor, count: int, parts: int, encoding: Encoding) -> Tensor:
    """Encodes a tensor as one record per part.

    Args:
        value: of a dtype in `ENCODED_DTYPES`, with at most parts * count values. Missing values
            are zeros.
        count: values per part.

    Returns:
        uint8[parts * encoding.record_bytes(count)].
    """
    records: Tensor = ENCODE(value, count, parts, str(encoding))
    return records


def encode_with_feedback(
    value: Tensor, residual: Tensor, count: int, parts: int, encoding: Encoding
) -> Tensor:
    """Encodes the sum of a tensor and a residual, and writes what rounding loses of it to the
    residual.

    Args:
        value, count, parts: as for `encode`.
        residual: fp32, of `encoding.residual_shape(count, parts)`; zeros at first.
        encoding: int8 or fp8.
    """
    records: Tensor = ENCODE_WITH_FEEDBACK(value, residual, count, parts, str(encoding))
    return records


def decode(
    records: Tensor, shape: Sequence[int], parts: int, dtype: torch.dtype, encoding: Encoding
) -> Tensor:
    """Decodes a tensor whose rows are cut into `parts` blocks of ceil(rows / parts) rows.

    Args:
        records: one record per block, the last of which may be padded.
        shape: [rows, ...] of the tensor.
    """
    value: Tensor = DECODE(records, list(shape), parts, dtype, str(encoding))
    return value


def decode_mean(
    records: Tensor,
    shape: Sequence[int],
    count: int,
    parts: int,
    dtype: torch.dtype,
    encoding: Encoding,
) -> Tensor:
    """Decodes several tensors and returns their mean, summed in fp32 in their order.

    Args:
        records: one record per tensor.
        shape: [rows, ...] of the tensors, without padding.
        count: values per record, padding included.
    """
    value: Tensor = DECODE_MEAN(records, list(shape), count, parts, dtype, str(encoding))
    return value


def join_records(scales: Tensor, packed: Tensor, rows: int, encoding: Encoding) -> Tensor:
    """Makes records of codes of 4 bits that something else has encoded, whose rows are whole
    blocks.

    Args:
        scales: one per block, [blocks].
        packed: two codes per byte, the first in the higher bits, uint8[values / 2].

    Returns:
        uint8[rows, bytes of a record].
    """
    as_bytes = scales.to(torch.float32).contiguous().view(rows, -1).view(torch.uint8)
    record = torch.cat([as_bytes, packed.reshape(rows, -1)], 1)
    return padded_last(record, encoding.record_bytes(2 * packed.numel() // rows))


def records_of(full: fx.Node) -> fx.Node | None:
    """Returns the records that a full parameter is decoded from; None if it is not encoded.

    Where a parameter stays in memory, its records do.
    """
    return full.all_input_nodes[0] if full.target is DECODE else None


# --- code generation ------------------------------------------------------------------------------
def expand_encodings(gm: fx.GraphModule) -> fx.GraphModule:
    """Replaces encodes and decodes by the operators of torch that they are made of.

    Returns:
        The graph to generate code from: a changed copy of `gm`, or `gm` itself if there is none.
    """
    if not any(_is_expandable(node) for node in gm.graph.nodes):
        return gm
    gm = compat.clone_graph_module(gm)  # listeners and variants use the original graph
    table = compat.inductor_decompositions()
    for node in list(filter(_is_expandable, gm.graph.nodes)):
        _expand(node, table)
    gm.recompile()
    return gm


def _is_expandable(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in _REFERENCES:
        return False
    return node.target is not DECODE_MEAN or _parts_of(node) <= _FEW_PARTS


def _parts_of(decode_mean: fx.Node) -> int:
    parts: Any = decode_mean.args[3]
    return int(parts)


def _expand(node: fx.Node, table: dict[Any, Callable[..., Any]]) -> None:
    sources = [each for each in node.args if isinstance(each, fx.Node)]
    fakes = [each.meta["val"] for each in sources]
    reference: Callable[..., Tensor] = _REFERENCES[node.target]  # type: ignore[index]
    run = functools.partial(_apply, reference, node.args[len(sources) :])
    with compat.fake_mode_of(fakes) or contextlib.nullcontext():
        traced = make_fx(run, table)(*fakes).graph
    given = iter(sources)
    made: dict[fx.Node, fx.Node] = {}
    for each in traced.nodes:
        if each.op == "placeholder":
            made[each] = next(given)
        elif each.op == "output":
            (result,) = each.all_input_nodes
            node.replace_all_uses_with(made[result])
        else:
            with node.graph.inserting_before(node):
                made[each] = node.graph.node_copy(each, made.__getitem__)
            made[each].meta = {**node.meta, "val": each.meta["val"]}
    node.graph.erase_node(node)


def _apply(reference: Callable[..., Tensor], rest: Sequence[Any], *values: Tensor) -> Tensor:
    return reference(*values, *rest)
