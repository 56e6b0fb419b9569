"""Device meshes as text: the option `--mesh dp=64,tp=8` of `zpasses capture` and `zpasses plan`.

The text gives the name and the size of each dimension, the slowest one first, as
`init_device_mesh` takes them. A model is sharded over one dimension for data parallelism, or over
two, (replicate, shard). All other dimensions belong to the model. This file loads no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zpasses.errors import OptionError
from zpasses.short_names import REPLICATE_DIMENSIONS

SHARD_DIMENSIONS = ("dp", "fsdp", "shard", "dp_shard")
"""Names of the dimension over which parameters are sharded."""


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the dimensions of a device mesh, the slowest one first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Parses "dp=64,tp=8".

        Raises:
            OptionError: for other text, a size below 1, a name that stands twice, no dimension to
                shard over or several, or a replicate dimension that does not come before it.
        """
        names, sizes = [], []
        for part in text.split(","):
            name, equals, size = (each.strip() for each in part.partition("="))
            if not equals or not name.isidentifier() or not size.isdecimal() or int(size) < 1:
                raise OptionError(
                    f"mesh {text!r}: cannot read {part.strip()!r}; expected name=size of each "
                    "dimension, such as dp=64,tp=8 or replicate=8,shard=64."
                )
            if name in names:
                raise OptionError(f"mesh {text!r}: dimension {name} stands twice; name it once.")
            names.append(name)
            sizes.append(int(size))
        shape = cls(tuple(names), tuple(sizes))
        shape._check_data(text)
        return shape

    def _check_data(self, text: str) -> None:
        shard = [name for name in self.names if name in SHARD_DIMENSIONS]
        replicate = [name for name in self.names if name in REPLICATE_DIMENSIONS]
        if len(shard) != 1:
            raise OptionError(
                f"mesh {text!r} has {'no' if not shard else 'several'} dimensions to shard over"
                f"{': ' + ', '.join(shard) if shard else ''}; name exactly one of its dimensions "
                f"{', '.join(SHARD_DIMENSIONS[:-1])} or {SHARD_DIMENSIONS[-1]}."
            )
        if len(replicate) > 1 or (
            replicate and self.names.index(replicate[0]) > self.names.index(shard[0])
        ):
            raise OptionError(
                f"mesh {text!r}: expected at most one dimension of replicas, before {shard[0]}: "
                f"{REPLICATE_DIMENSIONS[0]}=8,{shard[0]}=64. Neighbouring ranks, which share a "
                "node, should gather parameters from each other."
            )

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    @property
    def ranks(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.sizes)

    @property
    def data_names(self) -> tuple[str, ...]:
        """The dimensions over which the model is sharded: one, or (replicate, shard)."""
        data = REPLICATE_DIMENSIONS + SHARD_DIMENSIONS
        return tuple(name for name in self.names if name in data)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The other dimensions, which the model has to use: those of tensor parallelism, ..."""
        return tuple(name for name in self.names if name not in self.data_names)


@dataclass(frozen=True)
class AutoMesh:
    """Meshes of hybrid sharding of every shape, "auto". All have the same further dimensions."""

    model: tuple[tuple[str, int], ...] = ()
    """Names and sizes of the dimensions of the model, which come last."""

    @classmethod
    def parse(cls, text: str) -> AutoMesh:
        """Parses "auto", or "auto,tp=8".

        Raises:
            OptionError: for other text, or a dimension of data parallelism.
        """
        first, _, rest = text.partition(",")
        if first.strip() != "auto":
            raise OptionError(f"mesh {text!r}: expected auto, or auto,tp=8.")
        if not rest:
            return cls()
        shape = MeshShape.parse(f"{_SHARD}=1,{rest}")
        if len(shape.data_names) > 1:
            raise OptionError(
                f"mesh {text!r}: auto chooses the dimensions of data parallelism; leave out "
                f"{shape.data_names[0]}."
            )
        return cls(tuple(zip(shape.names, shape.sizes, strict=True))[1:])

    def shapes(self, world: int) -> list[MeshShape]:
        """The meshes of a number of ranks: one replica, two, ..., down to two shards each.

        Raises:
            OptionError: if fewer than two ranks are left for data parallelism, or the dimensions of
                the model do not divide the ranks.
        """
        model = math.prod(size for _, size in self.model)
        data = world // model
        if world % model or data < 2:
            raise OptionError(
                f"--mesh auto: {world} ranks, and {model} for the dimensions of the model; "
                "expected a multiple of it, by at least 2."
            )
        found = []
        for shard in range(data, 1, -1):
            if data % shard == 0:
                replicate = ((_REPLICATE, data // shard),) if shard < data else ()
                items = (*replicate, (_SHARD, shard), *self.model)
                found.append(MeshShape(*map(tuple, zip(*items, strict=True))))
        return found


_SHARD, _REPLICATE = "shard", "replicate"
