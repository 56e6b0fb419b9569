"""Flat buffers: several tensors laid end to end in one allocation, and handed out as views of it.

The buffers are made by a graph of their own, which says plainly that everything is laid together on
the host and moved. The pass `flatten-on-device` rewrites it, as it rewrites anyone's, and observers
of graphs see it with the tier that was taken."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.dlpack import from_dlpack

from zpasses import compat
from zpasses.cost.target import current_target
from zpasses.dumps.recorders import recorders_for
from zpasses.errors import AgreementError, OptionError
from zpasses.graph.tags import Tag, add_tag, tag_of
from zpasses.option_values import build
from zpasses.pipeline.observers import GraphLog, notify_observers
from zpasses.pipeline.options import Options
from zpasses.pipeline.pipeline import Pass, catalogue
from zpasses.pipeline.recorder import Recorders, recorded_passes
from zpasses.ranks.vote import report_failure

__all__ = ["Flat", "pack_parameters"]

_PASS = "flatten-on-device"


@dataclass(frozen=True)
class Flat:
    """One flat buffer."""

    buffer: Tensor
    """[elements], on the device; zeros where no tensor lies."""
    views: dict[int, Tensor]
    """Position in the list that was packed -> that tensor's values, in its shape, in the buffer's
    memory. Contiguous, without autograd, and with storage and version counter of its own: writing
    to one does not make the others look written to."""
    choice: str
    """How it was made and why: "plain: ...", "distributed: ...", "host: ..."."""

    @property
    def tier(self) -> str:
        return self.choice.partition(":")[0]


@dataclass(frozen=True)
class _Layout:
    """Where the tensors of one dtype lie."""

    dtype: torch.dtype
    offsets: dict[int, int]
    """Position in the list -> first element."""
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
) -> list[Flat]:
    """Lay tensors end to end in one flat buffer a dtype, on the device if it has room.

    Args:
        tensors: strided tensors of any shapes, dtypes and strides, on the host or the device, none
            on meta. One that is listed twice (a tied parameter) is laid down once. Emptied if
            `options` says `donate_inputs`, so that the tensors die as they are read.
        device: where the buffers belong; None is where the first tensor is.
        group: process group whose ranks call this together, with tensors of the same sizes: they
            take the same tier. "" if none do.
        replicated: the ranks' tensors are equal, so that each may flatten a part and gather the
            rest from the others.
        align_bytes: every tensor, and the end of a buffer, lies at a multiple of this many bytes.
        reserve: elements to keep for each tensor, where that is more than it has: the rest is
            zeros.
        names: what the graph calls the tensors, for whoever looks at it.
        options: further options of the pass `flatten-on-device`, by name: tier, headroom,
            free_bytes, donate_inputs, timeout_s, device.

    Returns:
        One Flat for each dtype, in the order in which dtypes first appear. Nothing in it requires
        gradients.

    Raises:
        ValueError: for tensors on meta, a reservation smaller than its tensor, or an alignment that
            is no multiple of an element.
        OptionError: for an unknown option.
        AgreementError: on every rank of the group, when one of them failed, or packs something
            else.
    """
    given = dict(options or {})
    try:
        flatten = _flatten_pass({"group": group, "replicated": replicated, **given})
        unique, positions = _distinct(tensors)
        target = _indexed(
            torch.device(device) if device is not None else unique[0].device if unique else _HOST
        )
        layouts = _lay_out(unique, positions, align_bytes, reserve)
        labels = {
            at: names[i] if names is not None else str(i) for i, at in reversed(positions.items())
        }
        graph = _graph(unique, labels, layouts, target, stands_in=given.get("device") == "cpu")
        recorder = _recorder(flatten)
        records = recorded_passes(recorder, _NAME, flatten.level.value, graph.graph, [flatten])
        recorder.done()
    except AgreementError:
        raise
    except Exception as error:
        if group:
            report_failure([group], _NAME, error)
        raise
    choices = [_choice(node) for node in _outputs(graph.graph)]
    notify_observers(GraphLog(_NAME, "pack", graph.graph, records))
    arguments = [tensor.detach() for tensor in unique]
    shapes = [tensor.shape for tensor in unique]
    if given.get("donate_inputs"):
        tensors.clear()
    del unique
    buffers = _run(graph, arguments)
    return [
        Flat(
            buffer,
            {
                i: _part(buffer, layout.offsets[at], shapes[at])
                for i, at in positions.items()
                if at in layout.offsets
            },
            choice,
        )
        for buffer, layout, choice in zip(buffers, layouts, choices, strict=True)
    ]


_NAME = "pack"


def _recorder(flatten: Pass) -> Recorders:
    """A pack is no compile, so it has no options: the environment alone asks for a dump of it."""
    options = Options()

    def describe() -> dict[str, Any]:
        return {"name": _NAME, "pipeline": str(flatten), "codegen": "eager"}

    return recorders_for(options.dump_folder(), options.dumping_ranks(), current_target(), describe)


def _flatten_pass(options: dict[str, Any]) -> Pass:
    found = catalogue().get(_PASS)
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise OptionError(
            f"no pass is called {_PASS!r}: install zpasses (pip install -e .) so that its passes "
            "can be found."
        )
    return build(found, options, f"pass {_PASS!r}")


def _distinct(tensors: Sequence[Tensor]) -> tuple[list[Tensor], dict[int, int]]:
    """Each tensor once, and position in the list -> position among those."""
    known: dict[int, int] = {}
    unique: list[Tensor] = []
    positions = {}
    for i, tensor in enumerate(tensors):
        if tensor.is_meta:
            raise ValueError(
                f"pack_parameters: tensor {i} ({list(tensor.shape)}) is on meta, and has no "
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
                f"{unique[at].numel()} elements."
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
    stands_in: bool,
) -> fx.GraphModule:
    """The graph that makes the buffers on the host and moves them."""

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
            moves = stands_in or device.type != "cpu"
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


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    returned: Any = graph.output_node().args[0]
    return list(returned)


def _choice(node: fx.Node) -> str:
    tag = tag_of(node)
    assert tag is not None
    return tag.note


def _run(graph: fx.GraphModule, arguments: list[Tensor]) -> list[Tensor]:
    graph.graph.set_codegen(compat.BOXED_CODEGEN())
    graph.recompile()
    with torch.no_grad():
        made: list[Tensor] = list(graph(arguments))
    return made


def _part(buffer: Tensor, offset: int, shape: torch.Size) -> Tensor:
    """Part of a buffer as a tensor with a storage of its own, which keeps the buffer's memory
    alive.

    A plain view would do, but for what it shares with its neighbours: version counter and storage,
    which `torch.save` would write whole, and an offset into it, with which DTensors cannot be
    copied (`copy.deepcopy`)."""
    numel = shape.numel()
    if numel == 0 or isinstance(buffer, compat.FakeTensor):
        return buffer.new_empty(shape)
    part = buffer.narrow(0, offset, numel)
    return from_dlpack(part.view(torch.uint8)).view(buffer.dtype).view(shape).data
