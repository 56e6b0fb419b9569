"""Ranks that hold the same parameters compare their values before they first run a graph with them.

Nothing else would notice replicas that start with different parameters: their gradients are
averaged, so they stay as different as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.ranks.agree import compare
from zpasses.ranks.failures import pass_on_failure
from zpasses.ranks.group_texts import name_group
from zpasses.ranks.vote import Ballot, has_other_ranks
from zpasses.runtime.checksum import checksum
from zpasses.runtime.layout import layout_of, rows_of
from zpasses.runtime.param_value import param_value_of
from zpasses.runtime.windows import grad_state_of


def compare_start_values(params: Sequence[Any], names: Sequence[str], timeout_s: float) -> None:
    """Compare the parameters of a call that have not been compared yet, each once.

    Args:
        params: the sharded parameters of a call; equal on all ranks.
        names: their names, for errors.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        AgreementError: if ranks that should hold equal values do not.
    """
    asked: dict[str, dict[str, Tensor]] = {}
    states = []
    for param, name in zip(params, names, strict=True):
        state = grad_state_of(param)
        if state.values_compared:
            continue
        states.append(state)
        for group in _holders(param):
            asked.setdefault(group, {})[param_value_of(param).identity or name] = rows_of(param)
    try:
        for group in sorted(asked, key=compat.group_ranks):  # one order on all ranks
            _compare(group, asked[group], timeout_s)
    except AgreementError as error:
        every = [group for param in params for group in layout_of(param).sharding_groups]
        pass_on_failure(list(dict.fromkeys(every)), error)
        raise
    for state in states:  # not before: the program may catch the error, and call again
        state.values_compared = True


def _holders(param: Any) -> list[str]:
    """The process groups whose ranks hold equal values of a parameter."""
    groups = layout_of(param).sharding_groups
    return [group for group in (groups[1:] if param.dim() else groups) if has_other_ranks(group)]


def _compare(group: str, values: dict[str, Tensor], timeout_s: float) -> None:
    with torch.no_grad():
        sums = torch.stack([checksum(each) for each in values.values()]).tolist()
    held = [[total, list(each.shape)] for total, each in zip(sums, values.values(), strict=True)]

    def difference(rank_a: int, a: Ballot, rank_b: int, b: Ballot) -> str | None:
        for name, other in b.items():
            first: Any = a.get(name, other)
            if first[1] != other[1]:
                return _other_shape(group, name, rank_a, first[1], rank_b, other[1])
            if first != other:
                return _other_values(group, name, rank_a, rank_b)
        return None

    mine = dict(zip(values, held, strict=True))
    compare(group, "comparing start values", mine, difference, timeout_s)


def _other_shape(
    group: str, name: str, rank: int, shape: list[int], other: int, other_shape: list[int]
) -> str:
    return (
        f"ranks of {name_group(group)} have different models: the shard of parameter "
        f"{name.partition(':')[2] or name} has the shape {shape} on rank {rank}, but {other_shape} "
        f"on rank {other}. These ranks hold the same part of the model. Build the same model on "
        "every rank."
    )


def _other_values(group: str, name: str, rank: int, other: int) -> str:
    return (
        f"ranks of {name_group(group)} start with different values of parameter "
        f"{name.partition(':')[2] or name}: those of rank {rank} and rank {other} differ. These "
        "ranks hold the same part of the model, and only their gradients are averaged. Set the "
        "same seed on every rank before the model is built, or load a checkpoint before the first "
        "step. The option agreement=False compares nothing."
    )
