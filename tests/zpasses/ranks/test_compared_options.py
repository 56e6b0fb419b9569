"""Ranks with different options hear which ones, before any of them plans."""

import pytest
import torch
import torch.distributed as dist

import zpasses
from tests.on_ranks import on_ranks
from tests.zpasses.models import Blocks
from tests.zpasses.ranks.outcomes import compiled_part, outcome_of
from zpasses.testing import world_mesh

X = torch.linspace(-1, 1, 48 * 32).reshape(48, 32)
DIFFERENT = [
    (
        {"memory_budget": "100MiB"},
        {"memory_budget": "1KiB"},
        "memory_budget is 100MiB on rank 0 and 1KiB on rank 1",
    ),
    (
        {"memory_budget": "20MiB"},
        {"memory_budget": "10MiB"},
        "memory_budget is 20MiB on rank 0 and 10MiB on rank 1",
    ),
    (
        {"memory_budget": "5MiB", "host_memory": "1MiB"},
        {"memory_budget": "5MiB", "host_memory": "64KiB"},
        "host_memory is 1MiB on rank 0 and 64KiB on rank 1",
    ),
    (
        {"memory_budget": "5MiB"},
        {"memory_budget": "5MiB", "host_memory": "1MiB"},
        "host_memory is not given on rank 0 and 1MiB on rank 1",
    ),
    (
        {"memory_budget": "1KiB"},
        {},
        "memory_budget is 1KiB on rank 0 and not given on rank 1",
    ),
    (
        {"memory_budget": "auto"},
        {"memory_budget": "5MiB"},
        "memory_budget is auto on rank 0 and 5MiB on rank 1",
    ),
]


def _step(options):
    """One step of a new model, and what became of it."""
    torch.manual_seed(0)
    step = compiled_part(zpasses.shard(Blocks(), mesh=world_mesh()), **options[dist.get_rank()])
    return outcome_of(lambda: step(X).sum().backward())[1]


@on_ranks(2)
def test_options_that_differ_are_named_on_both_ranks_and_equal_ones_train():
    equal = [{"memory_budget": "1GiB"}, {"memory_budget": "1024MiB"}]
    assert _step(equal) is None
    for first, other, said in DIFFERENT:
        text = _step([first, other])
        assert text is not None, said
        assert f"AgreementError: ranks compile with different options: {said}; give all" in text
    assert _step(equal) is None


@pytest.mark.slow(quick="test_options_that_differ_are_named_on_both_ranks_and_equal_ones_train")
@pytest.mark.inductor
@on_ranks(2)
def test_options_of_generated_code_and_of_blocks_are_compared():
    for first, other, said in DIFFERENT[:5]:
        inductor = {"codegen": "inductor"}
        text = _step([{**first, **inductor}, {**other, **inductor}])
        assert f"different options: {said}; give all ranks the same." in text
    budgets = ("20MiB", "10MiB")[dist.get_rank()]
    model = zpasses.shard(Blocks(), mesh=world_mesh())
    zpasses.compile_blocks(model, "up.*,down.*", memory_budget=budgets, codegen="eager")
    said = outcome_of(lambda: model(X).sum().backward())[1]
    assert "memory_budget is 20MiB on rank 0 and 10MiB on rank 1; give" in said
