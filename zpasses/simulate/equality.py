"""Inputs for simulated ranks, and comparison bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zpasses.graph.queries import value_of


def random_inputs(
    graphs: Sequence[fx.GraphModule], *, seed: int = 0, bound: int | None = None
) -> list[list[Any]]:
    """Make inputs for `simulate`: one list per rank, with the shapes and dtypes that the graph's
    inputs record.

    Values are small integers, so sums are exact in any order. Incoming gradients ("tangents") are
    multiples of the number of ranks, so averages over ranks are exact too. Ranks get different
    values.

    Args:
        graphs: one graph per rank.
        bound: floating-point values lie in -bound..bound. Integers lie in 0..bound - 1, so they are
            valid indices of any dimension of at least that size. None takes 3, and 1 for values in
            bfloat16, because it has no integer between 256 and 258.
    """
    generator = torch.Generator().manual_seed(seed)
    given = [graph.graph.find_nodes(op="placeholder") for graph in graphs]
    return [
        [_random_input(node, len(graphs), bound, generator) for node in nodes] for nodes in given
    ]


def _random_input(node: fx.Node, ranks: int, bound: int | None, generator: torch.Generator) -> Any:
    value = value_of(node)
    if not isinstance(value, Tensor):
        return getattr(getattr(value, "node", None), "hint", value)
    shape = [int(size) if isinstance(size, int) else int(size.node.hint) for size in value.shape]
    if value.dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not (value.is_floating_point() or value.is_complex()):
        return torch.randint(
            0, max(3 if bound is None else bound, 1), shape, generator=generator
        ).to(value.dtype)
    most = bound if bound is not None else 1 if value.dtype == torch.bfloat16 else 3
    drawn = torch.randint(-most, most + 1, shape, generator=generator)
    return (drawn * ranks if node.name.startswith("tangents") else drawn).to(value.dtype)


def copied(inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Copies of the inputs of each rank, which a run may change."""
    return [[each.clone() if isinstance(each, Tensor) else each for each in row] for row in inputs]


def check_outputs(
    got: Sequence[Any], wanted: Sequence[Any], where: str, names: Mapping[int, str] | None = None
) -> None:
    """Raise AssertionError unless all outputs of a rank are equal bit for bit.

    Args:
        where: names the rank.
        names: position -> what the message says behind it.
    """
    if len(got) != len(wanted):
        raise AssertionError(
            f"{where}: the graph has {len(got)} outputs, the reference {len(wanted)}."
        )
    for i, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        check_equal(ours, theirs, f"{where}, output {i}{(names or {}).get(i, '')}")


def check_equal(got: Any, wanted: Any, where: str) -> None:
    """Raise AssertionError, which names `where`, unless two values are equal bit for bit."""
    if not (isinstance(got, Tensor) and isinstance(wanted, Tensor)):
        if type(got) is not type(wanted) or got != wanted:
            raise AssertionError(
                f"{where}: is {_short(got)}, but the reference gives {_short(wanted)}."
            )
        return
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        raise AssertionError(
            f"{where}: is {_short(got)}, but the reference gives {_short(wanted)}."
        )
    if got.numel() == 0:
        return
    ours, theirs = bits(got), bits(wanted)
    different = (ours != theirs).any(dim=1).nonzero().flatten()
    if len(different):
        at = int(different[0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape))
        raise AssertionError(
            f"{where}: {len(different)} of {got.numel()} elements differ. First difference at "
            f"{index}: {_element(got, at)}, but the "
            f"reference gives {_element(wanted, at)}."
        )


def bits(tensor: Tensor) -> Tensor:
    """The bytes of each element, uint8[elements, bytes]."""
    # A tensor of one element is contiguous whatever its stride, but only a stride of 1 can be
    # viewed as bytes.
    row = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return row.view(torch.uint8).reshape(tensor.numel(), tensor.element_size())


def _element(tensor: Tensor, at: int) -> str:
    raw = bytes(reversed(bits(tensor)[at].tolist()))
    return f"{tensor.detach().reshape(-1)[at].item()!r} (0x{raw.hex()})"


def _short(value: Any) -> str:
    return (
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, Tensor)
        else repr(value)
    )
