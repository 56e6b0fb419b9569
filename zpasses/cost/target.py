"""What a graph will run on: the figures that the cost model needs, and what the hardware can do.

A target is detected from the process (`Target.detect`) or named
(`Target.parse("mi300x,ranks_per_node=8")`, the environment variable `ZPASSES_TARGET`, the backend's
option `target`), so that a graph can be planned for hardware that is not here. Every figure is a
prior out of a data sheet or a measurement, named beside it; none is used for anything but choosing
between forms of equal result."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch

from zpasses.errors import OptionError, nearest
from zpasses.option_values import field_types, parse_value

__all__ = ["TARGETS", "Target", "current_target", "target_of"]

ENVIRONMENT_VARIABLE = "ZPASSES_TARGET"
_GIB = 1 << 30


@dataclass(frozen=True)
class Target:
    """One kind of device in one kind of node.

    Bandwidths are in GB/s (10^9 bytes), of one rank and in one direction; times in microseconds.
    """

    name: str
    ranks_per_node: int
    """Devices per node; collectives among more ranks cross the network."""
    link_gb_s: float
    """Bandwidth to the other devices of the node, over all links together."""
    network_gb_s: float
    """Bandwidth to other nodes."""
    memory_gb_s: float
    """Bandwidth of the device's memory."""
    tflops: float
    """Dense matrix multiplication in the dtype that training uses (bf16; fp32 on CPU), in 10^12
    operations per second."""
    memory_bytes: int
    """Memory of the device."""
    launch_us: float
    """Time from the start of a collective until its first byte moves."""
    hop_us: float
    """Time of each step of a ring within the node."""
    network_hop_us: float
    """Time of each step of a ring that crosses the network."""
    kernel_us: float
    """Time of a kernel that does nothing."""
    source: str = ""
    """Where the figures are from."""
    architecture: str = "cpu"
    """What the compiler calls the device: "gfx942", "gfx950", "sm90", ..., "cpu"."""
    routes: tuple[str, ...] = ()
    """Ways to communicate by copy engines that this hardware has ("mori", "symm_mem"), the
    preferred one first."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """A target by name, figures changed at will: "mi300x,ranks_per_node=4,link_gb_s=300".

        Raises:
            OptionError: for an unknown name or figure, or a value that is not a positive number.
        """
        name, *changes = [part.strip() for part in text.split(",")]
        if name not in TARGETS:
            raise OptionError(
                f"target {text!r}: nothing is called {name!r}.{nearest(name, TARGETS)}"
            )
        types = {
            key: kind for key, kind in field_types(cast(Any, cls)).items() if key not in _FIXED
        }
        values = {}
        for change in changes:
            key, equals, value = change.partition("=")
            if not equals or key.strip() not in types:
                raise OptionError(
                    f"target {text!r}: cannot read {change!r}; expected "
                    f"figure=value.{nearest(key.strip(), types)}"
                )
            values[key.strip()] = parse_value(
                value.strip(), types[key.strip()], f"target {name!r}, {key.strip()!r}"
            )
            if not values[key.strip()] > 0:
                raise OptionError(
                    f"target {text!r}: {key.strip()} must be greater than 0, got {value.strip()}."
                )
        return dataclasses.replace(TARGETS[name], **values)

    @classmethod
    def detect(cls) -> Target:
        """`ZPASSES_TARGET` if set, else the target of this process's device; an accelerator without
        figures here counts as an H100."""
        named = os.environ.get(ENVIRONMENT_VARIABLE)
        if named:
            return cls.parse(named)
        if not torch.cuda.is_available():
            return TARGETS["cpu"]
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return dataclasses.replace(
            target_of(
                properties.name,
                getattr(properties, "gcnArchName", ""),
                properties.multi_processor_count,
                properties.total_memory,
            ),
            ranks_per_node=torch.cuda.device_count(),
            memory_bytes=properties.total_memory,
        )

    def __str__(self) -> str:
        base = TARGETS.get(self.name)
        if base is None or base == self:
            return self.name
        changed = [
            field.name
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(base, field.name)
        ]
        return ",".join([self.name, *(f"{key}={getattr(self, key)}" for key in changed)])


_FIXED = ("name", "source", "architecture", "routes")
"""Not figures: what the hardware is."""


# Ring over NVLink or Infinity Fabric, "simple" protocol: base and hop latencies as in NCCL's tuning
# constants, src/graph/tuning.cc, of which RCCL's are a copy. The network is one 400 Gbit/s adapter
# a device, as in vendors' reference nodes.
def _gpu(
    name: str, link: float, memory: float, tflops: float, gib: int, architecture: str, source: str
) -> Target:
    routes = ("mori", "symm_mem") if architecture in ("gfx942", "gfx950") else ("symm_mem",)
    return Target(
        name,
        8,
        link,
        50.0,
        memory,
        tflops,
        gib * _GIB,
        8.4,
        3.4,
        14.0,
        5.0,
        source,
        architecture,
        routes,
    )


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            # Two gloo ranks on one machine of two cores: python -m zpasses.tools.bench train (bare
            # collectives), 78 MB in 0.14 s; a collective of 2 KB takes 0.15 ms.
            Target(
                "cpu",
                2,
                0.56,
                0.56,
                5.0,
                0.1,
                16 * _GIB,
                100.0,
                50.0,
                100.0,
                1.0,
                "docs/measurements.md",
            ),
            _gpu("a100", 300.0, 2039.0, 312.0, 80, "sm80", "NVIDIA A100 80GB SXM data sheet"),
            _gpu("h100", 450.0, 3350.0, 989.0, 80, "sm90", "NVIDIA H100 SXM data sheet"),
            _gpu("h200", 450.0, 4800.0, 989.0, 141, "sm90", "NVIDIA H200 SXM data sheet"),
            _gpu(
                "b200",
                900.0,
                8000.0,
                2250.0,
                180,
                "sm100",
                "NVIDIA DGX B200 data sheet, a GPU's share",
            ),
            _gpu("mi300x", 448.0, 5300.0, 1307.0, 192, "gfx942", "AMD Instinct MI300X data sheet"),
            _gpu("mi300a", 384.0, 5300.0, 981.0, 128, "gfx942", "AMD Instinct MI300A data sheet"),
            _gpu(
                "mi308x",
                448.0,
                5300.0,
                344.0,
                192,
                "gfx942",
                "MI300X's figures with 80 of its 304 compute units",
            ),
            _gpu("mi325x", 448.0, 6000.0, 1307.0, 256, "gfx942", "AMD Instinct MI325X data sheet"),
            _gpu("mi355x", 538.0, 8000.0, 2517.0, 288, "gfx950", "AMD Instinct MI355X data sheet"),
        )
    }
)
"""The targets that are known by name."""


def target_of(
    device: str, architecture: str = "", compute_units: int = 0, memory_bytes: int = 0
) -> Target:
    """The target of a device by what it reports; H100's figures for one not known.

    Args:
        device: its name. AMD's may be no more than "AMD Radeon Graphics".
        architecture: "gfx942:sramecc+:xnack-" and the like; "" on CUDA.
        compute_units, memory_bytes: tell devices of one architecture apart where the name does not;
            0 if not known.
    """
    squeezed = device.lower().replace(" ", "").replace("-", "")
    for name, target in TARGETS.items():
        if name != "cpu" and name in squeezed:
            return target
    base = architecture.partition(":")[0]
    if base == "gfx942":
        if compute_units in _GFX942_UNITS:
            return TARGETS[_GFX942_UNITS[compute_units]]
        return TARGETS["mi325x" if memory_bytes > 200 * _GIB else "mi300x"]
    return TARGETS["mi355x" if base == "gfx950" else "h100"]


_GFX942_UNITS = {228: "mi300a", 80: "mi308x"}
"""Compute units of those that have another number than MI300X and MI325X, which have 304."""


_current: contextvars.ContextVar[Target | None] = contextvars.ContextVar(
    "zpasses.cost.target", default=None
)


def current_target() -> Target:
    """The target of the compile under way, or that of this process."""
    return _current.get() or Target.detect()


@contextlib.contextmanager
def use_target(target: Target | None) -> Iterator[None]:
    """Inside, `current_target` is this one (none: that of the process)."""
    token = _current.set(target)
    try:
        yield
    finally:
        _current.reset(token)
