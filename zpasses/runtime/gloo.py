"""All-gathers over gloo, past a fault of torch.

torch's functional all-gathers, also that of one tensor, run
`ProcessGroupGloo::allgather_coalesced`. With another collective under way beside it, it corrupts
the heap: two ranks that keep one such gather and one all-reduce in flight abort within some
thousands of them ("malloc(): unaligned tcache chunk detected", or a segmentation fault; torch 2.13,
torch alone). `_allgather_base` in the same place does not, nor do all-reduces among themselves. So
code that is about to run over gloo calls these instead:

    zpasses::gloo_all_gather(input, group_size, group)              -> what all_gather_into_tensor returns
    zpasses::gloo_all_gather_coalesced(inputs, group_size, group)   -> one output an input

Graphs say all_gather_into_tensor as everywhere, to passes, to dumps, and to the agreement of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.nodes import collective_of, value_of

__all__ = ["all_gather", "replace_gloo_all_gathers"]

_library = torch.library.Library("zpasses", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides)
_library.define(
    "gloo_all_gather(Tensor input, int group_size, str group_name) -> Tensor", tags=_TAGS
)
_library.define(
    "gloo_all_gather_coalesced(Tensor[] inputs, int group_size, str group_name) -> Tensor[]",
    tags=_TAGS,
)

_STAND_INS: dict[Any, compat.OpOverload] = {
    compat.functional.all_gather_into_tensor.default: torch.ops.zpasses.gloo_all_gather.default,
    compat.functional.all_gather_into_tensor_coalesced.default: torch.ops.zpasses.gloo_all_gather_coalesced.default,
}


def replace_gloo_all_gathers(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph to generate code from: `gm` itself, or a copy of it if it gathers over gloo."""
    if not _gathers(gm.graph):
        return gm
    gm = compat.clone_graph_module(gm)  # others look at the graph as the passes left it
    for node in _gathers(gm.graph):
        node.target = _STAND_INS[node.target]
        inputs, group_size, group = node.args
        node.args = (inputs, group_size, compat.group_name(group))
    gm.recompile()
    return gm


def _gathers(graph: fx.Graph) -> list[fx.Node]:
    nodes = [
        node
        for target in _STAND_INS
        for node in graph.find_nodes(op="call_function", target=target)
    ]
    return [node for node in nodes if _is_over_gloo(node)]


def _is_over_gloo(node: fx.Node) -> bool:
    found, value = collective_of(node), value_of(node.all_input_nodes[0])
    return (
        found is not None
        and isinstance(value, Tensor)
        and compat.is_gloo(found.group, value.device)
    )


def all_gather(inputs: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    """Gather tensors over gloo: one output an input, [group_size * rows, ...]; returns at once, to
    be awaited by `wait_tensor`."""
    if len(inputs) == 1:
        return [torch.ops.zpasses.gloo_all_gather(inputs[0], group_size, group_name)]
    return list(torch.ops.zpasses.gloo_all_gather_coalesced(inputs, group_size, group_name))


def _empty(source: Tensor, group_size: int) -> Tensor:
    return source.new_empty(
        (source.shape[0] * group_size, *source.shape[1:]) if source.dim() else (group_size,)
    )


def _all_gather(input: Tensor, group_size: int, group_name: str) -> Tensor:
    output: Tensor = compat.functional.all_gather_into_tensor_out(
        input.contiguous(), group_size, group_name, out=_empty(input, group_size)
    )
    return output


def _all_gather_coalesced(
    inputs: Sequence[Tensor], group_size: int, group_name: str
) -> list[Tensor]:
    if len({source.dtype for source in inputs}) != 1:
        return [_all_gather(source, group_size, group_name) for source in inputs]
    packed = torch.cat([source.reshape(-1) for source in inputs])
    gathered = packed.new_empty(group_size, packed.numel())
    compat.functional.all_gather_into_tensor_out(
        packed, group_size, group_name, out=gathered.view(-1)
    )
    outputs = [_empty(source, group_size) for source in inputs]
    work = _Unpacking(gathered, outputs)
    for output in outputs:
        compat.register_work(output, work)
    return outputs


class _Unpacking(compat.Work):  # type: ignore[misc]  # of what torch calls it, an Any
    """A gather of several tensors in one. The first wait copies each to its place."""

    def __init__(self, gathered: Tensor, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._gathered, self._outputs = gathered, tuple(outputs)

    def wait(self, timeout: Any = None) -> bool:
        outputs, self._outputs = self._outputs, ()
        if outputs:
            compat.functional.wait_tensor(self._gathered)
            ranks = self._gathered.shape[0]
            parts = self._gathered.split([output.numel() // ranks for output in outputs], dim=1)
            for output, part in zip(outputs, parts, strict=True):
                output.view(ranks, -1).copy_(part) if output.numel() else None
            del self._gathered
        return True


def _all_gather_fake(input: Tensor, group_size: int, group_name: str) -> Tensor:
    return _empty(input, group_size)


def _all_gather_coalesced_fake(
    inputs: Sequence[Tensor], group_size: int, group_name: str
) -> list[Tensor]:
    return [_empty(source, group_size) for source in inputs]


for _name, _impl, _fake in (
    ("gloo_all_gather", _all_gather, _all_gather_fake),
    ("gloo_all_gather_coalesced", _all_gather_coalesced, _all_gather_coalesced_fake),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zpasses::{_name}", _fake, lib=_library)

for _op in _STAND_INS.values():
    compat.declare_collective(_op)
