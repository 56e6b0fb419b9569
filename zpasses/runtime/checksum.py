"""A checksum of the values of a tensor, by which ranks compare them."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20
"""Elements that are summed at once, so that little memory is needed."""


def checksum(values: Tensor) -> Tensor:
    """A sum over the bits of a tensor, in the order of its memory, as an int64 scalar."""
    flat = values.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(sizes[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in bits.split(_CHUNK):
        total = total * 31 + part.sum(dtype=torch.int64)
    return total
