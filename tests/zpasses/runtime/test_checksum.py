"""What a checksum of values tells apart."""

import pytest
import torch

from zpasses.runtime.checksum import checksum

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_in_another_order_are_other_values(dtype):
    board = (torch.arange(64)[:, None] + torch.arange(64)) % 2
    one, other = (checksum(each.to(dtype)) for each in (board, 1 - board))
    assert one != other
    torch.manual_seed(0)
    orders = {int(checksum((torch.randperm(1000) % 7).to(dtype))) for _ in range(20)}
    assert len(orders) == 20
    assert one == checksum(board.to(dtype))


def test_chunks_are_told_apart_and_sizes_too():
    x = torch.zeros(3 << 18)
    sums = {int(checksum(x[:count])) for count in (0, 1, 5)}
    assert sums == {0}  # ranks compare shapes beside it
    for at in (0, 1 << 18, (2 << 18) + 7):
        x.zero_()[at] = 1.0
        sums.add(int(checksum(x)))
    assert len(sums) == 4
    assert checksum(torch.tensor(3.0)) == checksum(torch.tensor([3.0]))


def test_it_is_equal_in_all_processes():
    assert int(checksum(torch.arange(5.0))) == -20100976211918848
