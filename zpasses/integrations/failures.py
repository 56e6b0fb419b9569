"""A failure of one rank, such as a full disk, raised on every rank instead of a hang."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from zpasses.checkpoint.model_tensors import agree, sharding_groups
from zpasses.integrations.preparation import preparation_of
from zpasses.pipeline.options import Options
from zpasses.ranks.vote import DEFAULT_TIMEOUT_S

__all__ = ["fail_on_all_ranks"]


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
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    try:
        agree(sharding_groups(model), f"the end of {occasion}", _limit_s(model), failure=text)
    except Exception as error:
        if failure is not None:
            raise error from failure
        raise


def _limit_s(model: nn.Module) -> float:
    for module in model.modules():
        done = preparation_of(module)
        if done is not None:
            return Options.parse(done.options).agreement_timeout_s
    return DEFAULT_TIMEOUT_S
