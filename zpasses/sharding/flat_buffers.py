"""Flat buffers: several tensors laid end to end in one allocation, and returned as views of it.

A small graph builds the buffers. As captured, it concatenates the tensors on the host and moves the
result to the device. The pass `flatten-on-device` rewrites it, as it rewrites such code in any
graph. Observers and dumps see the graph, with the tier that the pass chose.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.dlpack import from_dlpack

from zpasses import compat
from zpasses.cost.target import current_target
from zpasses.dumps.listeners import events_for
from zpasses.errors import AgreementError, OptionError
from zpasses.graph.tags import Tag, add_tag, tag_of
from zpasses.option_values import build_dataclass
from zpasses.pipeline.events import CompileEnded, Events, ObservedGraph, run_reported_passes
from zpasses.pipeline.options import Options
from zpasses.pipeline.passes import Pass
from zpasses.pipeline.pipeline import catalogue
from zpasses.ranks.vote import report_failure

__all__ = ["FlatBuffer", "pack_parameters"]

_PASS = "flatten-on-device"


@dataclass(frozen=True)
class FlatBuffer:
    """One flat buffer."""

    buffer: Tensor
    """[elements], on the device; zeros between the tensors."""
    views: dict[int, Tensor]
    """Position in the packed list -> that tensor's values, in its shape, in the buffer's memory.

    Each view is contiguous and does not require grad. It has a storage and a version counter of its
    own, so writing to one view does not change the version of the others."""
    tier_note: str
    """The tier and the reason for it: "plain: ...", "distributed: ..." or "host: ..."."""

    @property
    def tier(self) -> str:
        """The tier by which the buffer was flattened: "plain", "distributed" or "host"."""
        return self.tier_note.partition(":")[0]


@dataclass(frozen=True)
class _Layout:
    """The offsets of the tensors of one dtype in their buffer."""

    dtype: torch.dtype
    offsets: dict[int, int]
    """Position among the unique tensors -> first element."""
    numel: int


def pack_parameters(
    tensors: MutableSequence[Tensor],
    *,
    device: torch.device | str | None = None,
    group: str = "",
    replicated: bool = False,
    align_bytes: int = 16,
    reserve: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[FlatBuffer]:
    """Copy tensors end to end into one flat buffer per dtype, on the device if it has room.

    Args:
        tensors: strided tensors of any shapes, dtypes and strides, on the host or the device, none
            on meta. A tensor that is listed twice (a tied parameter) is copied once. With the
            option `donate_inputs` the list is cleared, so that each tensor is freed once it is
            copied.
        device: device of the buffers; None takes the device of the first tensor.
        group: process group whose ranks call this function together, with tensors of equal sizes.
            These ranks use the same tier. "" if only this rank calls it.
        replicated: the tensors hold equal values on all ranks, so each rank may flatten a part and
            all-gather the rest.
        align_bytes: every tensor starts, and every buffer ends, at a multiple of this many bytes.
        reserve: number of elements to reserve per tensor, at least its own number. The rest is
            zero.
        names: names of the tensors, for listings of the graph.
        options: further options of the pass `flatten-on-device`, by name: tier, headroom,
            free_bytes, donate_inputs, timeout_s, device.

    Returns:
        One FlatBuffer per dtype, in the order in which dtypes first appear. Its tensors do not
        require grad.

    Raises:
        ValueError: for tensors on meta, a reservation smaller than its tensor, or an alignment that
            is not a multiple of the element size.
        OptionError: for an unknown option, or if zpasses is not installed with its passes.
        AgreementError: on every rank of the group, if one of them failed or packs other sizes.
    """
    given = dict(options or {})
    try:
        flatten = _flatten_pass({"group": group, "replicated": replicated, **given})
        unique, positions = _deduplicate(tensors)
        target = _with_index(
            torch.device(device) if device is not None else unique[0].device if unique else _HOST
        )
        layouts = _lay_out(unique, positions, align_bytes, reserve)
        labels = {
            at: names[i] if names is not None else str(i) for i, at in reversed(positions.items())
        }
        graph = _graph(unique, labels, layouts, target, host_as_device=given.get("device") == "cpu")
        events = _events(flatten)
        records = run_reported_passes(events, _NAME, flatten.level.value, graph.graph, [flatten])
        events.send(CompileEnded())
    except AgreementError:
        raise
    except Exception as error:
        if group:
            report_failure([group], _NAME, error)
        raise
    tier_notes = [_tier_note(node) for node in _outputs(graph.graph)]
    events.send(ObservedGraph(_NAME, "pack", graph.graph, records))
    arguments = [tensor.detach() for tensor in unique]
    shapes = [tensor.shape for tensor in unique]
    if given.get("donate_inputs"):
        tensors.clear()
    del unique
    buffers = _run(graph, arguments)
    return [
        FlatBuffer(
            buffer,
            {
                i: _separate_storage_view(buffer, layout.offsets[at], shapes[at])
                for i, at in positions.items()
                if at in layout.offsets
            },
            tier_note,
        )
        for buffer, layout, tier_note in zip(buffers, layouts, tier_notes, strict=True)
    ]


_NAME = "pack"


def _events(flatten: Pass) -> Events:
    """Return the events of a pack.

    A pack has no compile options, so only environment variables can request a dump.
    """
    options = Options()

    def describe() -> dict[str, Any]:
        return {"name": _NAME, "pipeline": str(flatten), "codegen": "eager"}

    return events_for(options.dump_folder(), options.dumping_ranks(), current_target(), describe)


def _flatten_pass(options: dict[str, Any]) -> Pass:
    found = catalogue().get(_PASS)
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise OptionError(
            f"no pass is called {_PASS!r}: install zpasses (pip install -e .) so that its passes "
            "can be found."
        )
    return build_dataclass(found, options, f"pass {_PASS!r}")


def _deduplicate(tensors: Sequence[Tensor]) -> tuple[list[Tensor], dict[int, int]]:
    """Return each tensor once, and the map from list positions to positions among these."""
    known: dict[int, int] = {}
    unique: list[Tensor] = []
    positions = {}
    for i, tensor in enumerate(tensors):
        if tensor.is_meta:
            raise ValueError(
                f"pack_parameters: tensor {i} ({list(tensor.shape)}) is on meta and has no "
                "values. Call to_empty() first."
            )
        if id(tensor) not in known:
            known[id(tensor)] = len(unique)
            unique.append(tensor)
        positions[i] = known[id(tensor)]
    return unique, positions


def _lay_out(
    unique: Sequence[Tensor],
    positions: Mapping[int, int],
    align_bytes: int,
    reserve: Sequence[int] | None,
) -> list[_Layout]:
    room = [tensor.numel() for tensor in unique]
    for i, at in positions.items():
        wanted = reserve[i] if reserve is not None else 0
        if reserve is not None and wanted < unique[at].numel():
            raise ValueError(
                f"pack_parameters: reserve[{i}] is {wanted}, but the tensor has "
                f"{unique[at].numel()} elements. Reserve at least as many."
            )
        room[at] = max(room[at], wanted)
    layouts = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in unique):
        if align_bytes < 1 or align_bytes % dtype.itemsize:
            raise ValueError(
                f"pack_parameters: align_bytes is {align_bytes}; expected a multiple of the "
                f"{dtype.itemsize} bytes of {dtype}."
            )
        grain, end, offsets = align_bytes // dtype.itemsize, 0, {}
        for at, tensor in enumerate(unique):
            if tensor.dtype == dtype:
                offsets[at] = end
                end += -(-room[at] // grain) * grain
        layouts.append(_Layout(dtype, offsets, end))
    return layouts


def _graph(
    unique: Sequence[Tensor],
    labels: Mapping[int, str],
    layouts: Sequence[_Layout],
    device: torch.device,
    *,
    host_as_device: bool,
) -> fx.GraphModule:
    """Trace the graph that concatenates on the host and moves the buffers to the device.

    Args:
        host_as_device: for tests, treat the host as the device: keep the move, although it does
            nothing.
    """

    def flatten(*values: Tensor) -> list[Tensor]:
        flats = []
        for layout in layouts:
            parts, end = [], 0
            for at, offset in layout.offsets.items():
                value = (
                    values[at]
                    if values[at].device.type == "cpu"
                    else torch.ops.aten._to_copy.default(values[at], device=_HOST)
                )
                if offset > end:
                    parts.append(torch.zeros(offset - end, dtype=layout.dtype))
                parts.append(value.reshape(-1))
                end = offset + value.numel()
            if layout.numel > end:
                parts.append(torch.zeros(layout.numel - end, dtype=layout.dtype))
            flat = torch.cat(parts)
            moves = host_as_device or device.type != "cpu"
            flats.append(torch.ops.aten._to_copy.default(flat, device=device) if moves else flat)
        return flats

    graph = compat.trace_aten(flatten, unique)
    for at, node in enumerate(node for node in graph.graph.nodes if node.op == "placeholder"):
        add_tag(node, Tag("flat", (labels[at],), origin=_NAME))
    for layout, node in zip(layouts, _outputs(graph.graph), strict=True):
        if node.target is torch.ops.aten.cat.default:
            names = tuple(labels[at] for at in layout.offsets)
            add_tag(node, Tag("flat", names, origin=_NAME, note="plain: the host is the device"))
    return graph


_HOST = torch.device("cpu")


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    returned: Any = graph.output_node().args[0]
    return list(returned)


def _tier_note(node: fx.Node) -> str:
    tag = tag_of(node)
    assert tag is not None
    return tag.note


def _run(graph: fx.GraphModule, arguments: list[Tensor]) -> list[Tensor]:
    graph.graph.set_codegen(compat.BOXED_CODEGEN())
    graph.recompile()
    with torch.no_grad():
        made: list[Tensor] = list(graph(arguments))
    return made


def _separate_storage_view(buffer: Tensor, offset: int, shape: torch.Size) -> Tensor:
    """Return part of a buffer as a tensor with a storage of its own, which keeps the buffer's
    memory alive.

    A plain view would share the version counter and the storage with the other parts. `torch.save`
    would then write the whole storage, and `copy.deepcopy` fails on DTensors with a storage offset.
    """
    numel = shape.numel()
    if numel == 0 or isinstance(buffer, compat.FakeTensor):
        return buffer.new_empty(shape)
    part = buffer.narrow(0, offset, numel)
    return from_dlpack(part.view(torch.uint8)).view(buffer.dtype).view(shape).data
