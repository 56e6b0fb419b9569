"""Sizes that are rounded up, and rows of zeros after those that a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx


def rounded_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is not less than `size`."""
    return -(-size // multiple) * multiple


def padded(value: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor in `dtype`, [rows, ...], contiguous, with zeros after its own rows. It is
    the given tensor if that has this form already.
    """
    dtype = dtype or value.dtype
    if value.shape[0] == rows:
        return value.to(dtype).contiguous()
    copied = value.new_zeros((rows, *value.shape[1:]), dtype=dtype)
    copied[: value.shape[0]].copy_(value)
    return copied


def padded_last(values: Tensor, size: int) -> Tensor:
    """Returns values with zeros at the end of their last dimension, which then has this size."""
    missing = size - values.shape[-1]
    return F.pad(values, (0, missing)) if missing else values


def call_padded(call: Callable[..., fx.Node], source: fx.Node, missing: Any) -> fx.Node:
    """Inserts by `call` the node that adds `missing` rows of zeros to `source`, and returns it."""
    padding = [0, 0] * (source.meta["val"].dim() - 1) + [0, missing]
    return call(torch.ops.aten.constant_pad_nd.default, source, padding, 0.0)
