"""Models of the tests of checkpoints, and comparisons of whole models."""

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zpasses
from tests.zpasses.models import Odd, Tied, with_integer_weights
from zpasses.testing import world_mesh


class Several(nn.Module):
    """Tied weights, odd shapes, buffers, and dtypes of several widths."""

    def __init__(self):
        super().__init__()
        self.tied, self.odd = with_integer_weights(Tied()), Odd()
        self.norm = nn.BatchNorm1d(4)
        self.narrow = nn.Parameter(torch.arange(9.0).view(3, 3).bfloat16())
        self.wide = nn.Parameter(torch.arange(6.0).view(2, 3).double())
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def changed(model):
    """A copy whose every value differs."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(~value if value.dtype is torch.bool else value + 1)
    return model


def sharded(model, **options):
    return zpasses.shard(copy.deepcopy(model), mesh=world_mesh(), **options)


def values_of(model, optimizer):
    """Everything of a run that must be equal after it resumes: tensors, as DTensors where they are
    shards, and settings of parameter groups.
    """
    names = {param: name for name, param in model.named_parameters()}
    found = {name: value.clone() for name, value in model.named_buffers()}
    for param, name in names.items():
        found[name] = param.detach().clone()
        for key, value in sorted(optimizer.state.get(param, {}).items()):
            found[f"{key} of {name}"] = value.clone() if isinstance(value, torch.Tensor) else value
    for number, group in enumerate(optimizer.param_groups):
        # torch adds `differentiable` to the defaults of any optimizer that loads.
        for key in sorted(group.keys() - {"params", "differentiable"}):
            found[f"{key} of group {number}"] = group[key]
        found[f"group {number}"] = [names[param] for param in group["params"]]
    return found


def assert_equal_values(found, expected):
    """Compares results of `values_of` bit for bit."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, theirs in expected.items():
        mine = found[name]
        if isinstance(theirs, DTensor) and isinstance(mine, DTensor):
            assert mine.placements == theirs.placements, name
            mine, theirs = mine.to_local(), theirs.to_local()
        if isinstance(theirs, torch.Tensor):  # some runs diverge, without zpasses, too
            assert mine.dtype == theirs.dtype, name
            same = torch.equal(mine.isnan(), theirs.isnan())
            same = same and torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        else:
            same = mine == theirs
        assert same, f"{name}: {mine} is not {theirs}"
