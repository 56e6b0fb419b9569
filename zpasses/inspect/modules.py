"""Folds figures by module: equal layers are shown once, with their number, their range, and the
layers that differ.

    blocks.*.mlp    4 times    1.5 MiB to 2 MiB each    not as the others: blocks.3.mlp
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from zpasses.dumps.nodes import Node
from zpasses.errors import some_of

_ODD = 0.05
"""Relative distance from the median beyond which a layer is not as the others."""


@dataclass(frozen=True)
class FoldedModule:
    """Modules whose paths differ only in the numbers of layers."""

    name: str
    """Path with "*" for numbers: "layers.*.mlp.up". The path itself if there is only one."""
    members: Mapping[str, float]
    """Path -> its figure."""

    @property
    def total(self) -> float:
        return sum(self.members.values())

    @property
    def least(self) -> float:
        return min(self.members.values())

    @property
    def most(self) -> float:
        return max(self.members.values())

    @property
    def odd(self) -> tuple[str, ...]:
        """Members whose figure differs from the median by more than a twentieth of it."""
        middle = median(self.members.values())
        return tuple(
            name for name, value in self.members.items() if abs(value - middle) > _ODD * abs(middle)
        )


def template(module: str) -> str:
    """ "layers.12.mlp.0" -> "layers.*.mlp.0".

    A number at the end stays if there is another: it names a part of a layer, as in an
    `nn.Sequential`.
    """
    parts = module.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isascii() and part.isdigit()]
    for at in numbers:
        if at < len(parts) - 1 or at == numbers[0]:
            parts[at] = "*"
    return ".".join(parts)


def fold_modules(figures: Mapping[str, float]) -> list[FoldedModule]:
    """Modules by their template, largest total first."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for module, value in figures.items():
        found[template(module)][module] = value
    folded = [
        FoldedModule(name if len(members) > 1 else next(iter(members)), members)
        for name, members in found.items()
    ]
    return sorted(folded, key=lambda each: -each.total)


def module_of(param: str) -> str:
    """The module that owns a parameter: "layers.0.up.weight" -> "layers.0.up"."""
    return param.rpartition(".")[0] or param


def modules_of(node: Node) -> tuple[str, ...]:
    """The modules that a node works for: those of its parameters, else that of its line."""
    owners = tuple(dict.fromkeys(module_of(name) for name in node.params))
    if owners:
        return owners
    return (node.source.module,) if node.source is not None and node.source.module else ()


def modules_text(modules: Iterable[str]) -> str:
    """ "layers.*.mlp.up (80 times) and 3 more"."""
    folded = fold_modules(dict.fromkeys(modules, 1))
    names = [
        f"{each.name} ({len(each.members):,} times)" if len(each.members) > 1 else each.name
        for each in folded
    ]
    return some_of(names)
