"""How one parameter of a module is sharded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.graph.encoding import Encoding, decode, encode
from zpasses.runtime.layout import ParamLayout


@dataclass(frozen=True)
class RestingCodes:
    """What the rows of a parameter that rests encoded decode to.

    The parameter is uint8[rows, bytes of a record]: rows are cut and gathered as those of any
    other one, and each read decodes what it has gathered.
    """

    attribute: str
    """The name by which the module reads it. That of the parameter says how it is encoded."""
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    encoding: str
    """As text (`zpasses.graph.encoding`)."""

    @property
    def name(self) -> str:
        """The name of the parameter, such as "weight_nf4_64"."""
        return f"{self.attribute}_{self.encoding.replace('/', '_')}"

    def encoded(self, rows: Tensor) -> Tensor:
        """Encodes rows, [any, *row_shape], as records, uint8[any, bytes of a record]."""
        how, count, number = Encoding.parse(self.encoding), math.prod(self.row_shape), len(rows)
        return encode(rows, count, number, how).view(number, how.record_bytes(count))

    def decoded(self, records: Tensor) -> Tensor:
        """The inverse of `encoded`, up to rounding."""
        rows, how = records.shape[0], Encoding.parse(self.encoding)
        return decode(records, [rows, *self.row_shape], rows, self.dtype, how)


@dataclass(frozen=True)
class ParamShardSpec:
    """How one parameter of a module is sharded and read."""

    name: str
    shape: torch.Size
    """Of the full parameter. Dynamo compares the shape of this rank's rows and the class of a
    module, which differs with this."""
    layout: ParamLayout
    param_dtype: torch.dtype | None
    """Gather and compute in this dtype; None keeps the shard's dtype."""
    reduce_dtype: torch.dtype | None
    """Reduce gradients in this dtype; None keeps the gradient's dtype."""
    device: torch.device | None = None
    """Where the shard, which rests on the host, comes for each read; None if it rests there."""
    is_trained: bool = False
    """Whether a parameter on the host may be trained: its gradients go to the host."""
    codes: RestingCodes | None = None
    """What the parameter's rows decode to; None if they are exact values."""

    @property
    def attribute(self) -> str:
        """The name by which the module reads the parameter."""
        return self.name if self.codes is None else self.codes.attribute

    @property
    def places(self) -> tuple[Any, ...]:
        """The process groups and the device that `unshard` takes, as few as it needs."""
        layout = self.layout
        if self.device is None and layout.reshard_group is None:
            return layout.sharding_groups
        group, replicate_group, *_ = (*layout.sharding_groups, None)
        groups = group, replicate_group, layout.reshard_group
        if self.device is None:
            return groups
        return (*groups, None, self.device, *[True] * self.is_trained)


def trained_on_host(name: str) -> str:
    """Returns the text of an error."""
    return (
        f"parameter {name!r} rests on the host and is trained (requires_grad), but it was frozen "
        "when it went there. Freeze it again, or let its gradients go to the host, too: "
        "zpasses.offload_parameters(model, trained=True)."
    )


def check_may_replace(module: nn.Module, attribute: str) -> None:
    """Raise ShardingError if a module reads an encoded parameter under this name."""
    specs: dict[str, ParamShardSpec] = getattr(module, "_zpasses_specs", {})
    codes = next((each.codes for each in specs.values() if each.attribute == attribute), None)
    if codes is not None and codes.name in module._parameters:
        raise ShardingError(
            f"assigned to {attribute!r} of a {type(module).__name__}, which rests encoded "
            f"({codes.encoding}). Assign before zpasses.encode_parameters, or write records: "
            f"module.get_parameter({codes.name!r}).copy_(records), in torch.no_grad()."
        )


def shard_tensor(param: Tensor, layout: ParamLayout) -> DTensor:
    """Shard a full parameter, as a DTensor with memory of its own.

    Nothing is communicated. The shard is copied, so that the full tensor can be freed.

    Args:
        param: the full parameter, equal on every rank; or a DTensor on the layout's inner mesh. A
            0-dimensional one is replicated.
    """
    return layout.wrap(layout.owned(own_part(param, layout)), param.shape)


def own_part(param: Tensor, layout: ParamLayout) -> Tensor:
    """Return this rank's shard of a parameter as a detached view: the whole of a 0-dimensional one.

    Args:
        param: as for `shard_tensor`.
    """
    full = param.detach()
    if not isinstance(full, DTensor):
        return layout.local_part(full)
    piece = compat.local_of(full)
    return piece.narrow(layout.dim, *layout.row_range(full.shape)) if full.dim() else piece
