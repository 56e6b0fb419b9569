"""Memory that attention, convolutions and products take within a call, and free before it returns.

The sizes of attention are those that torch allocates in `FlashAttentionKernel.cpp` on a CPU, per
thread, and in `flash_api.cpp` on NVIDIA GPUs: backward adds the gradient of the queries up in fp32,
and makes the gradients of keys and values for each head of the queries. On AMD GPUs, backward only
takes sums of rows. Other kernels of attention, such as those of cuDNN, do not count.

A product copies an operand whose matrices have consecutive elements in neither dimension: on a CPU
one matrix at a time (`addmm_impl_cpu_` in torch's `LinearAlgebra.cpp`), on GPUs all of them
(`cuda/Blas.cpp`).

What convolutions take on a CPU is in `zpasses.cost.memory.convolutions`. On GPUs it does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.cost.memory.convolutions import convolution_bytes, is_convolution
from zpasses.cost.time.fused_kernels import fuses, is_elementwise
from zpasses.cost.time.target import current_target
from zpasses.graph.aliases import view_base
from zpasses.graph.queries import nbytes, value_of

aten = torch.ops.aten

_FORWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
)
_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
)
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_FLOAT_BYTES = 4


def workspace_bytes(node: fx.Node) -> int:
    """Returns the bytes that a call takes on the target besides its inputs and outputs."""
    if is_convolution(node):
        return convolution_bytes(node) if current_target().architecture == "cpu" else 0
    if node.target in _PRODUCTS:
        return sum(_copied_matrix(node, each) for each in node.args[-2:])
    call, args = compat.operator_call(node)
    if call not in _FORWARD + _BACKWARD:
        return 0
    operands = [value_of(each) for each in args if isinstance(each, fx.Node)]
    gradient = operands.pop(0) if call in _BACKWARD else None
    query, key = operands[:2]
    architecture = current_target().architecture
    if architecture == "cpu":
        return _on_cpu(query, key, gradient)
    if gradient is None:
        return 0
    batch, heads, rows, head = _planned(query.shape)
    _, key_heads, key_rows, _ = _planned(key.shape)
    rows = _rounded(rows, 128)
    sums = batch * heads * rows * _FLOAT_BYTES
    if architecture.startswith("gfx"):
        return sums
    of_queries = sums * _rounded(head, 32 if head <= 128 else 64)
    of_groups = 2 * batch * heads * key_rows * head * key.element_size()
    return sums + of_queries + (of_groups if key_heads != heads else 0)


def _copied_matrix(product: fx.Node, operand: Any) -> int:
    """Returns the bytes of the copy of an operand. Inductor lays out what its kernels make for
    products of batches.
    """
    if product.target is aten.bmm.default and fuses() and is_elementwise(view_base(operand)):
        return 0
    value = value_of(operand)
    *_, rows, columns = _planned(value.shape)
    *_, of_row, of_column = _planned(value.stride())
    if (of_column == 1 and of_row >= columns) or (of_row == 1 and of_column >= rows):
        return 0
    on_cpu = current_target().architecture == "cpu"
    return rows * columns * int(value.element_size()) if on_cpu else nbytes(value)


def _on_cpu(query: Tensor, key: Tensor, gradient: Tensor | None) -> int:
    """Each thread computes the scores of a block of queries and keys in fp32. Backward reads rows
    of the gradient that have all heads.
    """
    _, heads, rows, head = _planned(query.shape)
    block = min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32)
    scores = block * min(_planned(key.shape)[2], 512)
    copied = 0
    if gradient is None:
        others = block * (head + 2)
    else:
        scores, others = 2 * scores, block
        by_rows = [rows * heads * head, head, heads * head, 1]
        copied = 0 if _planned(gradient.stride()) == by_rows else nbytes(gradient)
    rounded = query.element_size() if query.element_size() < _FLOAT_BYTES else 0
    accumulated = max(_FLOAT_BYTES, query.element_size())
    per_thread = (scores + others) * accumulated + scores * rounded
    return copied + torch.get_num_threads() * int(per_thread)


def _planned(sizes: Iterable[int]) -> list[int]:
    return [compat.planned_size(size) for size in sizes]


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
