"""Computes the rows of a large product, and all that is as large as it, a chunk after the other.

The head of a language model is a product `hidden[T, D] @ head[D, V]` with V larger than D. What
follows until losses per token is as large as the logits, and so is what leads from there to the
gradients of hidden states and head. A chunk of rows is one call of a subgraph, which returns what
is small: values per token, rows of gradients, and the sum over rows so far. Inductor does not fuse
across calls of subgraphs, so no more than one chunk is alive at a time.

What a chunk needs of a value for all rows, such as a mean over all tokens, must be known before, so
a region has phases: forward, backward, and more if forward has such values. Each phase computes the
large values of its chunks again from the hidden states, and reads small ones that earlier phases
returned. So forward saves no logits, whatever the gradient of the loss is. Where backward is linear
in that, its gradients are computed in the phase of forward (zpasses.graph.loss_gradients).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from zpasses import compat
from zpasses.graph.aliases import is_view
from zpasses.graph.linear_values import NotLinearError
from zpasses.graph.loss_gradients import UnitGradients, with_unit_gradients
from zpasses.graph.loss_regions import RowRegion, find_regions, phase_numbers
from zpasses.graph.loss_steps import Read, Step, contiguous_view
from zpasses.graph.padding import rounded_up
from zpasses.graph.queries import Editor, value_of
from zpasses.graph.walks import reachable
from zpasses.option_values import format_size

aten, prims = torch.ops.aten, torch.ops.prims

Gradients = Literal["forward", "backward"]
"""Where the gradients of hidden states and head are computed."""


@dataclass(frozen=True)
class Chunked:
    """What `chunk_regions` did."""

    changed: int
    """Number of regions that were rewritten."""
    notes: tuple[str, ...]
    """What is computed in chunks, and why other products are not."""


def chunk_regions(graph: fx.Graph, chunks: int, gradients: Gradients = "forward") -> Chunked:
    """Rewrites all regions of a joint graph so that chunks compute their rows.

    Args:
        graph: a graph with a module, which gets the subgraphs.
        chunks: the number of chunks; fewer if a product has fewer rows.
        gradients: where gradients are computed. Those that cannot be in forward are in backward.
    """
    regions, refused = find_regions(graph)
    notes = []
    for each in regions:
        size = rows_per_chunk(each.rows, chunks)
        bounds = [(at, min(at + size, each.rows)) for at in range(0, each.rows, size)]
        unit, where = UnitGradients(each, ()), ""
        if gradients == "forward":
            try:
                unit = with_unit_gradients(each)
            except NotLinearError as error:
                where = f"; its gradients in backward, because {error}"
        _Writer(unit.region, bounds, once=bool(unit.scaled)).run()
        for scaled in unit.scaled:
            _keep_until_backward(scaled.all_input_nodes[0])
        notes.append(
            f"{each.product.name} in {len(bounds)} chunks of {size} tokens, instead of "
            f"{format_size(each.nbytes)} at once{where}"
        )
    notes += [f"{name} in one piece, because {reason}" for name, reason in refused.items()]
    if not notes:
        notes.append("no product whose rows become wider and are then reduced")
    return Chunked(len(regions), tuple(notes))


def _keep_until_backward(returned: fx.Node) -> None:
    """Has forward save what a region returned: to compute it again would take the whole region."""

    def made_of(node: fx.Node) -> Sequence[fx.Node]:
        return () if compat.is_subgraph_call(node) else node.all_input_nodes

    for node in reachable([returned], made_of):
        compat.mark_saved(node)


def rows_per_chunk(rows: int, chunks: int) -> int:
    """Returns the rows of each chunk but the last. They are a multiple of 64 or 16 if the chunks
    are that large, which suits the tiles and the alignment that kernels expect.
    """
    step = next((step for step in (64, 16) if step * chunks <= rows), 1)
    return rounded_up(-(-rows // chunks), step)


@dataclass
class _Phase:
    """A part of a region whose values depend on no value for all rows of the same part."""

    roots: list[Step]
    """What it returns."""
    steps: list[Step]
    """What it computes, in order."""
    reads: list[Read]
    """What it takes from outside."""
    constants: dict[Read, list[fx.Node]]
    """What it makes itself, and the calls that do, in order. Inductor has constants in kernels, but
    loads what a subgraph is given, and gives up on fusing expressions of many loads."""


class _Writer:
    def __init__(self, region: RowRegion, bounds: Sequence[tuple[int, int]], *, once: bool) -> None:
        self._region, self._bounds, self._once = region, bounds, once
        self._graph = region.product.graph
        owner = self._graph.owning_module
        assert owner is not None
        self._owner = owner
        self._number = phase_numbers(region)
        self._made: dict[fx.Node, fx.Node] = {}
        """What the graph returned of a root -> what it returns now."""

    def run(self) -> None:
        steps = self._region.steps
        phases = self._phases()
        for each in steps.values():
            if each.kind == "whole":
                self._finish(each, Editor(self._graph, before=each.node), None)
        for phase in phases:
            self._write(phase)
        for node in reversed(steps):
            if not node.users:
                self._graph.erase_node(node)

    def _phases(self) -> list[_Phase]:
        steps, numbers = self._region.steps, self._number
        roots = {node for node, each in steps.items() if self._is_returned(each)}
        phases = []
        for number in sorted({numbers[node] for node in steps}, reverse=True):
            mine = [
                each for node, each in steps.items() if node in roots and numbers[node] == number
            ]
            if mine:
                phases.append(self._phase(number, mine))
                # Earlier phases return the small values that this one reads.
                read = (steps.get(each.node) for each in phases[-1].reads)
                roots.update(each.node for each in read if each and each.kind == "rows")
        return phases[::-1]

    def _phase(self, number: int, roots: list[Step]) -> _Phase:
        steps, numbers = self._region.steps, self._number

        def inside(read: Read) -> bool:
            step = steps.get(read.node)
            if step is None or not read.by_rows or step.kind != "rows":
                return False
            again = self._region.is_wide(step) or read.node in self._region.copied
            return again or numbers[read.node] == number

        needed = set(
            reachable(
                [each.node for each in roots],
                lambda node: [read.node for read in steps[node].reads if inside(read)],
            )
        )
        found = [each for node, each in steps.items() if node in needed]
        outside = (read for each in found for read in each.reads if not inside(read))
        reads = list(dict.fromkeys(outside))
        made = {read: _calls_of_constant(read.node) for read in reads if not read.by_rows}
        constants = {read: calls for read, calls in made.items() if calls}
        return _Phase(roots, found, [each for each in reads if each not in constants], constants)

    def _is_returned(self, step: Step) -> bool:
        """Whether something reads a value that is not computed by rows."""
        if step.node in self._region.copied or step.kind not in ("rows", "sum"):
            return False
        return any(user not in self._region.steps for user in step.node.users) or any(
            read.node is step.node and not read.by_rows
            for user in step.node.users
            for read in self._region.steps[user].reads
        )

    # --- one phase --------------------------------------------------------------------------------
    def _write(self, phase: _Phase) -> None:
        first = phase.roots[0].node
        self._move_up([read.node for read in phase.reads], first)
        edit = Editor(self._graph, before=first)
        whole = {read: self._outside(edit, read) for read in phase.reads}
        sums = [each for each in phase.roots if each.kind == "sum"]
        bodies: dict[tuple[int, bool], str] = {}
        parts: list[list[fx.Node]] = []
        for start, stop in self._bounds:
            given = [
                edit.call(aten.slice.Tensor, whole[read], 0, start, stop)
                if read.by_rows
                else whole[read]
                for read in phase.reads
            ]
            if parts:
                given += [parts[-1][phase.roots.index(each)] for each in sums]
            key = stop - start, bool(parts and sums)
            if key not in bodies:
                bodies[key] = self._add_body(phase, stop - start, given, sums if parts else [])
            parts.append(self._call(edit, bodies[key], given))
        for at, each in enumerate(phase.roots):
            of_chunks = [part[at] for part in parts]
            self._finish(each, edit, self._joined(edit, each, of_chunks))

    def _joined(self, edit: Editor, step: Step, of_chunks: list[fx.Node]) -> fx.Node:
        if step.kind == "sum":
            return of_chunks[-1]
        joined = edit.call(aten.cat.default, of_chunks)
        if step.finish is not None:
            return joined
        return contiguous_view(edit.call, joined, value_of(step.node).shape)

    def _finish(self, step: Step, edit: Editor, value: fx.Node | None) -> None:
        result = step.finish(edit.call, value) if step.finish is not None else value
        assert result is not None
        self._made[step.node] = result
        step.node.replace_all_uses_with(result)

    def _outside(self, edit: Editor, read: Read) -> fx.Node:
        """Returns what a phase reads of the outer graph."""
        node = self._made.get(read.node, read.node)
        shape = (self._region.rows, *read.shape) if read.by_rows else read.shape
        return contiguous_view(edit.call, node, shape) if value_of(node).shape != shape else node

    def _move_up(self, nodes: Sequence[fx.Node], before: fx.Node) -> None:
        """Moves what a phase reads before its first call, with all that this depends on."""
        order = {node: at for at, node in enumerate(self._graph.nodes)}
        limit = order[before]
        late = [
            node
            for node in reachable(
                [self._made.get(node, node) for node in nodes],
                lambda node: [item for item in node.all_input_nodes if order[item] > limit],
            )
            if order[node] > limit
        ]
        for node in sorted(late, key=order.__getitem__):
            before.prepend(node)

    # --- subgraphs --------------------------------------------------------------------------------
    def _add_body(
        self, phase: _Phase, rows: int, given: Sequence[fx.Node], sums: Sequence[Step]
    ) -> str:
        """Adds a subgraph that computes some rows. Returns its name."""
        body = fx.Graph()
        inputs = [body.placeholder(f"input_{at}") for at in range(len(given))]
        for node, outer in zip(inputs, given, strict=True):
            node.meta["val"] = _own_memory(value_of(outer))
        output = body.output(())
        known: dict[Any, fx.Node] = dict(zip(phase.reads, inputs, strict=False))
        earlier = dict(zip((each.node for each in sums), inputs[len(phase.reads) :], strict=True))
        copies: dict[fx.Node, fx.Node] = {}
        for read, calls in phase.constants.items():
            for call in calls:
                if call not in copies:
                    with body.inserting_before(output):
                        copies[call] = body.node_copy(call, copies.__getitem__)
            emit = Editor(body, before=output, like=read.node).call
            known[read] = contiguous_view(emit, copies[read.node], read.shape)
        for each in phase.steps:
            emit = Editor(body, before=output, like=each.node).call
            values = [known[read] if read in known else known[read.node] for read in each.reads]
            known[each.node] = each.build(emit, rows, values, earlier.get(each.node))
        output.args = (tuple(known[each.node] for each in phase.roots),)
        name = _free_name(self._owner)
        setattr(self._owner, name, fx.GraphModule(torch.nn.Module(), body))
        return name

    def _call(self, edit: Editor, name: str, given: Sequence[fx.Node]) -> list[fx.Node]:
        returned: Any = getattr(self._owner, name).graph.output_node().args[0]
        values = [_own_memory(value_of(each)) for each in returned]
        call = edit.call_subgraph(name, given, values)
        parts = [edit.call(operator.getitem, call, at) for at in range(len(values))]
        for each in (call, *parts) if self._once else ():
            compat.mark_saved(each)
        return parts


_CONSTANTS = frozenset(
    {aten.full.default, aten.scalar_tensor.default, aten.arange.start_step, prims.iota.default}
)


def _calls_of_constant(node: fx.Node) -> list[fx.Node]:
    """Returns the calls that make a value which depends on no other, in order; none if it does."""
    calls = list(reachable([node], lambda each: each.all_input_nodes))
    found = [each for each in calls if each.target in _CONSTANTS or is_view(each)]
    if len(found) < len(calls) or not any(each.target in _CONSTANTS for each in calls):
        return []
    order = {each: at for at, each in enumerate(node.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _own_memory(value: Tensor) -> Tensor:
    """Returns a fake tensor of the same shape and strides at the beginning of its memory."""
    return value.new_empty_strided(value.shape, value.stride())


def _free_name(owner: torch.nn.Module) -> str:
    at = 0
    while hasattr(owner, f"rows_{at}"):
        at += 1
    return f"rows_{at}"
