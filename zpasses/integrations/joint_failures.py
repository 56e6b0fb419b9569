"""A failure of one rank, such as a full disk, raised on every rank instead of a hang."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from zpasses.checkpoint.model_tensors import agreed, sharding_groups
from zpasses.integrations.preparation import preparation_of
from zpasses.pipeline.options import Options
from zpasses.ranks.vote import DEFAULT_TIMEOUT_S

__all__ = ["fail_on_all_ranks", "limit_s"]


@contextlib.contextmanager
def fail_on_all_ranks(model: nn.Module, occasion: str) -> Iterator[None]:
    """If the block fails on a rank, raise on every rank at its end. Call it on every rank.

    The block must not communicate after what may fail on one rank only. Ranks wait for each other
    up to the option `agreement_timeout_s` with which the model was prepared.

    Args:
        model: the model over whose ranks the program runs.
        occasion: what the block does, for the error.

    Raises:
        ShardingError: on every rank, if the block failed on one.
        AgreementError: if another rank does not come in time.
    """
    with agreed(sharding_groups(model), f"the end of {occasion}", limit_s(model)):
        yield


def limit_s(model: nn.Module) -> float:
    """Return how long the ranks of a prepared model wait for each other."""
    for module in model.modules():
        done = preparation_of(module)
        if done is not None:
            return Options.parse(done.options).agreement_timeout_s
    return DEFAULT_TIMEOUT_S
