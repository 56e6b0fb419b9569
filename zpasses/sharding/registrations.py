"""Gathered copies that modules register as parameters or buffers.

`head.weight = embed.weight` registers what `embed.weight` returns. On a sharded model that is a
gathered copy. As a parameter, it stands for the parameter that was read, so that weights are tied
and torch's parametrizations are registered as in an unsharded model. As a buffer, it would hold old
values after the next step.
"""

from __future__ import annotations

from torch import Tensor, nn

from zpasses.errors import ShardingError
from zpasses.sharding.guard import GatheredCopy, GatheredPiece, check_source
from zpasses.sharding.module import register_source


def on_parameter(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
    if not isinstance(param, (GatheredCopy, GatheredPiece)):
        return None
    return register_source(module, name, check_source(param, name))


def on_buffer(module: nn.Module, name: str, value: Tensor | None) -> None:
    if isinstance(value, (GatheredCopy, GatheredPiece)):
        raise ShardingError(
            f"buffer {name!r} of a {type(module).__name__} would be {value._label}, which is "
            "sharded: a read returns a gathered copy, which keeps its values when the parameter "
            "changes. Register a copy of the value if that is what it is for, "
            "value.detach().clone(), or the parameter itself."
        )
