"""Parameters whose shards rest on the host: each comes to the device before its gather.

A read of such a parameter has an argument that says where its shard comes to
(`ParamShardSpec.device`). So compiled code is compiled again, and the pass `schedule` starts the
copies ahead of the gathers. If the parameter is trained, another argument has backward copy the
reduced gradient to the host, as torch wants gradients where their parameters are.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zpasses import compat
from zpasses.errors import ZpassesError
from zpasses.graph.queries import nbytes
from zpasses.host.host_arena import HostArena
from zpasses.host.saved_arenas import gradients
from zpasses.optim.offload_budget import (
    OffloadOptions,
    agreed_sizes,
    check_host_memory,
    sharding_groups_of,
)
from zpasses.optim.state_buckets import ValueLayout, layout_of_value
from zpasses.option_values import format_size
from zpasses.ranks.failures import report_failure
from zpasses.runtime.layout import layout_of
from zpasses.runtime.offloaded import DEVICE_ATTRIBUTE
from zpasses.runtime.param_value import drop_cached
from zpasses.runtime.watched import replace_shard
from zpasses.runtime.windows import grad_state_of
from zpasses.sharding.module import (
    change_specs,
    check_is_module,
    parameters_on_host,
    sharded_parameters,
)
from zpasses.sharding.param_spec import ParamShardSpec

log = logging.getLogger("zpasses")

M = TypeVar("M", bound=nn.Module)


def offload_parameters(
    model: M, *, trained: bool = False, device_bytes: str = "0B", host_bytes: str | None = None
) -> M:
    """Let the shards of a model's frozen parameters, or of all, rest on the host, in place, and
    return the model.

    Compiled code brings each shard to the device ahead of its gather, and frees it after that.
    Other reads bring it, too. The results have the same bits. Parameters stay the same objects, and
    state dicts, checkpoints and copies work as before; the device of such a parameter is the host.
    Call it on every rank, after `zpasses.shard`, before or after `torch.compile`. Calls after the
    first move what has been frozen since then.

    With `trained=True`, trained parameters move, too. Their reduced gradients go to the host in
    backward, and optimizers step there, with their states on the host. Call it before the first
    backward. On accelerators, kernels of the host may round such a step differently.

    Args:
        model: the model, which has memory and its final dtypes.
        trained: whether parameters that are trained move, too.
        device_bytes: how many bytes of the shards that could move stay on each rank, the smallest
            first: copies of small shards take longer than their bytes are worth.
        host_bytes: the most that a rank may take of the host; None allows its share of what the
            machine has available. The memory is taken at once, and locked for accelerators. That of
            gradients is taken by the first backward, and nothing else gets it until then.

    Raises:
        MemoryBudgetError: on every rank, if the host memory of one of them does not suffice.
        ZpassesError: for a model without a parameter to move, or on meta, or with gradients, or if
            ranks give other options.
        OptionError: for an option that is no size, or not True or False.
        AgreementError: if another rank does not call it in time.
    """
    options = OffloadOptions.parse(
        "offload_parameters", "parameters", device_bytes, host_bytes, trained=trained
    )
    check_is_module("offload_parameters", model)
    params = sharded_parameters(model)
    if not params:
        raise ZpassesError(
            f"offload_parameters: {type(model).__name__} has no sharded parameter. Call "
            "zpasses.shard(model, mesh=...) first."
        )
    groups, on_host = sharding_groups_of(params), parameters_on_host(model)
    movable = _movable([param for param in params if param not in on_host], trained)
    since = _trained_since(on_host) if trained else {}
    layouts = {**movable, **since}
    sizes = [each.nbytes for each in layouts.values()]
    of_grads = [each.nbytes if param.requires_grad else 0 for param, each in layouts.items()]
    error = _refusal(params, movable, since)
    name = type(model).__name__
    agreed = agreed_sizes(groups, options, name, sizes, error, of_grads)
    assert options.device_bytes != "auto"
    chosen = _leaving(agreed.sizes[: len(movable)], options.device_bytes)
    there = range(len(movable), len(layouts))
    needed = sum(agreed.sizes[at] for at in chosen)
    of_new_grads = sum(agreed.more[at] for at in (*chosen, *there))
    needed += of_new_grads
    moved = {param: layouts[param] for param in (list(layouts)[at] for at in chosen)}
    trains = {param for param in (*moved, *since) if param.requires_grad}
    device = compat.local_of(next(iter(layouts))).device
    if any(isinstance(compat.local_of(param), compat.FakeTensor) for param in layouts):
        for param in moved:  # of a plan, which takes no memory
            _rest(param, torch.empty_like(compat.local_of(param), device="cpu"))
    else:
        check_host_memory(options, needed, agreed.available_bytes, of_new_grads)
        _move(moved, device, groups)
        for param in trains:
            gradients.promise(layouts[param].nbytes, param)
    change_specs(model, moved, lambda spec: replace(spec, device=device))
    change_specs(model, trains, lambda spec: replace(spec, is_trained=True))
    plan = parameter_plan(model)
    log.info(
        "%s: %s of shards on the host, and %s of gradients; %s of shards on the device",
        name,
        format_size(plan.host_bytes),
        format_size(plan.grad_bytes),
        format_size(plan.device_bytes),
    )
    return model


@dataclass(frozen=True)
class ParameterPlan:
    """Where the shards of a model's parameters rest, in bytes of this rank."""

    host_bytes: int
    device_bytes: int
    grad_bytes: int
    """Of gradients that go to the host in backward. Those of the other trained parameters have
    `device_bytes` at most."""


def parameter_plan(model: nn.Module) -> ParameterPlan:
    """Returns where the shards of a sharded model rest, in bytes of this rank."""
    on_host = parameters_on_host(model)
    sizes = {param: nbytes(compat.local_of(param)) for param in sharded_parameters(model)}
    held = sum(sizes[param] for param in on_host)
    grads = sum(
        sizes[param] for param, spec in on_host.items() if spec.is_trained and param.requires_grad
    )
    return ParameterPlan(held, sum(sizes.values()) - held, grads)


def _movable(params: Sequence[DTensor], trained: bool) -> dict[DTensor, ValueLayout]:
    """Returns the parameters that may move, with the layouts of their shards.

    Args:
        params: those that are not on the host.
        trained: whether trained ones may.
    """
    found = {}
    for param in params:
        layout = layout_of_value(None, param)  # none of scalars, and of subclasses
        may = trained or not param.requires_grad
        if may and layout is not None and param.numel():
            found[param] = layout
    return found


def _trained_since(on_host: Mapping[DTensor, ParamShardSpec]) -> dict[DTensor, ValueLayout]:
    """Returns those on the host that are trained, but were frozen when they went there."""
    return {
        param: layout
        for param, spec in on_host.items()
        if param.requires_grad and not spec.is_trained
        if (layout := layout_of_value(None, param)) is not None
    }


def _refusal(
    params: Sequence[DTensor], movable: Collection[DTensor], since: Collection[DTensor]
) -> str | None:
    if any(param.is_meta for param in params):
        return "the model is on meta. Call to_empty and load it first."
    devices = {compat.local_of(param).device for param in movable}
    if len(devices) > 1:
        return f"parameters are on {', '.join(map(str, devices))}; expected one device."
    if any(each.grad is not None or grad_state_of(each).pending for each in (*movable, *since)):
        return "parameters have gradients. Call it before the first backward, or after zero_grad()."
    if not movable and not since:
        count = sum(param.requires_grad for param in params)
        return (
            f"no parameter can move: of {len(params)}, {count} are trained, and the rest are on "
            "the host already, or scalars. Freeze parameters first (requires_grad_(False)), or "
            "move trained ones with their gradients, too (trained=True). Only the states of "
            "trained ones rest on the host after zpasses.offload_optimizer(optimizer)."
        )
    return None


def _leaving(sizes: Sequence[int], device_bytes: int) -> list[int]:
    """Returns the positions of what does not stay, in order."""
    leaving = set(range(len(sizes)))
    for at in sorted(leaving, key=lambda at: sizes[at]):
        device_bytes -= sizes[at]
        if device_bytes < 0:
            break
        leaving.remove(at)
    return sorted(leaving)


def _move(
    moved: Mapping[DTensor, ValueLayout], device: torch.device, groups: Sequence[str]
) -> None:
    """Copies shards to the host.

    Raises:
        MemoryBudgetError: if the system or the driver refuses the memory.
    """
    try:
        arena = HostArena(sum(each.nbytes for each in moved.values()), device)
    except (OSError, RuntimeError) as raised:
        report_failure(groups, raised, "offloading parameters")
        raise
    starts = itertools.accumulate((each.nbytes for each in moved.values()), initial=0)
    for (param, layout), start in zip(moved.items(), starts, strict=False):
        host = arena.tensor(start, layout.dtype, layout.shape, layout.stride)
        host.copy_(compat.local_of(param).detach())
        _rest(param, host)


def _rest(param: DTensor, host: Tensor) -> None:
    device = compat.local_of(param).device
    replace_shard(param, layout_of(param).wrap(host, param.shape))
    setattr(param, DEVICE_ATTRIBUTE, device)
    drop_cached(param)
