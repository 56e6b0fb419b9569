"""Where the collectives of two ranks first differ, as text: for an AgreementError and for dumps.

It names what differs and nothing else, so it stays short for buckets of a thousand parameters.
Loads no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_MOST = 3
"""Tensors of a list in an error."""


Calls = Mapping[str, Any]
"""The fields of a `CallSequence`, and the name of its graph as "graph"."""


def first_difference(rank_a: int, a: Calls, rank_b: int, b: Calls) -> str:
    """Returns the first difference between the collectives of two ranks, in sentences."""
    lines_a, lines_b = a["lines"], b["lines"]
    shared = min(len(lines_a), len(lines_b))
    at = next((i for i in range(shared) if lines_a[i] != lines_b[i]), shared)
    tensor = _first_tensor(a, b, at) if at < shared else None
    said_a, said_b = (_said(each, at, tensor) for each in (a, b))
    only_a, only_b = _only(a, b, at), _only(b, a, at)
    told = tensor is not None and max(len(only_a), len(only_b)) <= 1
    only = "" if told else _only_text(rank_a, only_a) + _only_text(rank_b, only_b)
    return (
        f"First difference: collective {at + 1} is {said_a} on rank {rank_a} (graph {a['graph']}, "
        f"{len(lines_a)} collectives) but {said_b} on rank {rank_b} (graph {b['graph']}, "
        f"{len(lines_b)} collectives). {only}"
    )


def tensor_texts(values: Sequence[str], params: Sequence[str], places: Sequence[str]) -> list[str]:
    """Returns the tensors of a collective: `float32[4, 2] of layers.0.weight (module layers.0) at
    FILE:LINE`.

    Args:
        values: dtype and shape of each tensor.
        params: parameters, one per tensor. Several that share a tensor are a part of it each.
        places: source line of each tensor, "" if it is not known.
    """
    if not params:
        return list(values)
    if len(params) != len(values):
        values, places = ["a part"] * len(params), [""] * len(params)
    owners = [name.rpartition(".")[0] for name in params]
    return [
        f"{text} of {name}"
        + (f" (module {owner})" if owner else "")
        + (f" at {place}" if place else "")
        for text, name, owner, place in zip(values, params, owners, places, strict=True)
    ]


def _only(own: Calls, other: Calls, at: int) -> list[str]:
    """Tensors of parameters that only one rank communicates, as often as it does: those of the
    collective that differs first, and then those of later ones.
    """
    own_tensors, others = (
        [text for texts in (*each["tensors"][at:], *each["tensors"][:at]) for text in texts]
        for each in (own, other)
    )
    known = Counter(map(_key, others))
    found = []
    for text in own_tensors:
        known[_key(text)] -= 1
        if known[_key(text)] < 0 and " of " in _key(text):
            found.append(text)
    return found


def _only_text(rank: int, tensors: Sequence[str]) -> str:
    """ "Only on rank 1: float32[4, 2] of layers.0.weight (module layers.0) at FILE:LINE. "."""
    return f"Only on rank {rank}: {_some(tensors)}. " if tensors else ""


def _key(tensor: str) -> str:
    """`float32[4, 2] of layers.0.weight`, without the module and the line."""
    return tensor.partition(" (module ")[0].partition(" at ")[0]


def _first_tensor(a: Calls, b: Calls, at: int) -> int | None:
    """The first tensor that differs between two collectives of several; None if none does, or if
    one collective has tensors more.
    """
    one, other = ([_key(text) for text in each["tensors"][at]] for each in (a, b))
    if len(one) != len(other) or len(one) < 2 or _op(a, at) != _op(b, at):
        return None
    return next((i for i in range(len(one)) if one[i] != other[i]), None)


def _op(ballot: Calls, at: int) -> str:
    return re.split(r"\(| -> ", ballot["lines"][at])[0]


def _said(ballot: Calls, at: int, tensor: int | None) -> str:
    if at >= len(ballot["lines"]):
        return "nothing more"
    tensors: list[str] = ballot["tensors"][at]
    if tensor is not None:
        return (
            f"{_op(ballot, at)} of {len(tensors)} tensors, of which tensor {tensor + 1} is "
            f"{tensors[tensor]}"
        )
    if len(tensors) > _MOST:
        return f"{_op(ballot, at)} of {len(tensors)} tensors{_details(ballot['lines'][at])}"
    place, module = ballot["places"][at], ballot["modules"][at]
    inside = f" (module {module})" if module else ""
    where = f" at {place}" if place and len(tensors) == 1 else ""
    return f"{ballot['lines'][at]}{inside}{where}"


def _details(line: str) -> str:
    """What a line says besides the operator and its tensors: ", avg on group '3'"."""
    call, _, rest = line.partition(")")
    _, on, group = rest.rpartition(" on group ")
    return (call.rpartition("]")[2] if rest else "") + (f"{on}{group}" if on else "")


def _some(texts: Sequence[str]) -> str:
    shown = "; ".join(texts[:_MOST])
    return f"{shown}; and {len(texts) - _MOST} more" if len(texts) > _MOST else shown
