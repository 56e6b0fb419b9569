import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from zpasses.testing import fake_world


def test_world_has_the_given_size_and_rank():
    with fake_world(512, 500) as mesh:
        assert (dist.get_world_size(), dist.get_rank()) == (512, 500)
        assert (mesh.size(), mesh.get_local_rank()) == (512, 500)
    assert not dist.is_initialized()
    with pytest.raises(KeyError), fake_world(2):
        raise KeyError
    assert not dist.is_initialized()


def test_second_world_is_refused_and_the_first_stays():
    message = r"already rank 1 of 2 of a 'fake' process group.*destroy_process_group"
    with fake_world(2, 1):
        with pytest.raises(RuntimeError, match=message), fake_world(3):
            pass
        assert dist.get_world_size() == 2


@pytest.mark.parametrize(("size", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_rank_must_lie_in_the_world(size, rank):
    with pytest.raises(ValueError, match=r"0 <= rank < world_size"), fake_world(size, rank):
        pass


def test_groups_have_the_same_names_on_every_rank_and_in_every_world():
    names = []
    for rank in range(2):
        with fake_world(2, rank) as mesh:
            names.append(mesh.get_group().group_name)
    assert names == ["0", "0"]


def _accumulated_rows(rank):
    with fake_world(2, rank) as mesh:
        weight = nn.Parameter(
            distribute_tensor(torch.ones(3, 6), mesh, [Shard(0)], src_data_rank=None)
        )
        for _ in range(2):
            torch.autograd.backward([weight], [weight.detach().clone()])
        return weight.grad.to_local().shape[0]


def test_dtensor_caches_of_one_rank_are_not_used_for_another():
    assert [_accumulated_rows(rank) for rank in (1, 0, 1)] == [1, 2, 1]
