"""State of one rank that must not be taken for the state of the model, or of another rank.

`model.state_dict()` of a sharded model holds the shards. Distributed checkpoint saves them
correctly. Code that writes tensors by their memory, such as safetensors, would write one rank's
rows as if they were the model. So the values are `StateShard`s, whose memory is not accessible.

`torch.save` of a state dict writes the shards of one rank, and a file of one rank must not be
loaded on another. A pickled DTensor holds its device mesh, and that holds the rank that pickled it.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.ranks.failures import report_failure
from zpasses.runtime.edits import note_edit
from zpasses.runtime.layout import layout_of
from zpasses.runtime.watched import WatchedShard, alias, await_device_reads, plain_dtensor
from zpasses.runtime.windows import GRAD_STATE_ATTRIBUTE
from zpasses.sharding.guard import check_inputs_of_backward
from zpasses.sharding.param_spec import shard_tensor
from zpasses.sharding.refused_optimizers import check_optimizer
from zpasses.sharding.replaced_params import check_current

_SAVE_INSTEAD = (
    "To write the whole model, call zpasses.save_safetensors(model, path) on every rank, or "
    "state = zpasses.full_state_dict(model) on every rank and save that, for example by "
    "save_pretrained(path, state_dict=state). To write shards, pass model.state_dict() to "
    "torch.distributed.checkpoint.save."
)


class StateShard(WatchedShard):
    """A value of a sharded model's state dict: a DTensor that shares the parameter's memory.

    Copies are StateShards too. Results of other operations are not. A plain DTensor is what
    `pickle` and `torch.save` write.
    """

    def untyped_storage(self) -> NoReturn:
        raise ShardingError(_not_the_model(self))

    def storage(self) -> NoReturn:
        raise ShardingError(_not_the_model(self))

    def to_local(self, **kwargs: Any) -> Tensor:
        # Checkpoints read and write it in place, which its version counter shows.
        await_device_reads(self)
        return plain_dtensor(self).to_local(**kwargs)

    def detach(self) -> StateShard:
        return as_state_shard(super().detach())

    def clone(self, *args: Any, **kwargs: Any) -> StateShard:
        return as_state_shard(super().clone(*args, **kwargs))

    def cpu(self, *args: Any, **kwargs: Any) -> StateShard:
        return as_state_shard(super().cpu(*args, **kwargs))

    def to(self, *args: Any, **kwargs: Any) -> StateShard:
        return as_state_shard(super().to(*args, **kwargs))

    def contiguous(self, *args: Any, **kwargs: Any) -> StateShard:
        return as_state_shard(super().contiguous(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> StateShard:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        made: StateShard = memo[id(self)]
        return made


def as_state_shard(value: Tensor) -> StateShard:
    """Wrap a DTensor without autograd history. The memory is shared."""
    assert isinstance(value, DTensor)
    made = alias(cast(WatchedShard, value))
    made.__class__ = StateShard
    return cast(StateShard, made)


def _not_the_model(value: DTensor) -> str:
    own, ranks = tuple(compat.local_of(value).shape), value.device_mesh.size()
    held = f"{own[0]} of {value.shape[0]} rows" if value.dim() else "a copy"
    if own[1:] != tuple(value.shape[1:]):
        held = f"{list(own)} of {list(value.shape)}"
    return (
        f"this value of a state dict is not a whole parameter: the model is sharded by zpasses "
        f"over {ranks} ranks, and this rank holds {held}. Its memory alone would be saved as if it "
        f"were the model. {_SAVE_INSTEAD}"
    )


# --- files of one rank that another rank loads ----------------------------------------------------
def check_owner(value: DTensor, param: DTensor, what: str) -> None:
    """Raise ShardingError if a value was saved by another rank, or over another mesh, than that of
    the parameter that it belongs to.

    Args:
        value: a tensor that was loaded.
        what: what it is, for the error, such as "exp_avg of the optimizer".
    """
    mesh = param.device_mesh
    saved = value.device_mesh.get_coordinate()
    if value.device_mesh != mesh:
        cause = f"was saved over {value.device_mesh}, and the parameter is sharded over {mesh}"
    elif saved != mesh.get_coordinate():
        cause = f"was saved by rank {_told(saved)} of the mesh, and this is rank " + _told(
            mesh.get_coordinate()
        )
    elif (
        value.placements == param.placements
        and value.shape == param.shape
        and compat.local_of(value).shape != compat.local_of(param).shape
    ):
        cause = (
            f"holds {list(compat.local_of(value).shape)} of {list(param.shape)}, and this rank "
            f"{list(compat.local_of(param).shape)}"
        )
    else:
        return
    error = ShardingError(
        f"{what} {cause}. A state dict of a model that zpasses sharded holds the shards of one "
        "rank, so torch.save on one rank does not save those of the others. Save and load with "
        "torch.distributed.checkpoint and zpasses.training_state, on any number of ranks; or "
        "let each rank save and load a file of its own. For the model, zpasses.full_state_dict(...)"
        " and zpasses.save_safetensors(...) give the whole parameters."
    )
    groups = [compat.group_name(mesh.get_group(dim)) for dim in range(mesh.ndim)]
    report_failure(groups, error, "loading saved shards")
    raise error


def _told(coordinate: Any) -> str:
    return "none" if coordinate is None else ", ".join(map(str, coordinate))


_CHECKED = "_zpasses_checked_state"


def check_before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Check an optimizer before its first step, and its state if that is new."""
    state = optimizer.state  # `load_state_dict` makes a new one
    check_current(optimizer)
    check_inputs_of_backward()
    if getattr(optimizer, _CHECKED, None) is state:
        return
    if any(_is_ours(param) for group in optimizer.param_groups for param in group["params"]):
        check_optimizer(optimizer)
    check_state(optimizer)  # an optimizer may load state without torch's `load_state_dict`
    setattr(optimizer, _CHECKED, state)


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """Check the state that an optimizer has loaded, and shard what the state of the unsharded model
    has.
    """
    ours = {
        param: entries
        for param, entries in optimizer.state.items()
        if _is_ours(param) and isinstance(entries, dict)
    }
    # Numbers such as the count of steps look like values of a parameter without dimensions.
    of_scalars = {
        name
        for param, entries in ours.items()
        for name, value in entries.items()
        if param.dim() and isinstance(value, Tensor) and value.shape == param.shape
    }
    for param, entries in ours.items():
        note_edit(param, "load of the state of an optimizer")
        for name, value in entries.items():
            if isinstance(value, DTensor):
                check_owner(value, cast(DTensor, param), f"{name} of the optimizer's state")
            elif not isinstance(value, Tensor) or value.shape != param.shape:
                continue
            elif value.dim() or name in of_scalars:
                # That of the unsharded model, whose parameters have full values, too.
                note_edit(param, f"load of the optimizer's {name}", value)
                entries[name] = shard_tensor(value, layout_of(cast(DTensor, param)))


def _is_ours(param: Tensor) -> bool:
    return isinstance(param, DTensor) and hasattr(param, GRAD_STATE_ATTRIBUTE)
