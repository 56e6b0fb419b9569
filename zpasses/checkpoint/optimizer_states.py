"""What optimizers hold of parameters in a checkpoint of a training run, written and read by name.

torch's own `get_optimizer_state_dict` makes state where there is none, by a step with gradients of
0, which Adam counts. Here, the state is what `optimizer.state` holds, and what is read is what the
checkpoint holds. So values need a destination before any value is there: a group also says which
values are laid out as their parameter is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from zpasses import compat
from zpasses.errors import ShardingError
from zpasses.runtime.offloaded import is_offloaded

LIKE_PARAMETER, REPLICATED, PLAIN = "like the parameter", "replicated", "plain"

_NOT_SETTINGS = ("params", "param_names")
"""Keys of a parameter group that name its parameters."""


def is_rank(rank: int) -> bool:
    """Whether this process is the rank, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == rank


# --- the state of a rank --------------------------------------------------------------------------
def optimizer_state(
    optimizer: Optimizer, names: Mapping[Tensor, str], writer: int, held: list[Any]
) -> dict[str, Any]:
    """Return what this rank writes of an optimizer.

    Args:
        held: what must be equal on all ranks is added to it.
    """
    packed = _packed(optimizer)
    states: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    rest = dict(packed["state"])
    for group, own in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        layouts: list[tuple[str, tuple[Any, ...], str]] = []
        members = [_name(param, names, optimizer) for param in group["params"]]
        for name, param, index in zip(members, group["params"], own["params"], strict=True):
            writes = is_rank(
                min(compat.mesh_ranks(param.device_mesh)) if isinstance(param, DTensor) else writer
            )
            for path, value in _leaves(rest.pop(index, {})):
                layouts.append((name, path, _layout(value, param, name, path)))
                if writes or isinstance(value, DTensor):
                    states.setdefault(name, {})[_joined(path)] = value
        held.append([members, [[name, _joined(path), kind] for name, path, kind in layouts]])
        if members and is_rank(writer):
            settings = {key: _copy(own[key]) for key in own if key not in _NOT_SETTINGS}
            groups[members[0]] = (settings, members, layouts)
    if rest:
        raise ShardingError(
            f"{type(optimizer).__name__} holds state under {next(iter(rest))!r}, which is not a "
            "parameter. Save it beside the training state, under a key of your own."
        )
    return {"state": states, "groups": groups}


def _packed(optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()`, which fails for state of a tensor that it does not step.

    Raises:
        ShardingError: if there is such state.
    """
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for key in optimizer.state:
        if isinstance(key, Tensor) and id(key) not in stepped:
            raise ShardingError(
                f"{type(optimizer).__name__} holds state of a tensor of shape {list(key.shape)} "
                "that it does not step. A lookup such as optimizer.state[module.weight] makes an "
                "entry, because module.weight reads a gathered copy; look up "
                "optimizer.state[module.get_parameter('weight')]."
            )
    return optimizer.state_dict()


def _copy(value: Any) -> Any:
    """A copy on the host: DCP pickles it, maybe later."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _joined(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))


def _layout(value: Any, param: Tensor, name: str, path: Sequence[Any]) -> str:
    """Return how a value of an optimizer's state lies on the ranks.

    Raises:
        ShardingError: if a checkpoint could not give it back.
    """
    told = f"{_joined(path)} of {name} in the optimizer's state"
    if isinstance(value, DTensor):
        if isinstance(param, DTensor) and value.device_mesh == param.device_mesh:
            if value.placements == param.placements:
                return LIKE_PARAMETER
            if all(placement.is_replicate() for placement in value.placements):
                return REPLICATED
        raise ShardingError(
            f"{told} is a DTensor with {value.placements} on {value.device_mesh}; expected the "
            f"placements of its parameter, or a replicated one. Save it by code of your own."
        )
    if isinstance(value, Tensor) and isinstance(param, DTensor) and value.dim():
        own = compat.local_of(param).shape
        if value.shape == own != param.shape:
            raise ShardingError(
                f"{told} is a plain tensor of the shape of this rank's part, {list(own)} of "
                f"{list(param.shape)}, so a checkpoint would take one rank's part for the whole. "
                "The optimizer should make it by torch.zeros_like(param), which gives a DTensor."
            )
    elif isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        raise ShardingError(
            f"{told} is a {type(value).__name__} of tensors; a checkpoint holds tensors and dicts "
            "of them. Save it by code of your own."
        )
    return PLAIN


def _name(param: Tensor, names: Mapping[Tensor, str], optimizer: Optimizer) -> str:
    name = names.get(param)
    if name is None:
        raise ShardingError(
            f"{type(optimizer).__name__} holds a parameter of shape {list(param.shape)} that is "
            "not in the model. Pass the module that contains all of its parameters; after "
            "load_state_dict(assign=True), create the optimizer again."
        )
    return name


# --- what a checkpoint holds ----------------------------------------------------------------------
def saved_paths(metadata: Metadata) -> Mapping[str, tuple[Any, ...]]:
    """Key in the checkpoint -> the keys of the nested dict that was saved."""
    if metadata.planner_data is None:
        raise ShardingError(
            "the checkpoint was not written by DefaultSavePlanner, or with flatten_state_dict="
            "False. Save zpasses.training_state(model, optimizer) without a planner of your own."
        )
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data
    return paths


@dataclass(frozen=True)
class _Value:
    """A value of an optimizer's state in a checkpoint."""

    key: str
    param: str
    """Name of the parameter."""
    path: tuple[Any, ...]
    """Keys in the state of the parameter."""
    layout: str | None
    """How it lay on the ranks; None in a checkpoint of torch's `get_state_dict`."""


@dataclass
class _Group:
    """A parameter group in a checkpoint."""

    settings: dict[str, Any] = field(default_factory=dict)
    params: list[str] = field(default_factory=list)


class OptimizerTarget:
    """An optimizer that reads its state, in two rounds: groups and numbers, then tensors."""

    def __init__(
        self, optimizer: Optimizer, names: Mapping[Tensor, str], metadata: Metadata, key: str
    ) -> None:
        self._optimizer, self._key, self._metadata = optimizer, key, metadata
        self._params = {
            _name(param, names, optimizer): param
            for group in optimizer.param_groups
            for param in group["params"]
        }
        self._members = [
            [_name(param, names, optimizer) for param in group["params"]]
            for group in optimizer.param_groups
        ]
        self._in_model = set(names.values())
        self._values: list[_Value] = []
        self._settings: list[dict[str, Any]] = []

    def first_read(self) -> dict[str, Any]:
        """Returns destinations of everything that is small: key -> None for an object."""
        wanted: dict[str, Any] = {}
        for key, path in self._entries("state", "groups", "param_groups"):
            known = self._metadata.state_dict_metadata[key]
            if isinstance(known, BytesStorageMetadata):
                wanted[key] = None
            elif path[1] == "param_groups":
                wanted[key] = torch.empty(known.size, dtype=known.properties.dtype)
        return wanted

    def second_read(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """Returns destinations of the tensors.

        Args:
            read: what was read in the first round.
        """
        self._read_groups(read)
        wanted: dict[str, Any] = {}
        on_host = is_offloaded(self._optimizer)
        for value in self._values:
            known = self._metadata.state_dict_metadata.get(value.key)
            if known is not None and not isinstance(known, BytesStorageMetadata):
                param = self._params[value.param]
                wanted[value.key] = _destination(
                    param, torch.Size(known.size), known.properties.dtype, value, on_host
                )
        return wanted

    def apply(self, read: Mapping[str, Any]) -> None:
        """Give the optimizer what was read."""
        packed = _packed(self._optimizer)
        index = {
            name: number
            for names, own in zip(self._members, packed["param_groups"], strict=True)
            for name, number in zip(names, own["params"], strict=True)
        }
        state: dict[int, dict[Any, Any]] = {}
        for value in self._values:
            inner = state.setdefault(index[value.param], {})
            for step in value.path[:-1]:
                inner = inner.setdefault(step, {})
            inner[value.path[-1]] = read[value.key]
        groups = [
            {**own, **_beside(own, settings)}
            for own, settings in zip(packed["param_groups"], self._settings, strict=True)
        ]
        self._optimizer.load_state_dict({**packed, "state": state, "param_groups": groups})
        for name, number in index.items():
            if number in state:
                _keep_types(self._optimizer.state[self._params[name]], state[number])

    def _entries(self, *parts: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for key, path in saved_paths(self._metadata).items():
            if path[0] == self._key and path[1] in parts:
                yield key, path

    def _read_groups(self, read: Mapping[str, Any]) -> None:
        groups: dict[Any, _Group] = {}
        for key, path in self._entries("groups", "param_groups"):
            if path[1] == "groups":
                settings, params, layouts = read[key]
                groups[path[2]] = _Group(settings, params)
                self._values += [
                    _Value(f"{self._key}.state.{name}.{_joined(where)}", name, tuple(where), kind)
                    for name, where, kind in layouts
                ]
            elif len(path) == 4:
                group = groups.setdefault(path[2], _Group())
                if path[3] == "params":
                    group.params = read[key]
                elif path[3] not in _NOT_SETTINGS:
                    group.settings[path[3]] = read[key]
        if not any(self._entries("groups")):  # written from torch's get_state_dict
            self._values = [
                _Value(key, path[2], path[3:], None) for key, path in self._entries("state")
            ]
        group_of = {name: group for group in groups.values() for name in group.params}
        for members in self._members:
            saved = [group_of[name] for name in members if name in group_of]
            self._settings.append(self._one_of(saved))
        self._check_values(group_of)

    def _one_of(self, saved: Sequence[_Group]) -> dict[str, Any]:
        for each in saved:
            if each.settings != saved[0].settings:
                raise ShardingError(
                    f"one parameter group of {type(self._optimizer).__name__} has parameters of "
                    f"two that had different settings: those of {saved[0].params[0]} and of "
                    f"{each.params[0]}. Build the optimizer with the groups that it had."
                )
        return saved[0].settings if saved else {}

    def _check_values(self, group_of: Mapping[str, _Group]) -> None:
        """Keep the values of parameters that the optimizer holds.

        Other stages of a pipeline have groups and parameters of their own, under the same key.
        """
        lost = [
            each.param
            for each in self._values
            if each.param not in self._params
            and (
                each.param in self._in_model
                or any(name in self._params for name in group_of[each.param].params)
            )
        ]
        if lost:
            raise ShardingError(
                f"the checkpoint has state of {lost[0]} and of {len({*lost}) - 1} more parameters "
                f"that {type(self._optimizer).__name__} does not hold, and would lose it. Build "
                "the optimizer over the parameters that it had, also those that are frozen now; "
                "or read the model only, and start with a new optimizer."
            )
        self._values = [each for each in self._values if each.param in self._params]


def _destination(
    param: Tensor, size: torch.Size, dtype: torch.dtype, value: _Value, on_host: bool
) -> Tensor:
    layout = value.layout or _guessed(param, size, value.path)
    device = torch.device("cpu") if on_host else param.device
    if layout == PLAIN or not isinstance(param, DTensor):
        # A step that is not captured is read on the host. torch moves it where it is.
        return torch.empty(size, dtype=dtype, device=device if size else "cpu")
    mesh, placements = param.device_mesh, param.placements
    if layout == LIKE_PARAMETER and size == param.shape:
        like = torch.empty_like(compat.local_of(param), dtype=dtype, device=device)
        return compat.make_dtensor(like, mesh, placements, size)
    if layout == REPLICATED:
        placements = (Replicate(),) * mesh.ndim
    own = [length for _, length in compat.local_range(size, mesh, placements)]
    return compat.make_dtensor(torch.empty(own, dtype=dtype, device=device), mesh, placements, size)


def _guessed(param: Tensor, size: torch.Size, path: Sequence[Any]) -> str:
    """How a value lay on the ranks, in a checkpoint that does not say it."""
    if not isinstance(param, DTensor) or path[-1] == "step":
        return PLAIN
    if size == param.shape:
        return LIKE_PARAMETER
    if not size:
        return PLAIN
    cut = [int(getattr(each, "dim", 0)) for each in param.placements if not each.is_replicate()]
    alike = all(dim < len(size) and size[dim] == param.shape[dim] for dim in cut)
    return LIKE_PARAMETER if alike else REPLICATED


def _beside(own: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from a checkpoint, as tensors where the optimizer has tensors."""
    return {
        key: torch.as_tensor(value, dtype=own[key].dtype, device=own[key].device)
        if isinstance(own.get(key), Tensor)
        else copy.deepcopy(value)
        for key, value in settings.items()
    }


def _keep_types(loaded: dict[Any, Any], read: Mapping[Any, Any]) -> None:
    """Undo conversions of `load_state_dict`: to the dtype of the parameter, and of text."""
    for key, value in read.items():
        if key == "step" or key not in loaded or isinstance(value, Mapping):
            continue
        if not isinstance(value, Tensor):
            loaded[key] = value
        elif isinstance(loaded[key], Tensor) and loaded[key].dtype != value.dtype:
            loaded[key] = value.to(device=loaded[key].device)
