"""A pass whose rewrite is a function of the test."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from zpasses import Level, Pass


@dataclass(frozen=True)
class Do(Pass):
    """Runs a function on the graph. It reports the function's number of changes, or one."""

    name: ClassVar[str] = "do"
    level: ClassVar[Level] = Level.JOINT

    what: Any = field(default=None)

    def rewrite(self, graph):
        changes = self.what(graph)
        return 1 if changes is None else changes
