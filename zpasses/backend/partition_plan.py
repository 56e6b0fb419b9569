"""What a partition of a joint graph saves and keeps, and what its step then costs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zpasses.cost.plan.bound import schedule_bound_us
from zpasses.cost.plan.kept_params import KeptParam, Repetition, StepProblem
from zpasses.cost.plan.offloaded_values import SavedValue
from zpasses.graph.loss_chunks import Gradients

Graphs = tuple[fx.GraphModule, fx.GraphModule]
"""Forward and backward."""


@dataclass(frozen=True)
class PartitionPolicy:
    """What a step may keep and recompute."""

    budget: str | None
    """Memory budget of the step, such as "60GiB" or "10%"; None recomputes nothing more."""
    rise: str | None
    """Memory budget of the passes that plan a schedule, within which parameters may be kept if the
    step has none; None keeps only what does not raise the peak."""
    share: float
    """Part of the bytes of the step's sharded parameters that this graph reads, from 0 to 1."""
    keeps: bool
    """Whether full parameters may be kept where backward would gather them again."""
    groups: tuple[str, ...]
    """Process groups whose ranks must partition identically."""
    recompute_elementwise: bool
    repetition: Repetition
    """How often a step runs the graph while parameters do not change."""
    host_bytes: int = 0
    """How many bytes of the host saved values may take on each rank."""
    caches: bool = False
    """Whether gathered parameters stay in memory after the step, as in stages 1 and 2."""
    chunks_loss: Gradients | None = None
    """Where gradients are computed if the loss is computed in chunks; None if it may not be."""


@dataclass(frozen=True)
class Choice:
    """What a partition saves and keeps."""

    activation_budget: float
    """Fraction of the activations that the partitioner is told to save."""
    kept: frozenset[str]
    cached: frozenset[str]
    """Names of the nodes with the full parameters that stay until backward, and throughout the
    step."""
    offloaded: frozenset[str] = frozenset()
    """Names of the saved values that rest on the host."""
    recomputed: frozenset[str] = frozenset()
    """Names of the values that backward computes again, of those that it would find in full
    memory."""
    chunks: int = 1
    """In how many chunks the loss is computed."""
    late: bool = False
    """Whether products run later where that lowers the peak. Without a budget, Inductor fuses
    kernels across products, and orders them by itself."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A partition that keeps no full parameter."""

    activation_budget: float
    """Fraction of the activations that the partitioner was told to save."""
    graphs: Graphs
    step: StepProblem
    offloaded: tuple[SavedValue, ...] = ()
    """What rests on the host from forward to backward."""
    recomputed: frozenset[str] = frozenset()
    """Names of the values that it does not save, of those that the partitioner saves by default.
    """
    chunks: int = 1
    """In how many chunks the loss is computed."""
    saved_share: float = 1.0
    """Fraction of the activations that it saves, of all that the partitioner saves by default."""
    late: bool = True
    """As in `Choice`."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What a step saves and keeps within a memory limit, and an estimate of what it then costs."""

    trial: Trial
    kept: tuple[KeptParam, ...]
    """Full parameters that stay until backward."""
    cached: tuple[KeptParam, ...]
    """Full parameters that stay throughout the step."""
    total_us: float
    """Mean duration of a forward and its backward."""
    peak_bytes: int
    limit_bytes: int
    memory_budget: str | None
    """The limit as the option of passes that plan a schedule; None leaves them their own."""

    @property
    def saved_share(self) -> float:
        """Fraction of the activations that it saves."""
        return self.trial.saved_share

    @property
    def host_bytes(self) -> int:
        """Bytes of saved values on the host."""
        return sum(each.nbytes for each in self.trial.offloaded)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    @property
    def bound_us(self) -> float:
        """The least duration of the step with these parameters kept."""
        return step_bound_us(self.trial.step.keeping(self.kept, self.cached))

    @property
    def choice(self) -> Choice:
        """What the partition depends on."""
        return Choice(
            self.trial.activation_budget,
            frozenset(each.name for each in self.kept),
            frozenset(each.name for each in self.cached),
            frozenset(each.name for each in self.trial.offloaded),
            self.trial.recomputed,
            self.trial.chunks,
            self.trial.late,
        )

    @property
    def rank(self) -> tuple[int, float]:
        """Bytes above the limit, microseconds; lower is better."""
        return max(0, self.peak_bytes - self.limit_bytes), self.total_us


def step_bound_us(step: StepProblem) -> float:
    """Returns what no schedule of a step is faster than, of a forward and its backward."""
    return step.mean_us(schedule_bound_us)
