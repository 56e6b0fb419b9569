"""The value of a sharded parameter: which parameter it is, whether it has changed, and the full
copy that stages 1 and 2 keep between calls of compiled graphs.

Each sharded parameter has one `ParamValue`. All graphs that read the parameter (training,
evaluation, both halves of a graph break) share its full copy, and the copy does not outlive the
parameter.

A full copy is fresh until the parameter's gradient is reduced, an optimizer steps, or its shard
changes. Ranks that run the same program see these three events identically, also if a rank holds an
empty shard. They have to, because ranks that disagree on whether to gather would wait for each
other. zpasses.runtime.watched counts the changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.ranks.edit_log import EditLog
from zpasses.runtime.edits import (
    EditedParam,
    ShardMemory,
    argument_number,
    count_edit,
    memory_of,
    number_of,
)
from zpasses.runtime.layout import LAYOUT_ATTRIBUTE, ParamLayout
from zpasses.runtime.watched import VALUE_ATTRIBUTE, watch

Stamp = tuple[object, int]
"""Equal as long as nothing has changed a shard."""


class ParamValue:
    """Identity and full copy of one parameter."""

    __slots__ = ("copies", "encoding", "full", "identity", "shard", "stamp")

    def __init__(self, identity: str = "") -> None:
        self.identity = identity
        """Says which parameter it is, equally on all ranks: "2:layers.0.weight" was sharded in the
        second call of `zpasses.shard` for its mesh, and "2:layers.0.weight, copy 1" is the first
        copy that `copy.deepcopy` made of it."""
        self.copies = 0
        """Number of deep copies."""
        self.full: Tensor | None = None
        """The full parameter, or the codes of its values (`zpasses.graph.encoding`)."""
        self.encoding = ""
        """How it is encoded; "" if it is not."""
        self.shard: Tensor | None = None
        self.stamp: Stamp | None = None

    def copied(self) -> ParamValue:
        """Returns the value of the next deep copy."""
        self.copies += 1
        return ParamValue(f"{self.identity}, copy {self.copies}" if self.identity else "")

    def is_fresh(self, param: DTensor, shard: Tensor, dtype: torch.dtype, encoding: str) -> bool:
        """Whether the copy was gathered in this form from this shard, which has not changed
        since.
        """
        full, seen = self.full, self.shard
        return (
            full is not None
            and seen is not None
            and (full.dtype, self.encoding) == (dtype, encoding)
            and compat.address(seen) == compat.address(shard)
            and self.stamp is not None
            and stamp_of(param, shard) == self.stamp
        )

    def store(self, full: Tensor, param: DTensor, shard: Tensor, encoding: str) -> None:
        # The reference to the shard prevents another tensor from reusing its address.
        self.full, self.shard, self.stamp = full, shard, stamp_of(param, shard)
        self.encoding = encoding
        if (memory := memory_of(param)) is not None:
            memory.copied = True

    def drop(self) -> None:
        self.full = self.shard = None


def stamp_of(param: Any, shard: Tensor) -> Stamp | None:
    """Returns what says whether the shard of a parameter has changed.

    None, which is never fresh, for tensors made in inference mode, which have no version counter.
    """
    memory = memory_of(param)
    if memory is None:
        return None
    try:
        return memory, memory.edits + shard._version
    except RuntimeError:  # made in inference mode
        return None


def look_after(params: Sequence[Any]) -> None:
    """Count edits by code that has local tensors of parameters (`ShardMemory.look_after`).

    Called in every step, before the parameters are read.
    """
    for param in params:
        memory = memory_of(param)
        if memory is not None and memory.exposed is not None:
            memory.look_after(compat.local_of(param))


def value_stamps(params: Sequence[Any]) -> list[list[Any]]:
    """Returns what changes with each edit of one of these parameters that is seen. Called in every
    step.
    """
    try:
        memories = [param._zpasses_memory for param in params]
        return [memories, [each.edits for each in memories], compat.versions_of(params)]
    except RuntimeError:  # made in inference mode
        return [memories, [each.edits for each in memories]]


def param_value_of(param: Any) -> ParamValue:
    """Return the value of a parameter; the first call creates it."""
    value: ParamValue | None = getattr(param, VALUE_ATTRIBUTE, None)
    if value is None:
        value = ParamValue()
        setattr(param, VALUE_ATTRIBUTE, value)
    return value


def as_sharded_parameter(
    param: nn.Parameter, layout: ParamLayout, value: ParamValue | None = None
) -> nn.Parameter:
    """Make a DTensor parameter one of a sharded model, in place, and return it.

    Args:
        param: over the layout's mesh. If it is a tensor that shares the memory of another sharded
            parameter, edits of one count for both.
        layout: how it is cut.
        value: identity of the parameter whose place it takes.
    """
    watch(param, memory_of(param) or ShardMemory())
    setattr(param, LAYOUT_ATTRIBUTE, layout)
    if value is not None:
        identify(param, ParamValue(value.identity))
    return param


def identify(param: Any, value: ParamValue) -> None:
    """Give a parameter its identity, by which its edits are counted, too."""
    setattr(param, VALUE_ATTRIBUTE, value)
    memory = memory_of(param)
    if memory is not None and memory.owner is None and value.identity:
        memory.owner = EditedParam(value.identity, getattr(param, LAYOUT_ATTRIBUTE).sharding_groups)


def is_sharded_parameter(param: object) -> bool:
    """Whether a tensor is a parameter of a sharded model."""
    return hasattr(param, LAYOUT_ATTRIBUTE)


def count_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Count an edit of an optimizer's parameters after its step, and drop their full copies.

    A hook after steps. It also serves compiled steps, and optimizers whose kernels write to the
    memory of the shards.
    """
    logs: tuple[EditLog, ...] = ()
    name = f"a completed {type(optimizer).__name__}.step()"
    number, settings = number_of(name), _settings_number(optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            memory = memory_of(param)
            if memory is None:
                continue
            if param.requires_grad or param.grad is not None:  # optimizers skip the others
                memory.count(settings)
                drop_cached(param)
            if memory.owner is not None and memory.owner.logs is not logs:
                logs = memory.owner.logs
                for log in logs:
                    log.add_step(name, number, settings)


def _settings_number(optimizer: torch.optim.Optimizer) -> int:
    """Returns a number of the learning rates and other settings of an optimizer, equal on all ranks
    that have the same.
    """
    groups = optimizer.param_groups
    return argument_number(
        [value for group in groups for name, value in group.items() if name not in _NOT_SETTINGS]
    )


_NOT_SETTINGS = ("params", "param_names")


def mark_edited(param: Any, what: str) -> None:
    """Count an edit that no operator made, and drop the full copy.

    Args:
        what: the edit, for errors.
    """
    count_edit(param, what)
    drop_cached(param)


def drop_cached(param: Any) -> None:
    """Drop the full copy of a parameter, if there is one. Every rank does it."""
    value = getattr(param, VALUE_ATTRIBUTE, None)
    if value is not None:
        value.drop()
    memory = memory_of(param)
    if memory is not None:
        memory.copied = False
