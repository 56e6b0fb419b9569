"""What process groups are called in errors: their mesh dimension and their ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist

from zpasses import compat

_dimensions: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def call_dimension(name: str, dimension: str) -> None:
    """Call a group after a mesh dimension in errors. torch notes none for its default group."""
    _dimensions.setdefault(compat.process_group(name), dimension)


def dimension_of(name: str) -> str:
    """Returns the name of the mesh dimension of a group, "" if none is known."""
    return compat.mesh_dimension(name) or _dimensions.get(compat.process_group(name), "")


def name_group(name: str) -> str:
    """A group in an error: "group '3' (mesh dimension 'replicate', ranks 0, 2)"."""
    dimension, ranks = dimension_of(name), compat.group_ranks(name)
    if not dimension:
        return f"group {name!r}"
    return f"group {name!r} (mesh dimension {dimension!r}, ranks {list_ranks(ranks)})"


def list_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks in an error: "0, 1, 2, 3, 4, 5, 6, 7, ..."."""
    return ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")
