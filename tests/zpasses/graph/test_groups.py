"""What process groups are called."""

from datetime import timedelta

import pytest
from torch.distributed.device_mesh import init_device_mesh

from zpasses import compat
from zpasses.graph.groups import group_labels, mesh_dimensions
from zpasses.ranks.new_groups import node_groups
from zpasses.testing.worlds import fake_world


def names(mesh):
    return [compat.group_name(mesh.get_group(at)) for at in range(mesh.ndim)]


@pytest.mark.parametrize("rank", [0, 5])
def test_groups_are_called_after_the_dimensions_of_a_mesh(rank):
    with fake_world(8, rank):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        labels = dict(zip(names(mesh), mesh.mesh_dim_names, strict=True))
        assert group_labels() == labels
        # torch gives the groups of other ranks other names.
        assert (names(mesh)[0] == "1") == (rank == 0)
        flat = mesh["replicate", "shard"]._flatten("dp")
        assert group_labels() == {**labels, names(flat)[0]: "dp"}


def test_later_groups_of_a_dimension_get_a_number_and_those_of_one_rank_come_last():
    with fake_world(8):
        alone = init_device_mesh("cpu", (8, 1), mesh_dim_names=("all", "tp"))
        first = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        second = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "ep"))
        assert group_labels() == {
            names(alone)[1]: "tp/2",
            names(first)[0]: "dp",
            names(first)[1]: "tp",
            names(second)[0]: "dp/2",
            names(second)[1]: "ep",
        }


def test_the_default_group_has_the_dimension_of_a_known_mesh():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        unnamed = init_device_mesh("cpu", (4,))
        assert names(mesh) == names(unnamed) == ["0"]
        assert group_labels() == group_labels(mesh_dimensions([unnamed])) == {}
        assert mesh_dimensions([unnamed, mesh]) == {"0": "dp"}
        assert group_labels(mesh_dimensions([mesh])) == {"0": "dp"}


def test_a_mesh_without_names_has_numbers():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2))
        assert list(group_labels().values()) == ["dim_0", "dim_1"]
        assert list(group_labels()) == names(mesh)


@pytest.mark.parametrize("rank", [0, 5])
def test_groups_of_nodes_are_called_alike_on_all_ranks(rank):
    with fake_world(8, rank):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        for name, label in (("0", "0"), (names(mesh)[1], "shard")):
            made = node_groups(name, 2)
            found = group_labels()
            assert found[made.inside] == f"{label}.in_node"
            assert found[made.across] == f"{label}.across_nodes"
        assert "0" not in found


def test_a_second_group_is_called_after_its_parent():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parent = names(mesh)[0]
        second = compat.second_group_name(parent, 0)
        compat.make_group(
            parent, second, compat.group_ranks(parent), "reductions", timedelta(seconds=5)
        )
        assert group_labels()[parent] == "dp"
        assert group_labels()[second] == "dp.reductions"
