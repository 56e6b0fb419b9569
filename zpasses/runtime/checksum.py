"""A checksum of the values of a tensor, by which ranks compare them."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 18
"""Elements that are summed at once, so that little memory is needed."""


def checksum(values: Tensor) -> Tensor:
    """A sum over the bits of a tensor that depends on where they are, as an int64 scalar."""
    flat = values.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    # Of 64 bits, the lower half: a weight's product with the upper bits alone may overflow to 0.
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
    bits = flat.view(sizes[flat.element_size()])
    weights = _weights(values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in bits.split(_CHUNK):
        total = total * 31 + (part * weights[: part.numel()]).sum()
    return total


def _weights(device: torch.device) -> Tensor:
    """Returns odd numbers without a pattern, int64[_CHUNK], equal in all processes: positions in
    SplitMix64's mix (Steele and others, 2014).
    """
    known = _known.get(device)
    if known is None:
        mixed = torch.arange(1, _CHUNK + 1, device=device) * -0x61C8864680B583EB
        mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
        known = (mixed ^ (mixed >> 27)) | 1
        if type(known) is Tensor:  # else a tensor without values, of a trace
            _known[device] = known
    return known


_known: dict[torch.device, Tensor] = {}
