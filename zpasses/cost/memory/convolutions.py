"""Memory that convolutions take within a call on a CPU, as measured with oneDNN and fp32.

If its operands are channels last, a convolution copies its weight, with the channels of its result
rounded up to blocks of 16, and makes the gradient of the weight in blocks, too. Otherwise it copies
all operands into blocks of channels, and its result out of them. Backward computes the gradient of
the input first, and then that of the weight. A transposed convolution computes what the gradient of
the input of another one is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.memory.layout_copies import (
    copied_inputs,
    is_depthwise_backward,
    runs_channels_last,
)
from zpasses.graph.aliases import is_view
from zpasses.graph.queries import nbytes, numel, value_of

aten = torch.ops.aten
_BLOCK = 16
"""Channels of a block."""
_CALL_BYTES = 4224
"""What each call takes, and again for each thread."""
_STRIDED_CALL_BYTES, _STRIDED_THREAD_BYTES = 12 << 10, 8216
"""What the gradient of the input of a strided convolution takes, and again for each thread, besides
the gradient of its result."""
_MARGIN_BYTES = 16 << 10
"""What each thread takes there at most if images have a margin."""
_LONG_KERNEL = 15
"""Least length of a kernel whose gradient each thread makes by itself."""


class _Sizes(NamedTuple):
    """Bytes of a convolution, or of that which a transposed one is the gradient of."""

    source: int
    weight: int
    result: int
    channels: int
    out: int
    """Channels of the result."""
    kernel: int
    """Longest dimension of the kernel."""
    dims: int
    groups: int
    is_strided: bool
    batch: int
    image_bytes: int
    """Bytes of the result for one element of the batch, with a margin for the kernel."""
    is_tiny: bool
    """Whether the kernel goes beyond both ends of an image at once."""
    is_within: bool
    """Whether an image is no longer than half a kernel and one more."""
    columns: int
    """Bytes of the source with an element for each that a kernel reads."""
    depth: int
    """First dimension of the image of the result."""


def is_convolution(node: fx.Node) -> bool:
    """Whether a call is a convolution or its backward."""
    return node.target in (aten.convolution.default, aten.convolution_backward.default)


def convolution_bytes(node: fx.Node) -> int:
    """Returns the bytes that a convolution, or its backward, takes besides inputs and outputs."""
    operands: Any = node.args
    is_backward = node.target is aten.convolution_backward.default
    if is_backward:
        gradient, given, weight, _, stride, _, dilation, transposed, _, groups, mask = operands
    else:
        given, weight, _, stride, _, dilation, transposed, _, groups = operands
        gradient, mask = node, (True, False, False)
    source, result = value_of(given), value_of(gradient)
    if transposed:
        source, result = result, source
    if not all(map(numel, (source, result, value_of(weight)))):
        return 0
    sizes = _sizes(source, result, value_of(weight), stride, groups)
    if _is_native(sizes, value_of(given), value_of(weight), max(dilation) > 1):
        return _of_product(sizes, mask if is_backward else None)
    of_result, of_source, of_weight = (
        _channels_last(sizes) if runs_channels_last(node) else _in_blocks(sizes)
    )
    if is_depthwise_backward(node):  # its input is none of both
        of_source, of_weight = of_source + sizes.source, of_weight + sizes.source
    dense = sum(nbytes(value_of(each)) for each in _sliced_operands(node))
    if not is_backward:
        return dense + (of_source if transposed else of_result)
    of_input = (of_result if transposed else of_source) if mask[0] else 0
    return dense + (max(of_input - sizes.weight, of_weight) if mask[1] else of_input)


def _sliced_operands(node: fx.Node) -> list[fx.Node]:
    """Returns the operands of a convolution that are parts of other values, and copied first."""
    copied = copied_inputs(node)
    views = [each for each in node.all_input_nodes if is_view(each) and each not in copied]
    sliced = []
    for each in views:
        value = value_of(each)
        if compat.planned_size(value.shape[0] * value.stride(0)) > numel(value):
            sliced.append(each)
    return sliced


def _sizes(source: Tensor, result: Tensor, weight: Tensor, stride: Any, groups: int) -> _Sizes:
    batch, channels, *pixels = map(compat.planned_size, source.shape)
    _, out, *image = map(compat.planned_size, result.shape)
    _, _, *kernel = map(compat.planned_size, weight.shape)
    steps = stride if len(stride) == len(kernel) else [stride[0]] * len(kernel)
    margins = [(size - 1) // step for size, step in zip(kernel, steps, strict=True)]
    padded = math.prod(size + margin for size, margin in zip(image, margins, strict=True))
    columns = batch * channels * math.prod(kernel) * math.prod(image) * source.element_size()
    return _Sizes(
        nbytes(source),
        nbytes(weight),
        nbytes(result),
        channels,
        out,
        max(kernel),
        len(image),
        groups,
        max(stride) > 1,
        batch,
        out * padded * result.element_size(),
        min(pixels) < max(kernel) + max(stride) - 1,
        max(kernel) > 1 and min(pixels) <= max(kernel) // 2 + 1,
        columns,
        image[0],
    )


def _is_native(sizes: _Sizes, given: Tensor, weight: Tensor, is_dilated: bool) -> bool:
    """Whether torch multiplies matrices itself, by `use_mkldnn` of its `Convolution.cpp`: in fp64,
    kernels of size 1 on one thread, and small inputs.
    """
    if given.dtype == torch.float64:
        return True
    shape = [compat.planned_size(size) for size in given.shape]
    kernel = [1, *(compat.planned_size(size) for size in weight.shape[2:])][-2:]
    is_wide = sizes.is_strided or is_dilated or sizes.batch >= _BLOCK or kernel != [1, 1]
    is_large = (
        sizes.groups > 1 or min(kernel) > 3 or sizes.batch > 1 or math.prod(shape[:4]) > 20480
    )
    return not ((is_wide or torch.get_num_threads() > 1) and is_large)


def _of_product(sizes: _Sizes, mask: Any) -> int:
    """Returns the bytes of a product of matrices, for which torch copies each element of the source
    for each of the kernel, unless that is one element. The gradient of a two-dimensional source
    needs no copies. `mask` says which gradients are computed, and is None in forward.
    """
    if sizes.kernel == 1 and not sizes.is_strided:
        return sizes.source if mask is not None and mask[0] and sizes.dims == 3 else 0
    return sizes.columns if mask is None or mask[1] or sizes.dims == 3 else 0


def _channels_last(sizes: _Sizes) -> tuple[int, int, int]:
    """Returns the bytes of the result, the gradient of the source, and that of the weight."""
    weight, threads = sizes.weight, torch.get_num_threads()
    channels, out = sizes.channels // sizes.groups, sizes.out // sizes.groups
    if channels == out == 1:
        copy = _in_whole_blocks(weight, sizes.groups)
        is_direct = sizes.kernel <= 3 and not sizes.is_tiny
        return copy, copy, weight + (copy if is_direct else weight * _BLOCK**2)
    both = _in_whole_blocks(_in_whole_blocks(weight, channels), out)
    if sizes.groups > 1:
        copy = weight if {channels, out} <= {4, 8} else both
        return copy, copy, weight + both
    per_call = _CALL_BYTES * (1 + threads)
    of_source = per_call
    if sizes.is_strided:
        per_thread = sizes.image_bytes + _STRIDED_THREAD_BYTES
        per_thread += _MARGIN_BYTES if sizes.kernel > 1 else 0
        of_source = _STRIDED_CALL_BYTES + threads * per_thread
    of_result = _in_whole_blocks(weight, out)
    of_weight = weight + (both if channels > _BLOCK else of_result)
    if sizes.kernel >= _LONG_KERNEL:
        per_image = 4 * weight + 2 * sizes.source // sizes.batch + _CALL_BYTES
        of_weight = min(threads, sizes.batch) * per_image
    return of_result + per_call, _in_whole_blocks(weight, channels) + of_source, of_weight


def _in_blocks(sizes: _Sizes) -> tuple[int, int, int]:
    """Returns the bytes of the result, the gradient of the source, and that of the weight."""
    weight, source = sizes.weight, _in_whole_blocks(sizes.source, sizes.channels)
    result = _in_whole_blocks(sizes.result, sizes.out)
    if sizes.groups == 1:
        weight = _in_whole_blocks(_in_whole_blocks(weight, sizes.channels), sizes.out)
    read = source if sizes.channels >= _BLOCK else 0  # it reads few channels where they are
    of_result = max(read + weight + result - sizes.result, result)
    of_source = max(result + weight + source - sizes.source, source)
    is_depthwise = sizes.groups == sizes.channels == sizes.out
    if sizes.is_strided and not is_depthwise:
        of_source = max(of_source, 2 * sizes.source)
    threads = torch.get_num_threads()
    if is_depthwise and sizes.dims != 2:
        return of_result, of_source, 8 * threads * weight
    if is_depthwise and sizes.kernel > 3:  # one channel of one image at a time
        return of_result, of_source, 4 * weight + sizes.columns // (sizes.batch * sizes.channels)
    of_weight = max(read + result + weight - sizes.weight, weight)
    if sizes.dims == 3 and sizes.is_within:  # each thread makes the whole gradient
        columns = sizes.columns // (sizes.batch * sizes.depth)
        of_weight = max(of_weight, min(threads, sizes.batch) * (4 * weight + columns))
    elif sizes.dims == 3:
        of_weight += (threads - 1) * (weight + 2 * _CALL_BYTES)
    return of_result, of_source, of_weight


def _in_whole_blocks(nbytes: int, channels: int) -> int:
    """Returns the bytes of a tensor whose channels are rounded up."""
    return nbytes * -(-channels // _BLOCK) * _BLOCK // channels
