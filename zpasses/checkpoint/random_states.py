"""The states of this process's random generators: of torch, its accelerator, Python and NumPy."""

from __future__ import annotations

import io
import random
import sys
from typing import Any

import torch

from zpasses import compat


def packed_random_states() -> bytes:
    """Return the states of the default generators of this process.

    Of the accelerator, only the current device counts. NumPy counts if it was imported.
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        states[device.type] = torch.get_device_module(device).get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # A dict for every kind of generator. Files hold tensors in place of arrays.
        state = numpy.random.get_state(legacy=False)
        states["numpy"] = compat.pytree.tree_map_only(numpy.ndarray, torch.tensor, state)
    packed = io.BytesIO()
    torch.save(states, packed)
    return packed.getvalue()


def restore_random_states(packed: bytes) -> None:
    """Set the generators of this process to what `packed_random_states` returned.

    A generator that is not in `packed`, such as that of another kind of device, stays.
    """
    states: dict[str, Any] = torch.load(io.BytesIO(packed), weights_only=True)
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type])
    if "numpy" in states:
        import numpy

        state = compat.pytree.tree_map_only(torch.Tensor, torch.Tensor.numpy, states["numpy"])
        numpy.random.set_state(state)
