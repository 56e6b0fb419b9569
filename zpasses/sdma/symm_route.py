"""Gathers and reductions through symmetric memory, with torch's own low-contention collectives:
copy engines pull from the other ranks.

They run on NVIDIA's devices, and on AMD's as far as torch's symmetric memory does, which a trial
finds out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zpasses import compat
from zpasses.sdma.platform import Platform, node_name
from zpasses.sdma.routes import Pending, Route, gathered_shape, plain, refuse_capture
from zpasses.sdma.vote import Answer, first_refusal, one_node, refusal_in, run_with_timeout

__all__ = ["SymmRoute", "check", "examine", "start"]

_TRIAL_BYTES = 4096


def examine(group: str, platform: Platform, capacity_bytes: int) -> Answer:
    """What this rank knows before symmetric memory is touched."""
    return {"no": _obstacle(group), "node": node_name(), "device": platform.device_id()}


def _obstacle(group: str) -> str | None:
    if not torch.cuda.is_available():
        return "symmetric memory needs an accelerator"
    if "nccl" not in compat.group_backend(group):
        return f"symmetric memory needs a group of backend nccl; this one is {compat.group_backend(group)}"
    try:
        compat.symmetric_memory()
    except ImportError as error:
        return f"this torch has no symmetric memory ({error})"
    return None


def check(group: str, answers: Sequence[Answer]) -> str | None:
    """Why the route is not started for the group; None if it can be. The same on every rank."""
    return refusal_in(group, answers) or one_node(answers)


def start(group: str, platform: Platform, capacity_bytes: int, timeout_s: float) -> SymmRoute | str:
    """Try the route, and vote on what came; a reason if it cannot be taken."""
    route = SymmRoute()
    trial = run_with_timeout(timeout_s, lambda: _try(route, group), platform)
    refusal = first_refusal(group, "sdma: a trial of symmetric memory", trial, timeout_s)
    return route if refusal is None else f"trial gather: {refusal}"


def _try(route: SymmRoute, group: str) -> str | None:
    members = compat.process_group(group)
    mine = torch.full((_TRIAL_BYTES,), members.rank(), dtype=torch.uint8, device="cuda")
    (full,) = route.all_gather([mine], members.size(), group)
    got = compat.functional.wait_tensor(full).view(members.size(), -1).cpu()
    expected = torch.arange(members.size(), dtype=torch.uint8).unsqueeze(1).expand_as(got)
    return None if torch.equal(got, expected) else f"got wrong bytes: {got[:, 0].tolist()}"


class SymmRoute(Route):
    """Collectives of one group."""

    name = "symm_mem"

    def all_gather(self, inputs: Sequence[Tensor], group_size: int, group: str) -> list[Tensor]:
        outputs = []
        for source in inputs:
            shape = gathered_shape(source.shape, group_size)
            full = self._gather(plain(source), group) if source.numel() else source.new_empty(shape)
            outputs.append(full.view(source.dtype).view(shape))
        return outputs

    def all_gather_out(self, source: Tensor, group_size: int, group: str, out: Tensor) -> Tensor:
        if source.numel():
            full = self._gather(plain(source), group)
            stream = compat.symmetric_stream()
            with torch.cuda.stream(stream):
                compat.functional.wait_tensor(
                    full
                )  # of the stream for itself: takes the gather off the list of those to await
                out.reshape(-1).view(torch.uint8).copy_(full)
                compat.register_work(out, Pending(stream.record_event(), (full, source, out)))
        return out

    def reduce_scatter(self, source: Tensor, reduce_op: str, group_size: int, group: str) -> Tensor:
        refuse_capture(source.device)
        if reduce_op not in ("sum", "avg") or not source.numel():
            return super().reduce_scatter(source, reduce_op, group_size, group)
        given = plain(source)
        reduced = compat.low_contention_reduce_scatter(given, reduce_op, group)
        given.record_stream(compat.symmetric_stream())
        return reduced

    def _gather(self, source: Tensor, group: str) -> Tensor:
        """[bytes of all ranks], under way."""
        refuse_capture(source.device)
        full = compat.low_contention_all_gather(source.reshape(-1).view(torch.uint8), group)
        source.record_stream(
            compat.symmetric_stream()
        )  # the caller may let go of it before the copies have read it
        return full
