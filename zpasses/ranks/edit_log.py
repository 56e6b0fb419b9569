"""What ranks compare of edits of parameters: a number that depends on all edits and their order,
equal on all ranks, and the last edits in words, for errors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

_MOST_TOLD = 64
_STEPS_PER_VOTE = 100


@dataclass(slots=True)
class EditLog:
    """The edits of the parameters of one process group since its last event."""

    count: int = 0
    digest: int = 0
    """Depends on the parameters and operations, which are the same in each step of a training."""
    values: int = 0
    """Depends on the arguments, too, since the last vote. Learning rates change in each step."""
    steps: int = 0
    """Steps of optimizers since the last vote."""
    last: deque[tuple[str, str, int]] = field(default_factory=lambda: deque(maxlen=_MOST_TOLD))
    """Parameter, operation and value of the last edits."""

    def add(self, param: str, what: str, number: int, value: int) -> None:
        """Args:
        param: "" if the edit is one of many parameters.
        what: for errors.
        number: of the parameter and the operation, equal on all ranks.
        value: of the arguments, equal on all ranks.
        """
        self.count += 1
        self.digest = hash((self.digest, number))  # of integers: equal in all processes
        self.values = hash((self.values, value))
        self.last.append((param, what, value))

    def add_step(self, what: str, number: int, settings: int) -> None:
        self.steps += 1
        self.add("", what, number, settings)

    def copy(self) -> EditLog:
        return replace(self, last=self.last.copy())

    def return_to(self, earlier: EditLog) -> None:
        """Forget what was added since a copy was made, if no event was in between."""
        self.count, self.steps, self.last = earlier.count, earlier.steps, earlier.last.copy()
        self.digest, self.values = earlier.digest, earlier.values

    def needs_vote(self) -> bool:
        """Whether arguments have not been compared for long."""
        return self.steps >= _STEPS_PER_VOTE

    def told(self) -> list[tuple[str, int]]:
        """The last edits in words, "mul_ of parameter 'layers.0.weight'", with their values."""
        return [
            (f"{what} of parameter {param.partition(':')[2]!r}" if param else what, value)
            for param, what, value in self.last
        ]

    def end_event(self, *, voted: bool) -> None:
        """Called after each event of the group."""
        if self.count:
            self.count, self.digest = 0, 0
            self.last.clear()
        if voted:
            self.values = self.steps = 0
