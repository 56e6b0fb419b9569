"""What process groups are called: the dimension of a device mesh that a group belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.distributed.device_mesh import DeviceMesh

from zpasses import compat


def mesh_dimensions(meshes: Iterable[DeviceMesh]) -> dict[str, str]:
    """Returns process group -> name of its dimension, for the dimensions of meshes that have names.

    A group knows the dimension that it was made for, except for the default group, which torch
    takes for a dimension of all ranks.
    """
    found: dict[str, str] = {}
    for mesh in meshes:
        for at, name in enumerate(mesh.mesh_dim_names or ()):
            found.setdefault(compat.group_name(mesh.get_group(at)), name)
    return found


def group_labels(known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns process group -> its label, for all groups of this process that have one.

    The label is the name of the mesh dimension: "dp". Other groups of dimensions of the same name,
    in the order in which they were made, are "dp/2", "dp/3", ...; groups of one rank come last. The
    label of a group that a pass made is from `label_of`. Ranks that make the same meshes have the
    same labels, whereas the names of their groups differ. Other groups have no label.

    Args:
        known: `mesh_dimensions` of the meshes in use.
    """
    names = compat.group_names()
    parents = {name: compat.parent_group(name) for name in names}
    dimensions = {
        name: (known or {}).get(name) or compat.mesh_dimension(name)
        for name in dict.fromkeys(parents.values())
        if name in names
    }
    owners: dict[str, list[str]] = {}
    for name, dimension in dimensions.items():
        owners.setdefault(dimension, []).append(name)
    labels = {}
    for dimension, groups in owners.items():
        groups.sort(key=lambda name: len(compat.group_ranks(name)) == 1)
        for number, name in enumerate(groups, 1):
            labels[name] = dimension if number == 1 else f"{dimension}/{number}"
    labels = {name: label for name, label in labels.items() if dimensions[name]}
    return {name: label for name in parents if (label := label_of(name, labels))}


def label_of(name: str, labels: Mapping[str, str]) -> str:
    """Returns the label of a process group, "" if it has none.

    A group that a pass made for gradient reductions has the label of its parent, with an ending.
    Ranks of different nodes have different groups of this kind, so these have the parent's name
    with the ending if the parent has no label.

    Args:
        labels: process group -> its label, of parents that have one.
    """
    parent = compat.parent_group(name)
    found = labels.get(parent, parent) + compat.group_suffix(name)
    return found if found != name or name in labels else ""
