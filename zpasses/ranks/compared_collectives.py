"""Ranks compare what a graph communicates before they run it.

Before a compiled graph first runs, the ranks of each of its process groups compare the sequence of
collectives that the graph runs on that group: operators, shapes, dtypes, reduce operators, and the
parameters that they gather or reduce. A difference, or a rank whose compile failed, raises
AgreementError on every rank of the group.

Collectives of a second group (`zpasses.ranks.new_groups`) are part of the sequence of the
first. Ranks therefore also start the collectives of both in one order, without which two
communicators of NCCL may wait for each other.

Ranks may send each other different numbers of rows in an all-to-all, so its dimension 0 is left
out, and so are dynamic sizes, which each rank names by itself.

A sequence that was agreed once needs no second vote. A rank may therefore recompile while the
others do not, for a new batch shape for example, as long as it runs the same collectives.
`zpasses.ranks.run_order` checks that ranks also run agreed graphs in the same order.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import fx

from zpasses import compat
from zpasses.errors import some_of
from zpasses.graph.queries import Collective, collectives, is_wait
from zpasses.graph.source_lines import describe_source
from zpasses.graph.tags import params_of, tag_of
from zpasses.ranks.agree import compare
from zpasses.ranks.current_compile import compiled_graph, how_to_compare, options_differ
from zpasses.ranks.group_texts import name_group
from zpasses.ranks.run_order import RunEvent
from zpasses.ranks.sequence_difference import first_difference, tensor_texts
from zpasses.ranks.vote import Ballot, group_state, has_other_ranks


@dataclass(frozen=True)
class CallSequence:
    """What a graph communicates over one process group, in words: one item per collective."""

    lines: list[str]
    """Operator, shapes, dtypes, reduce operator and parameters. Ranks compare these."""
    places: list[str]
    """Source lines, for errors."""
    modules: list[str]
    """Modules that own the parameters, for errors."""
    tensors: list[list[str]]
    """Dtype, shape, parameter, module and source line of each tensor, for errors."""

    def digest(self) -> str:
        return _hash(self.lines)


Sequences = dict[str, CallSequence]
"""Process group -> what a graph communicates over it, in sorted order, identical on every rank."""


def digest(sequence: Sequence[Collective]) -> str:
    """A short name of a sequence of collectives, without their parameters, for dumps."""
    return _hash([_line(each, ()) for each in sequence])


def compare_collectives(graph: fx.Graph, graph_name: str) -> None:
    """Raise AgreementError on every rank of a group unless all would run the same collectives.

    Args:
        graph: the graph as it will run, after its last pass.
        graph_name: what the error calls it.
    """
    compare_sequences(call_sequences(graph), graph_name)


def call_sequences(graph: fx.Graph) -> Sequences:
    """What a graph communicates over each process group that has other ranks."""
    return {
        group: CallSequence(
            [_line(each, params_of(node)) for node, each in calls],
            [describe_source(node) for node, _ in calls],
            [_modules(params_of(node)) for node, _ in calls],
            [_tensors(node, each) for node, each in calls],
        )
        for group, calls in _calls_by_group(graph).items()
        if has_other_ranks(group)
    }


def compare_sequences(sequences: Sequences, graph_name: str) -> None:
    """`compare_collectives` of a graph that is described by what it communicates."""
    for group, sequence in sequences.items():
        _compare(group, graph_name, sequence)


def run_events(graph: fx.Graph, graph_name: str) -> dict[str, RunEvent]:
    """Process group -> the event that a run of this graph is.

    Shapes of collectives that zpasses did not make are left out: ranks may run them on batches of
    different sizes.
    """
    events = {}
    for group, calls in _calls_by_group(graph).items():
        parts = [
            _line(each, params_of(node)) if tag_of(node) is not None else each.op
            for node, each in calls
        ]
        first = next((param for node, _ in calls for param in params_of(node)), "")
        of = f", the first of {first}" if first else ""
        text = f"graph {graph_name} ({len(calls)} collectives, {calls[0][1].op}{of})"
        events[group] = RunEvent.of(text, parts)
    return events


_Call = tuple[fx.Node, Collective]


def _calls_by_group(graph: fx.Graph) -> dict[str, list[_Call]]:
    """Groups in sorted order, identical on every rank."""
    found: dict[str, list[_Call]] = {}
    for node, each in collectives(graph):
        found.setdefault(compat.parent_group(each.group), []).append((node, each))
    return dict(sorted(found.items()))


def _compare(group: str, graph_name: str, sequence: CallSequence) -> None:
    mine, agreed = sequence.digest(), group_state(group).agreed
    if mine in agreed:
        return
    compiled = compiled_graph() or {}
    given = {name: compiled.get(name) for name in ("dump", "options")}
    ballot = {"graph": graph_name, "digest": mine, **given, **asdict(sequence)}

    def difference(rank_a: int, a: Ballot, rank_b: int, b: Ballot) -> str | None:
        if a["digest"] == b["digest"]:
            return None
        return (
            f"ranks would run different collectives on {name_group(group)}. "
            + first_difference(rank_a, a, rank_b, b)
            + options_differ(rank_a, a["options"], rank_b, b["options"])
            + "Every rank must take the same branches and read the same parameters in the same "
            "order. " + how_to_compare(rank_a, a["dump"], rank_b, b["dump"])
        )

    missed = f"compile a graph with new collectives (graph {graph_name} here)"
    compare(group, "compiling a graph", ballot, difference, missed=missed)
    agreed.add(mine)


def _modules(params: Sequence[str], most: int = 3) -> str:
    """The modules that own parameters: "layers.0, layers.1 and 4 more"."""
    found = list(dict.fromkeys(name.rpartition(".")[0] for name in params))
    return some_of([name for name in found if name], most)


def _tensors(node: fx.Node, each: Collective) -> list[str]:
    texts = _shaped(each)
    return tensor_texts(texts, params_of(node), [_place(node, at) for at in range(len(texts))])


def _place(node: fx.Node, index: int) -> str:
    """Source line of one tensor of a collective. Of several, its wait has kept it: the collective
    itself has the line of its first tensor.
    """
    if not any(user.target is operator.getitem for user in node.users):
        return describe_source(node)
    parts = (user for user in node.users if user.target is operator.getitem)
    users = (user for part in parts if part.args[1] == index for user in part.users)
    wait = next((user for user in users if is_wait(user)), None)
    return "" if wait is None else describe_source(wait)


def _line(each: Collective, params: Sequence[str]) -> str:
    """`all_gather_into_tensor(float32[4, 2]) of layers.0.weight`."""
    tensors = ", ".join(_shaped(each))
    reduce_op = f", {each.reduce_op}" if each.reduce_op else ""
    made = compat.group_suffix(each.group)  # of a group that a pass made
    group = f" on group {compat.parent_group(each.group) + made!r}" if made else ""
    of = f" of {', '.join(params)}" if params else ""
    encoded = f" as {each.encoding}" if each.encoding else ""
    return f"{each.op}({tensors}{reduce_op}{encoded}){of}{group}"


def _shaped(each: Collective) -> list[str]:
    """`float32[4, 2]` for each tensor. Sizes in which ranks may differ are `*`."""
    rows_differ = each.op.startswith("all_to_all")
    return [
        f"{dtype}[{', '.join(_size(size, rows_differ and not dim) for dim, size in sizes)}]"
        for dtype, sizes in zip(each.dtypes, map(enumerate, each.shapes), strict=True)
    ]


def _size(size: int | str, differs: bool) -> str:
    return str(size) if isinstance(size, int) and not differs else "*"


def _hash(lines: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]
