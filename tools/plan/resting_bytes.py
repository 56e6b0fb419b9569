"""What rests on a rank beside a training step, and how many states of the optimizer stay there."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zpasses import compat
from zpasses.backend.per_block import find_blocks
from zpasses.cost.time.target import Target
from zpasses.errors import MemoryBudgetError, OptionError
from zpasses.graph.queries import nbytes
from zpasses.inspect.units import bytes_text
from zpasses.optim.expected_states import expected_layouts
from zpasses.optim.state_buckets import (
    DEFAULT_BUCKET,
    StatePlan,
    nbytes_of,
    plan_states,
    plan_states_beside,
)
from zpasses.option_values import parse_size
from zpasses.runtime.offloaded import device_of_shard
from zpasses.tools.plan.plan_request import PlanRequest, optimizer_of
from zpasses.tools.plan.plan_table import DeviceUse, PlanPoint, PlanTable, Resting, budget_text
from zpasses.tools.plan.repeated_layers import FEWEST_LAYERS, layer_starts

BUCKET_BYTES = parse_size(DEFAULT_BUCKET, "bucket_bytes")
"""The default of `zpasses.offload_optimizer`."""


@dataclass(frozen=True)
class RestingBytes:
    """What rests on this rank, and the bytes of the states of each trained parameter."""

    resting: Resting
    state_sizes: tuple[int, ...]
    riding: tuple[int, ...] = ()
    """What comes to the device with the states of each, because it rests on the host: the shard and
    its gradient."""

    @classmethod
    def of(cls, model: nn.Module, request: PlanRequest) -> RestingBytes:
        """Measures a sharded model, whose tensors may be fake.

        Raises:
            OptionError: for an optimizer that does not take the parameters.
            MemoryBudgetError: if the target has less memory on the host than parameters take there.
            ZpassesError: for one whose states cannot be offloaded.
        """
        params = list(model.named_parameters())
        if request.repeat is not None:  # as many layers as asked for
            starts = sorted(layer_starts(enumerate([name] for name, _ in params)).values())
            layer = params[starts[2] : starts[3]] if len(starts) == FEWEST_LAYERS else []
            params += layer * (request.arguments[request.repeat] - FEWEST_LAYERS)
        target = request.parsed_target()
        trained = [compat.local_part(each) for _, each in params if each.requires_grad]
        shards = [nbytes(compat.local_part(each)) for _, each in params]
        out = [device_of_shard(each) is not None for _, each in params]
        of_grads = [
            size * each.requires_grad for size, (_, each) in zip(shards, params, strict=True)
        ]
        riding = tuple(
            size * 2 * is_out
            for size, is_out, (_, each) in zip(shards, out, params, strict=True)
            if each.requires_grad
        )
        on_host = sum(itertools.compress(shards, out)) + sum(itertools.compress(of_grads, out))
        _check_host(on_host, request, target)
        name: str | None = None
        sizes: tuple[int, ...] = ()
        if request.optimizer is not None:
            chosen = optimizer_of(request.optimizer)
            name, sizes = chosen.func.__name__, _state_sizes(chosen, trained)
        # A shard has the bytes of its gradient.
        kernels = optimizer_kernels_us(sum(of_grads), sum(of_grads), sum(sizes), target)
        gradients = sum(of_grads) - sum(itertools.compress(of_grads, out))
        each = kernels / request.backwards_per_step if name is not None else 0.0
        if request.step_in_backward:
            assert request.compile_blocks is not None
            gradients = _most_gradient_bytes(model, request.compile_blocks)
        held = sum(shards) - sum(itertools.compress(shards, out))
        return cls(Resting(held, gradients, sum(sizes), name, each, on_host), sizes, riding)

    def limits(self, request: PlanRequest, device_bytes: int | None = None) -> list[int]:
        """Returns the peaks up to which all states stay, and up to which a step fits at all.

        Args:
            device_bytes: memory of a device if none was given, beside the shards and two moments of
                each if no optimizer was given.
        """
        if request.device_memory is None and device_bytes is not None:
            held = self.resting.shard_bytes * 3
            if request.optimizer is not None:
                held = self.resting.shard_bytes + self.resting.gradient_bytes
                held += self.resting.state_bytes
            return [int((device_bytes - held) / _ROUNDING)]
        if request.device_memory is None:
            return []
        room = self._room(request.device_memory)
        rich, lean = self._all_stay(), self._placed(0)
        ends = (room - rich.device_bytes - rich.in_flight_bytes, room - lean.in_flight_bytes)
        return [int(each / _ROUNDING) for each in ends]

    def _room(self, device_memory: str) -> int:
        held = self.resting.shard_bytes + self.resting.gradient_bytes
        return parse_size(device_memory, "--device-memory") - held

    # --- the table --------------------------------------------------------------------------------
    def in_table(self, found: PlanTable, request: PlanRequest, target: Target) -> PlanTable:
        """Returns a table whose plans say what the whole device takes. If its memory is given, the
        fastest plan that fits is chosen.
        """
        found = replace(found, resting=self.resting)
        if request.optimizer is None:
            return found

        def placed(point: PlanPoint) -> PlanPoint:
            return replace(point, device=self._use_of(point, request, target))

        plans = tuple(map(placed, found.plans))
        at = next((at for at, each in enumerate(found.plans) if each is found.chosen), None)
        found = replace(
            found,
            plans=plans,
            stages=tuple(map(placed, found.stages)),
            chosen=None if at is None else plans[at],
            device_memory=request.device_memory,
        )
        if request.device_memory is None:
            return found
        fitting = [each for each in plans if each.fits_device]
        if not fitting:
            return replace(found, chosen=None, missing=self._missing(plans[0], request))
        return replace(found, chosen=found.fastest_of(fitting))

    def _use_of(self, point: PlanPoint, request: PlanRequest, target: Target) -> DeviceUse:
        peak, plan = point.peak_bytes, self._all_stay()
        fits = True
        if request.device_memory is not None:
            room = self._room(request.device_memory)
            beside = plan_states_beside(
                self.state_sizes, room - peak, room, BUCKET_BYTES, self.riding
            )
            plan = beside or self._placed(0)
            on_host = plan.host_bytes + point.host_bytes + self.resting.params_on_host
            fits = beside is not None and on_host <= target.host_memory_bytes
        held = plan.device_bytes + plan.in_flight_bytes + max(peak, plan.in_flight_bytes)
        resting = self.resting.shard_bytes + self.resting.gradient_bytes
        travel = streamed_states_us(plan.host_bytes, plan.in_flight_bytes, target, sum(self.riding))
        return DeviceUse(
            resting + plan.device_bytes,
            resting + held,
            plan.host_bytes,
            max(self.resting.optimizer_us, travel / request.backwards_per_step),
            fits,
            self._option(plan) if plan.buckets else None,
        )

    def _all_stay(self) -> StatePlan:
        """All states stay, but those of parameters on the host."""
        return self._placed(self.resting.state_bytes)

    def _placed(self, device_bytes: int) -> StatePlan:
        return plan_states(self.state_sizes, device_bytes, BUCKET_BYTES, self.riding)

    def _option(self, plan: StatePlan) -> str:
        """Returns the shortest text of `device_bytes` that leads to a plan."""
        text = budget_text(plan.device_bytes) if plan.device_bytes else "0B"
        same = self._placed(parse_size(text, "device_bytes")) == plan
        return text if same else f"{plan.device_bytes}B"

    def _missing(self, leanest: PlanPoint, request: PlanRequest) -> str:
        assert leanest.device is not None
        return (
            f"--device-memory {request.device_memory}: the leanest plan takes "
            f"{bytes_text(leanest.device.total_bytes)} of the device, and puts "
            f"{bytes_text(leanest.device.states_on_host)} of states on the host. Train on more "
            "ranks or with smaller batches, or give --host-memory."
        )


def _check_host(params_bytes: int, request: PlanRequest, target: Target) -> None:
    needed = params_bytes + request.host_bytes(target)
    if needed > target.host_memory_bytes:
        also = "" if request.host_memory is None else f" and --host-memory {request.host_memory}"
        raise MemoryBudgetError(
            f"--offload-parameters: {bytes_text(params_bytes)} of "
            f"shards and gradients{also} are {bytes_text(needed)} of the host on each rank, and a "
            f"node of {target.name} has {bytes_text(target.host_memory_bytes)} for each of its "
            f"{target.ranks_per_node} ranks. Train on more ranks, or change the figure: --target "
            f"{target.name},host_memory_bytes=..."
        )


def _most_gradient_bytes(model: nn.Module, blocks: str) -> int:
    """Returns the most bytes of gradients that a rank holds if parameters of blocks step in
    backward: those outside of blocks, and of the two largest blocks, as if one stepped while the
    other is reduced. Gradients of parameters that several blocks share stay.
    """

    def trained(module: nn.Module) -> set[nn.Parameter]:
        return {each for each in module.parameters() if each.requires_grad}

    def held(params: Iterable[nn.Parameter]) -> int:
        return sum(nbytes(compat.local_part(each)) for each in params)

    own = [trained(block) for block in find_blocks(model, blocks).values()]
    times = Counter(itertools.chain(*own))
    own = [{param for param in each if times[param] == 1} for each in own]
    rest = trained(model).difference(*own)
    return held(rest) + sum(sorted(map(held, own))[-2:])


_ROUNDING = 1.001
"""By how much `budget_text` may exceed a size."""


def _state_sizes(made: functools.partial[Optimizer], trained: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the bytes of the states of these parameters, which may be fake."""
    with compat.no_dispatch_modes():
        params = [
            nn.Parameter(
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            )
            for each in trained
        ]
        try:
            optimizer = made(params)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"--optimizer {made.func.__name__} does not take all parameters of the model "
                f"({error}). Name the optimizer that has most of them."
            ) from error
        return tuple(map(nbytes_of, expected_layouts(optimizer).values()))


def optimizer_kernels_us(
    shard_bytes: int, gradient_bytes: int, state_bytes: int, target: Target
) -> float:
    """Returns how long the kernels of an optimizer's step take that reads gradients, and reads and
    writes shards and states, once each, as fused AdamW does. Products, as of Muon, are not counted.

    Args:
        shard_bytes: of the trained parameters on this rank.
        gradient_bytes: of their gradients.
        state_bytes: of the states, wherever they rest.
        target: hardware that the step runs on.
    """
    moved = 2 * shard_bytes + gradient_bytes + 2 * state_bytes
    return target.kernel_us + moved / (target.memory_gb_s * 1e3)


def streamed_states_us(
    host_bytes: int, in_flight_bytes: int, target: Target, riding_bytes: int = 0
) -> float:
    """Returns how much longer a step of an optimizer takes because its states rest on the host.

    They come and go in buckets, two of which are on the device at a time: while one comes in, the
    one before it goes out. So the slower direction counts. The last two buckets go out during the
    next forward, and come in when nothing goes out any more.

    Args:
        host_bytes: of the states on the host.
        in_flight_bytes: of two buckets.
        riding_bytes: of parameters on the host and their gradients. Both come, and the parameters
            go. The CPU waits for these, so the last buckets count.
    """
    inward, outward = target.host_in_gb_s * 1e3, target.host_out_gb_s * 1e3
    comes = host_bytes + riding_bytes
    last = min(in_flight_bytes, comes)
    goes = host_bytes + riding_bytes // 2 if riding_bytes else host_bytes - last
    return max(comes / inward, goes / outward + last / inward)
