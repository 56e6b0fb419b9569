"""Optimizers that are wrong on sharded parameters, or that DTensor refuses without a way out."""

from __future__ import annotations

import warnings

import torch
from torch.distributed.tensor import DTensor

from zpasses.errors import ShardingError
from zpasses.runtime.shard_step import steps_by_element
from zpasses.sharding.guard import last_read

_WAYS_OUT: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Muon: (
        "orthogonalises DTensors by sums over ranks that round differently, so it drifts from the "
        "unsharded optimizer. Use zpasses.optim.Muon, which takes the same arguments and is exact"
    ),
    torch.optim.Adafactor: (
        "needs means over rows and columns that DTensor cannot compute in place. Use "
        "zpasses.optim.Adafactor, which takes the same arguments"
    ),
    torch.optim.LBFGS: (
        "flattens all parameters into one vector, which shards do not form. Use another optimizer, "
        "or leave the parameters unsharded (ignored_params) and average their gradients"
    ),
}
"""Class -> what it does, and what to use. Subclasses are not refused."""

_OF_OTHERS = {
    ("transformers.optimization", "Adafactor"): (
        "mixes its own plain tensors with DTensors. Use zpasses.optim.Adafactor, which is torch's "
        "variant: convert the arguments, lr is its largest relative step"
    ),
    ("prodigyopt.prodigy", "Prodigy"): (
        "reads sums over each parameter as numbers, of which each rank has a part. Use AdamW with "
        "a learning rate of your choice"
    ),
}
"""Module and name of a class -> the same."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ShardingError for an optimizer that cannot step sharded parameters correctly, and warn
    of empty groups.
    """
    kind = type(optimizer)
    why = _WAYS_OUT.get(kind) or _OF_OTHERS.get((kind.__module__, kind.__name__))
    if why is not None:
        raise ShardingError(
            f"{kind.__name__} on parameters that zpasses sharded: it {why}. "
            "The page about optimizers in the documentation lists what is exact."
        )
    if not steps_by_element(optimizer):
        _check_groups(optimizer)
    _warn_of_empty_groups(optimizer)


def _warn_of_empty_groups(optimizer: torch.optim.Optimizer) -> None:
    """Warn of groups that may have been chosen by `id(module.weight)`. Python tells nobody of it,
    but such a read comes before.
    """
    read = last_read()
    for number, group in enumerate(optimizer.param_groups):
        if read is not None and not group["params"]:
            warnings.warn(
                f"{type(optimizer).__name__}: parameter group {number} is empty. If parameters "
                "were to go there by id(module.weight) or `is`, none did: the model is sharded, "
                f"and each read of a parameter (such as that of {read}) returns another gathered "
                "copy. Choose them by their names in model.named_parameters(), or compare with "
                "model.get_parameter(name).",
                stacklevel=2,
            )


def _check_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raise ShardingError for a group whose parameters one operator would take together, if some
    are sharded and others are not.
    """
    for number, group in enumerate(optimizer.param_groups):
        flag = next((name for name in ("fused", "foreach") if group.get(name)), None)
        trained = [param for param in group["params"] if param.requires_grad]
        plain = [param for param in trained if not isinstance(param, DTensor)]
        if flag is not None and plain and len(plain) < len(trained):
            raise ShardingError(
                f"{type(optimizer).__name__}({flag}=True), parameter group {number}: it has "
                f"{len(trained) - len(plain)} sharded parameters and {len(plain)} that are not, "
                f"the first of shape {list(plain[0].shape)}, and torch has no {flag} operator for "
                "both together. Put those that are not sharded (ignored_params) into a group of "
                f"their own, or leave {flag} out."
            )
