"""A graph as text: one line per node, with its values, bytes and parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zpasses.dumps.nodes import Argument, Items, Node, Ref, Repr, Snapshot, Value
from zpasses.inspect.units import bytes_text
from zpasses.short_names import SHORT_DTYPES

_PLAIN_NAMESPACES = ("aten.", "_c10d_functional.", "operator.")

MAX_ITEMS = 6
"""Items of a list that a line shows before it counts the rest. A bucket may have hundreds."""


@dataclass(frozen=True)
class Line:
    """One node as text."""

    node: Node
    code: str
    note: str

    def text(self, width: int) -> str:
        """The code, padded to `width` columns, and the note."""
        return f"{self.code:{width}}  # {self.note}" if self.note else self.code


@dataclass(frozen=True)
class NodeFilter:
    """Selects nodes. A node must meet every condition that is given."""

    collectives: bool = False
    """Only collectives and their waits."""
    params: tuple[str, ...] = ()
    """Patterns (`layers.3.*`), one of which must match a parameter of the node."""
    ops: tuple[str, ...] = ()
    """Patterns (`mm`, `all_gather*`), one of which must match the op, with or without its
    namespace.
    """
    names: tuple[str, ...] = ()
    """Patterns, one of which must match the node's name."""
    ids: Collection[int] | None = None
    """Ids of the nodes to select; None is all."""

    def __call__(self, node: Node) -> bool:
        if self.ids is not None and node.id not in self.ids:
            return False
        if self.collectives and node.collective is None and "wait_tensor" not in node.target:
            return False
        called = (op_text(node.target), node.target)
        ops = called if node.op.startswith("call") else (node.op,)
        given = (self.params, node.params), (self.ops, ops), (self.names, (node.name,))
        return all(_matches(patterns, texts) for patterns, texts in given)


def _matches(patterns: Sequence[str], words: Iterable[str]) -> bool:
    return not patterns or any(fnmatchcase(word, pattern) for word in words for pattern in patterns)


def lines(
    snapshot: Snapshot, where: Callable[[Node], bool] | None = None, most: int | None = MAX_ITEMS
) -> list[Line]:
    """The nodes of a graph as text, in order.

    Args:
        where: selects nodes, such as a `NodeFilter`; None is all.
        most: items of a list to show before the rest is counted; None shows all.
    """
    names = {node.id: node.name for node in snapshot.nodes}
    return [
        Line(node, call_text(node, names, most), note_text(node, most))
        for node in snapshot.nodes
        if where is None or where(node)
    ]


def listing(
    snapshot: Snapshot, where: Callable[[Node], bool] | None = None, most: int | None = MAX_ITEMS
) -> str:
    """A graph as text.

        w_shard: f32[3, 5]                                    # 60 B; shard: w
        w = zpasses.unshard(w_shard, 6, None, None, '0')      # f32[6, 5] 120 B; gather: w
        return (w,)

    The comment gives dtype, shape and bytes of the node's value, its role and parameters, its
    bucket, the note of a pass, and `recomputed` if backward recomputes the value. Op names are
    shown without `aten` and `_c10d_functional`. Long lists are shortened.

    Args:
        where: selects nodes, such as a `NodeFilter`; None is all.
        most: items of a list to show before the rest is counted; None shows all.
    """
    return "\n".join(aligned(lines(snapshot, where, most)))


def aligned(found: Sequence[Line]) -> list[str]:
    """Lines as text, with their notes in one column."""
    width = min(max((len(line.code) for line in found if line.note), default=0), 88)
    return [line.text(width) for line in found]


def op_text(target: str) -> str:
    """ "aten.mm.default" -> "mm", "zpasses.unshard.default" -> "zpasses.unshard"."""
    for prefix in _PLAIN_NAMESPACES:
        target = target.removeprefix(prefix)
    head, dot, overload = target.rpartition(".")
    plain = overload in ("default", "out") or ("." not in head and overload[:1].isupper())
    return head if dot and plain else target


def call_text(node: Node, names: Mapping[int, str], most: int | None = MAX_ITEMS) -> str:
    """A node as code. `names` maps the ids of the nodes that it may read to their names."""
    if node.op == "placeholder":
        return f"{node.name}: {value_text(node.vals, most)}" if node.vals else node.name
    if node.op == "output":
        return f"return {argument_text(node.args[0] if node.args else (), names, most)}"
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    given = [argument_text(argument, names, most) for argument in node.args]
    given += [
        f"{key}={argument_text(argument, names, most)}" for key, argument in node.kwargs.items()
    ]
    if node.op == "call_method":
        return f"{node.name} = {given[0] if given else '?'}.{node.target}({', '.join(given[1:])})"
    owner = "self." if node.op == "call_module" else ""
    return f"{node.name} = {owner}{op_text(node.target)}({', '.join(given)})"


def argument_text(
    argument: Argument, names: Mapping[int, str], most: int | None = MAX_ITEMS
) -> str:
    """An argument as code."""
    if isinstance(argument, Ref):
        return names.get(argument.node, f"<node {argument.node}>")
    if isinstance(argument, Repr):
        text = argument.text.removeprefix("torch.")
        return SHORT_DTYPES.get(text, text)
    if isinstance(argument, tuple):
        return f"[{_joined([argument_text(item, names, most) for item in argument], most)}]"
    if isinstance(argument, Items):
        items = argument.items.items()
        texts = [f"{key}: {argument_text(item, names, most)}" for key, item in items]
        return f"{{{', '.join(texts)}}}"
    return repr(argument)


def _joined(items: Sequence[str], most: int | None) -> str:
    if most is None or len(items) <= most:
        return ", ".join(items)
    return ", ".join([*items[: most - 1], f"... {len(items) - most:,} more", items[-1]])


def value_text(vals: Sequence[Value], most: int | None = MAX_ITEMS) -> str:
    """ "f32[64, 128]", or several values in parentheses."""
    each = [f"{SHORT_DTYPES.get(value.dtype, value.dtype)}{_shape(value)}" for value in vals]
    return each[0] if len(each) == 1 else f"({_joined(each, most)})" if each else ""


def _shape(value: Value) -> str:
    tensor = bool(value.device) or bool(value.shape)
    return f"[{', '.join(map(str, value.shape))}]" if tensor else ""


def note_text(node: Node, most: int | None = MAX_ITEMS) -> str:
    """The comment of a node in a listing."""
    notes = []
    if node.vals and node.op != "output":
        size = bytes_text(node.nbytes) if node.nbytes else ""
        notes.append(
            size if node.op == "placeholder" else f"{value_text(node.vals, most)} {size}".strip()
        )
    tag = node.tag
    if tag is not None:
        bucket = "" if tag.bucket is None else f" in bucket {tag.bucket}"
        params = f": {_joined(tag.params, most)}" if tag.params else ""
        notes.append(f"{tag.role}{params}{bucket}")
        notes += ["cached"] if tag.cached else []
        notes += ["kept"] if tag.kept else []
        notes += [tag.note] if tag.note else []
    elif node.params:
        notes.append(_joined(node.params, most))
    of = node.collective
    notes += [f"over {of.label} ({of.ranks})"] if of is not None and of.label else []
    notes += [node.mark.text] if node.mark is not None else []
    return "; ".join(note for note in notes if note)
