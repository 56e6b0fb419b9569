"""The outcome of a call on one rank, and the error that shows those of all ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class RanksError(AssertionError):
    """A function failed on at least one rank. The message holds every rank's traceback and output,
    and the stack of ranks that did not finish.
    """


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank."""

    rank: int
    result: Any = None
    """What the function returned."""
    error: str = ""
    """Traceback of the exception; "" if it returned or died."""
    exit_code: int | None = None
    """Exit code of its process, negative for a signal; None if it had to be killed."""
    output: str = ""
    """The end of its output."""
    reported: bool = False
    """Whether it returned or raised; False if it died or hung."""

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.reported and not self.error

    @property
    def timed_out(self) -> bool:
        """Whether the rank had to be killed."""
        return not self.reported and self.exit_code is None

    @property
    def state(self) -> str:
        """What the rank did, in words."""
        if self.ok:
            return "done"
        if self.error:
            return "failed"
        return "did not finish" if self.timed_out else f"died with exit code {self.exit_code}"

    def __str__(self) -> str:
        output = f"\n[its output]\n{self.output}" if self.output else ""
        error = f"\n{self.error}" if self.error else ""
        return f"--- rank {self.rank}: {self.state}{error}{output}"


def describe_failure(name: str, outcomes: Sequence[Outcome], limit_s: float) -> str:
    """The message of a failure: one line that says which ranks failed, then every rank's part."""
    bad = [outcome for outcome in outcomes if not outcome.ok]
    late = all(outcome.timed_out for outcome in bad)
    limit = f" within {limit_s:g} s" if late else ""
    first = ", ".join(f"rank {each.rank} of {len(outcomes)} {each.state}" for each in bad) + limit
    return "\n".join([f"{name}: {first}" if name else first, *map(str, outcomes)])


def without_harness_frames(stacks: str) -> str:
    """Leave out of faulthandler's stacks what every rank runs below a call, and the thread that
    watches the parent; out of C++ stacks the addresses and folders.
    """
    shown: list[str] = []
    stacks = _NATIVE_ADDRESS.sub(r" in \1", stacks)
    for block in re.split(r"^(?=(?:Current t|T)hread 0x)", stacks, flags=re.MULTILINE):
        lines = block.splitlines(keepends=True)
        if re.match(r"(Current t|T)hread 0x", block):
            ours = [at for at, line in enumerate(lines) if _HARNESS in line]
            frames = [at for at, line in enumerate(lines) if line.startswith("  File ")]
            if any("in _end_with_parent" in line for line in lines):
                lines = lines[frames[-1] + 1 :]
            elif ours:
                lines = lines[: ours[0]] + lines[frames[-1] + 1 :]
        shown += lines
    return "".join(shown)


_NATIVE_ADDRESS = re.compile(r" \(0x[0-9a-f]+ in (?:\S*/)?(\S+)\)$", re.MULTILINE)
"""Of a frame as torch prints it: `name + 0x8f (0x7f9203990c4f in /usr/lib/libc10.so)`."""
_HARNESS = os.path.join("zpasses", "testing", "ranks") + os.sep
