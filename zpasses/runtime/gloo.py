"""All-gathers over gloo that avoid a bug of torch 2.13.

torch's functional all-gathers, also those of a single tensor, run
`ProcessGroupGloo::allgather_coalesced`. It corrupts the heap if another collective is in flight at
the same time: two ranks that keep one such all-gather and one all-reduce in flight abort within a
few thousand of them ("malloc(): unaligned tcache chunk detected", or a segmentation fault). zpasses
is not needed to reproduce this. `_allgather_base` does not have the bug, and neither do concurrent
all-reduces. So code that runs over gloo calls these ops instead:

    zpasses::gloo_all_gather(input, group_size, group)
        -> what all_gather_into_tensor returns
    zpasses::gloo_all_gather_coalesced(inputs, group_size, group)
        -> one output per input

The replacement happens right before code generation. Passes, dumps and the agreement of ranks see
all_gather_into_tensor.
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

_functional, _ours = compat.functional, torch.ops.zpasses
_REPLACEMENTS: dict[Any, compat.OpOverload] = {
    _functional.all_gather_into_tensor.default: _ours.gloo_all_gather.default,
    _functional.all_gather_into_tensor_coalesced.default: _ours.gloo_all_gather_coalesced.default,
}


def replace_gloo_all_gathers(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace the all-gathers that run over gloo.

    Returns:
        The graph to generate code from: a changed copy of `gm`, or `gm` itself if nothing in it
        gathers over gloo.
    """
    if not _gathers(gm.graph):
        return gm
    gm = compat.clone_graph_module(gm)  # observers and variants use the original graph
    for node in _gathers(gm.graph):
        node.target = _REPLACEMENTS[node.target]
        inputs, group_size, group = node.args
        node.args = (inputs, group_size, compat.group_name(group))
    gm.recompile()
    return gm


def _gathers(graph: fx.Graph) -> list[fx.Node]:
    nodes = [
        node
        for target in _REPLACEMENTS
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
    """All-gather tensors over gloo. Asynchronous: pass each output to `wait_tensor` before use.

    Args:
        inputs: [rows, ...] each.

    Returns:
        One output per input, [group_size * rows, ...].
    """
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
    work = _UnpackWork(gathered, outputs)
    for output in outputs:
        compat.register_work(output, work)
    return outputs


class _UnpackWork(compat.Work):  # type: ignore[misc]  # Work is Any to mypy
    """The work of an all-gather of several tensors packed into one.

    The first wait copies the result to the outputs.
    """

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

for _op in _REPLACEMENTS.values():
    compat.declare_collective(_op)
