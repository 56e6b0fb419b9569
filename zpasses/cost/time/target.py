"""The hardware that a graph will run on: its figures for the cost model, and its copy-engine
routes.

A target is detected from the process (`Target.detect`) or named:
`Target.parse("mi300x,ranks_per_node=8")`, the environment variable `ZPASSES_TARGET`, or the backend
option `target`. A named target lets a graph be planned for hardware that this machine does not
have. Each figure is a prior from a data sheet or a measurement, given in `source`. Figures are only
used to choose between graphs with equal results, or between one hop and two of encoded gradients.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch

from zpasses import compat
from zpasses.errors import OptionError, suggestion
from zpasses.option_values import field_types, parse_value

ENVIRONMENT_VARIABLE = "ZPASSES_TARGET"
_GIB = 1 << 30


@dataclass(frozen=True)
class Target:
    """One kind of device in one kind of node.

    Bandwidths are in GB/s (10^9 bytes), per rank and in one direction; times are in microseconds.
    """

    name: str
    ranks_per_node: int
    """Devices per node. Collectives of more ranks cross the network."""
    link_gb_s: float
    """Bandwidth to the other devices of the node, over all links together."""
    network_gb_s: float
    """Bandwidth to other nodes."""
    memory_gb_s: float
    """Bandwidth of device memory."""
    tflops: float
    """Dense matmul throughput in 10^12 operations per second, in bf16 (fp32 on CPU)."""
    memory_bytes: int
    """Capacity of device memory."""
    launch_us: float
    """Time from the start of a collective until its first byte moves."""
    hop_us: float
    """Time of each ring step within the node."""
    network_hop_us: float
    """Time of each ring step that crosses the network."""
    kernel_us: float
    """Duration of an empty kernel."""
    source: str = ""
    """Where the figures are from."""
    architecture: str = "cpu"
    """The compiler's name of the device: "gfx942", "gfx950", "sm90", ..., "cpu"."""
    routes: tuple[str, ...] = ()
    """Copy-engine routes that this hardware has ("mori", "nccl_zero", "symm_mem"), the
    preferred one first."""
    issue_us: float = 0.0
    """Time for which the start of a collective keeps the device from computing: that of the host
    on a CPU, 0 where the host runs ahead of the device."""
    host_out_gb_s: float = 20.0
    """Bandwidth of copies to the host while all ranks of a node copy."""
    host_in_gb_s: float = 20.0
    """Bandwidth of copies from the host while all ranks of a node copy."""
    host_alone: float = 2.5
    """How many times faster a rank copies that copies alone. Fewer ranks on a node share what all
    of them have, up to this."""
    host_memory_bytes: int = 256 * _GIB
    """Memory of the host for each rank of a node."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parses a target's name and changes to its figures:
        "mi300x,ranks_per_node=4,link_gb_s=300".

        Raises:
            OptionError: for an unknown name or figure, or a value that is not a positive number.
        """
        name, *changes = [part.strip() for part in text.split(",")]
        if name not in TARGETS:
            raise OptionError(
                f"target {text!r}: unknown target {name!r}.{suggestion(name, TARGETS)}"
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
                    f"figure=value.{suggestion(key.strip(), types)}"
                )
            values[key.strip()] = parse_value(
                value.strip(), types[key.strip()], f"target {name!r}, {key.strip()!r}"
            )
            may_be_zero = key.strip() in ("issue_us", "host_memory_bytes")
            if not values[key.strip()] >= (0 if may_be_zero else math.ulp(0.0)):
                raise OptionError(
                    f"target {text!r}: {key.strip()} must be "
                    f"{'at least' if may_be_zero else 'greater than'} 0, got {value.strip()}."
                )
        return TARGETS[name]._with(values)

    def _with(self, changes: Mapping[str, Any]) -> Target:
        """Returns this target with other figures. With fewer ranks on a node, copies to and from
        the host get a larger share of what all have, unless their figures are given, too.
        """
        changed = dataclasses.replace(self, **changes)
        faster = min(self.ranks_per_node / changed.ranks_per_node, changed.host_alone)
        if faster <= 1:
            return changed
        copies = {key: getattr(self, key) * faster for key in ("host_out_gb_s", "host_in_gb_s")}
        return dataclasses.replace(changed, **(copies | dict(changes)))

    @classmethod
    def detect(cls) -> Target:
        """Returns the target that `ZPASSES_TARGET` names, else the target of this process's device.

        An accelerator without figures in `TARGETS` counts as an H100. A detected target has the
        route mori only where mori is installed, and nccl_zero only where NCCL has it, so that
        nothing is planned for what cannot run.
        """
        named = os.environ.get(ENVIRONMENT_VARIABLE)
        if named:
            return cls.parse(named)
        if not torch.cuda.is_available():
            return TARGETS["cpu"]
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found = target_of(
            properties.name,
            getattr(properties, "gcnArchName", ""),
            properties.multi_processor_count,
            properties.total_memory,
        )
        missing = set()
        if importlib.util.find_spec("mori") is None:
            missing.add("mori")
        if compat.zero_sm_obstacle() is not None:
            missing.add("nccl_zero")
        return found._with(
            {
                "routes": tuple(each for each in found.routes if each not in missing),
                "ranks_per_node": torch.cuda.device_count(),
                "memory_bytes": properties.total_memory,
            }
        )

    def link_share(self, ranks: int) -> float:
        """Returns the share of `link_gb_s` that a group with so many ranks on a node can use.

        AMD's devices have one link to each other device of the node. A group uses those between its
        own ranks. Elsewhere, a switch gives a device all of its bandwidth to any other.
        """
        others = self.ranks_per_node - 1
        if not self.architecture.startswith("gfx") or ranks <= 1 or others < 1:
            return 1.0
        return min(1.0, (ranks - 1) / others)

    def __str__(self) -> str:
        """Text that `parse` reads. It leaves out which routes are installed."""
        base = TARGETS.get(self.name)
        if base is None or base == self:
            return self.name
        own = {key: value for key, value in vars(self).items() if key not in _FIXED}
        changed = {
            key: own[key]
            for key in ("ranks_per_node", "host_alone")
            if own[key] != getattr(base, key)
        }
        follows = base._with(changed)
        changed |= {key: value for key, value in own.items() if value != getattr(follows, key)}
        return ",".join([self.name, *(f"{key}={value}" for key, value in changed.items())])


_FIXED = ("name", "source", "architecture", "routes")
"""Fields that describe the hardware and cannot be changed by `parse`."""


# Latencies are those of a ring over NVLink or Infinity Fabric with NCCL's "simple" protocol: base
# and hop latencies from its tuning constants (src/graph/tuning.cc), which RCCL copied. The network
# is one 400 Gbit/s adapter per device, as in vendors' reference nodes.
# Copies to the host and back are those of eight H200 that copy at once over PCIe 5: 18.5 and 20
# GB/s (DeepSpeed#8255, #8186). A device that copies alone reaches 50. PCIe 4 has half of it.
def _gpu(name: str, architecture: str, source: str, *, gib: int, **figures: Any) -> Target:
    mori = ("mori",) if architecture in ("gfx942", "gfx950") else ()
    usual: dict[str, Any] = {
        "ranks_per_node": 8,
        "network_gb_s": 50.0,
        "launch_us": 8.4,
        "hop_us": 3.4,
        "network_hop_us": 14.0,
        "kernel_us": 5.0,
        "routes": (*mori, "nccl_zero", "symm_mem"),
    }
    return Target(
        name=name,
        memory_bytes=gib * _GIB,
        source=source,
        architecture=architecture,
        **(usual | figures),
    )


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            # Two gloo ranks on a machine with two cores: an exchange of 16 MiB in 6.3 ms, one of 1
            # MiB in 0.4 ms. A launch beside kernels costs about 1 ms: stages 2 and 3 of a narrow
            # model differ by that for each launch more. gloo's threads share the cores with the
            # kernels, so most of it keeps kernels waiting.
            Target(
                name="cpu",
                ranks_per_node=2,
                link_gb_s=1.2,
                network_gb_s=1.2,
                memory_gb_s=5.0,
                tflops=0.1,
                memory_bytes=16 * _GIB,
                launch_us=300.0,
                hop_us=50.0,
                network_hop_us=100.0,
                kernel_us=1.0,
                source="docs/measurements.md",
                issue_us=500.0,
                host_out_gb_s=2.5,
                host_in_gb_s=2.5,
                host_alone=1.0,
                host_memory_bytes=16 * _GIB,
            ),
            _gpu(
                "a100",
                "sm80",
                "NVIDIA A100 80GB SXM data sheet",
                link_gb_s=300.0,
                memory_gb_s=2039.0,
                tflops=312.0,
                gib=80,
                host_out_gb_s=10.0,
                host_in_gb_s=10.0,
                host_memory_bytes=128 * _GIB,
            ),
            # One device and one CPU per module; copies as measured in Megatron-LM#6491.
            _gpu(
                "gh200",
                "sm90",
                "NVIDIA GH200 data sheet",
                link_gb_s=450.0,
                memory_gb_s=4000.0,
                tflops=989.0,
                gib=96,
                host_out_gb_s=170.0,
                host_in_gb_s=411.0,
                host_alone=1.0,
                host_memory_bytes=480 * _GIB,
            ),
            _gpu(
                "h100",
                "sm90",
                "NVIDIA H100 SXM data sheet",
                link_gb_s=450.0,
                memory_gb_s=3350.0,
                tflops=989.0,
                gib=80,
            ),
            _gpu(
                "h200",
                "sm90",
                "NVIDIA H200 SXM data sheet",
                link_gb_s=450.0,
                memory_gb_s=4800.0,
                tflops=989.0,
                gib=141,
            ),
            _gpu(
                "b200",
                "sm100",
                "NVIDIA DGX B200 data sheet, a GPU's share",
                link_gb_s=900.0,
                memory_gb_s=8000.0,
                tflops=2250.0,
                gib=180,
            ),
            # A tray of four, two per CPU; the links reach 72 (ranks_per_node=72). Copies as in
            # Megatron-LM#6491: 169 to 175 in and 182 to 184 out of all at once, 211 of one alone.
            _gpu(
                "gb300",
                "sm103",
                "NVIDIA GB300 NVL72 data sheet, a GPU's share",
                ranks_per_node=4,
                link_gb_s=900.0,
                network_gb_s=100.0,
                memory_gb_s=8000.0,
                tflops=2500.0,
                gib=279,
                host_out_gb_s=183.0,
                host_in_gb_s=172.0,
                host_alone=1.2,
                host_memory_bytes=240 * _GIB,
            ),
            _gpu(
                "mi300x",
                "gfx942",
                "AMD Instinct MI300X data sheet",
                link_gb_s=448.0,
                memory_gb_s=5300.0,
                tflops=1307.0,
                gib=192,
            ),
            # Its device and its host share one memory, so nothing can leave it.
            _gpu(
                "mi300a",
                "gfx942",
                "AMD Instinct MI300A data sheet",
                link_gb_s=384.0,
                memory_gb_s=5300.0,
                tflops=981.0,
                gib=128,
                host_memory_bytes=0,
            ),
            _gpu(
                "mi308x",
                "gfx942",
                "MI300X's figures with 80 of its 304 compute units",
                link_gb_s=448.0,
                memory_gb_s=5300.0,
                tflops=344.0,
                gib=192,
            ),
            _gpu(
                "mi325x",
                "gfx942",
                "AMD Instinct MI325X data sheet",
                link_gb_s=448.0,
                memory_gb_s=6000.0,
                tflops=1307.0,
                gib=256,
            ),
            _gpu(
                "mi355x",
                "gfx950",
                "AMD Instinct MI355X data sheet",
                link_gb_s=538.0,
                memory_gb_s=8000.0,
                tflops=2517.0,
                gib=288,
            ),
        )
    }
)
"""Known targets by name."""


def target_of(
    device: str, architecture: str = "", compute_units: int = 0, memory_bytes: int = 0
) -> Target:
    """Returns the target of a device, from what the device reports; an H100 for an unknown device.

    Args:
        device: its name. AMD devices may report only "AMD Radeon Graphics".
        architecture: such as "gfx942:sramecc+:xnack-"; "" on CUDA.
        compute_units, memory_bytes: distinguish devices of one architecture if the name does not; 0
            if unknown.
    """
    squeezed = device.lower().replace(" ", "").replace("-", "")
    named = [name for name in TARGETS if name != "cpu" and name in squeezed]
    if named:
        return TARGETS[max(named, key=len)]  # "gh200" contains "h200"
    base = architecture.partition(":")[0]
    if base == "gfx942":
        if compute_units in _GFX942_UNITS:
            return TARGETS[_GFX942_UNITS[compute_units]]
        return TARGETS["mi325x" if memory_bytes > 200 * _GIB else "mi300x"]
    return TARGETS["mi355x" if base == "gfx950" else "h100"]


_GFX942_UNITS = {228: "mi300a", 80: "mi308x"}
"""Compute units of gfx942 devices other than MI300X and MI325X, which have 304."""


_current: contextvars.ContextVar[Target | None] = contextvars.ContextVar(
    "zpasses.cost.time.target", default=None
)


def current_target() -> Target:
    """Returns the target of the current compile, or that of this process."""
    return _current.get() or Target.detect()


@contextlib.contextmanager
def use_target(target: Target | None) -> Iterator[None]:
    """Context manager that sets `current_target` to `target`; None selects the process's target."""
    token = _current.set(target)
    try:
        yield
    finally:
        _current.reset(token)
