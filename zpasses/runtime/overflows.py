"""Says when gradients that encoded reductions have brought are not finite.

A block of a gradient with an infinity or a NaN on any rank decodes to NaN in all its values
(zpasses.graph.encoding). So a few values of each block tell, and a look at every 64th value of what
a backward returns costs next to nothing. It does not wait for an accelerator: the answer is copied
to the host, and read in the next backward that finds it there. Where parameters step in the graph,
their gradients are gone, and a NaN of one is in the parameter.

Gradients that rest on the host are not looked at, because they may still be in flight.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.dialect import TO_HOST
from zpasses.graph.encoding import Encoding
from zpasses.graph.tags import tag_of
from zpasses.runtime.codegen import boxed
from zpasses.runtime.grad_slots import returned_gradients
from zpasses.runtime.graph_steps import stepped_gradients, stepping_params
from zpasses.runtime.layout import rows_of
from zpasses.runtime.param_conversion import current_call

_Code = Callable[[list[Any]], Any]

log = logging.getLogger("zpasses")


@dataclass(frozen=True)
class EncodedGrad:
    """A gradient that an encoded reduction has brought, which a graph returns, or with which a
    parameter has stepped.
    """

    position: int
    """Among the outputs of the graph; the number of the slot if the parameter has stepped."""
    param: str
    """Name of the parameter."""
    encoding: str
    """As text of an `Encoding`."""
    stride: int
    """Of values this far apart, with the last value of all, each block has at least one."""
    has_stepped: bool = False


def encoded_grads(graph: fx.Graph) -> list[EncodedGrad]:
    """Returns the gradients of encoded reductions among the outputs of a graph, and those with
    which parameters step.
    """
    encodings: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        tag = tag_of(node)
        if tag is not None and tag.role == "reduce" and tag.encoding:
            for param in tag.params:
                encodings.setdefault(param, {})[tag.encoding] = None
    found = []
    sites = [(at, grads, False) for at, grads in returned_gradients(graph).items()]
    sites += [(slot, grads, True) for slot, grads in stepped_gradients(graph).items()]
    for position, grads, has_stepped in sites if encodings else ():
        tag = tag_of(grads[0])
        used = encodings.get(tag.params[0], {}) if tag is not None else {}
        if tag is not None and used and all(grad.target is not TO_HOST for grad in grads):
            # Blocks of equal width have more than half of the most values, if there are several.
            stride = min(max(1, Encoding.parse(each).block // 2) for each in used)
            how = ", ".join(used)
            found.append(EncodedGrad(position, tag.params[0], how, stride, has_stepped))
    return found


@dataclass(frozen=True)
class _Look:
    """A look at gradients."""

    arrived: torch.Event | None
    """When the answer is on the host; None if it is there."""
    largest: Tensor
    """Two magnitudes per gradient."""
    grads: Sequence[EncodedGrad]
    where: str


class OverflowWatch:
    """Warns of the first gradients of a compile that are not finite."""

    def __init__(self) -> None:
        self._has_warned = False
        self._look: _Look | None = None

    def watching(self, code: _Code, grads: Sequence[EncodedGrad], where: str) -> _Code:
        """Returns code that looks at what it returns.

        Args:
            grads: where they are among its outputs. Those that are no tensors are left out.
            where: what the code is of, for the warning.
        """
        if not grads:
            return code

        def run(args: list[Any]) -> Any:
            values = code(args)
            if not self._has_warned:
                self._look_at(values, grads, where)
            return values

        return boxed(run)

    def _look_at(self, values: Sequence[Any], grads: Sequence[EncodedGrad], where: str) -> None:
        stepped = stepping_params()
        looked_at = {
            each: rows_of(stepped[each.position]) if each.has_stepped else values[each.position]
            for each in grads
        }
        there = [each for each in grads if _has_values(looked_at[each])]
        if not there:
            return
        device = looked_at[there[0]].device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        if self._look is not None:
            if self._look.arrived is not None and not self._look.arrived.query():
                return
            self._judge(self._look)
            self._look = None
            if self._has_warned:
                return
        call = current_call()
        where = f"{where} with {call.text}" if call is not None else where
        samples: list[Tensor] = []
        for each in there:
            flat = looked_at[each].detach().reshape(-1)
            samples += [flat[:: each.stride], flat[-1:]]
        dtypes = [each.dtype for each in samples]  # torch does not narrow them
        dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        norms = compat.foreach_norm(samples, math.inf, dtype)
        largest = torch.stack(list(norms)).to("cpu", non_blocking=True)
        look = _Look(_arrival(device), largest, there, where)
        if look.arrived is None:
            self._judge(look)
        else:
            self._look = look

    def _judge(self, look: _Look) -> None:
        finite = look.largest.isfinite().view(-1, 2).all(1).tolist()
        lost = [each for each, good in zip(look.grads, finite, strict=True) if not good]
        if not lost:
            return
        self._has_warned = True
        names = ", ".join(each.param for each in lost[:8])
        if len(lost) > 8:
            names += f" and {len(lost) - 8} others"
        log.warning(
            "%s: gradients are not finite after their encoded reduction (%s): %s. A gradient of "
            "some rank had an infinity or a NaN, or is too large for its codes, and the codes of "
            "its block say NaN. Without gradient scaling, which skips such a step, the parameters "
            "become NaN. See whether the same step is finite without 'encode'; if it is not, lower "
            "the learning rate, clip gradients, or scale the loss (docs/encoding.md). This is said "
            "once per compile.",
            look.where,
            lost[0].encoding,
            names,
        )


def _arrival(device: torch.device) -> torch.Event | None:
    """Returns when copies of a device that have started are on the host; None if they are."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event


def _has_values(value: Any) -> bool:
    return (
        isinstance(value, Tensor) and not isinstance(value, compat.FakeTensor) and value.numel() > 0
    )
