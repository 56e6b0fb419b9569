"""Ranks run the same graphs in the same order: every run of a graph that communicates is checked.

Two graphs may run collectives of equal shapes for different parameters. Ranks that run different
ones of them would exchange parts of different parameters without an error. Each process group
therefore has a sequence of events: runs of graphs, and steps of optimizers.

A rank predicts its next event from the last events of the group. All ranks share the predictions,
because only a vote in which every rank took part adds one. A rank whose next event is the predicted
one continues without asking. A rank whose next event is another one votes first, and so runs
nothing that the others do not run. A rank that follows the prediction meanwhile waits in its first
collective, with the time limit of the votes.

A training loop thus votes during its first steps and when it changes what it runs. After that an
event costs one look-up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.ranks.group_names import name_group
from zpasses.ranks.vote import COMPILE_TIMEOUT, Ballot, GroupState, group_state, vote

__all__ = ["RunEvent", "check_run_event", "forget_events"]

_CONTEXT = 16
"""Number of events by which the next one is predicted."""

_MAX_PREDICTIONS = 1 << 14
"""Predictions of a group that are kept; all ranks reach the limit at the same event."""


@dataclass(frozen=True)
class RunEvent:
    """A run of a graph over a process group, or a step of an optimizer."""

    digest: str
    """Equal for events that every rank may run at the same time."""
    text: str
    """For errors: "graph 0/0 forward (12 collectives, first all_gather of layers.0.weight)"."""

    @classmethod
    def of(cls, text: str, parts: Sequence[str] = ()) -> RunEvent:
        """An event of which `parts` must be equal on all ranks; without parts, the text."""
        digest = hashlib.sha256("\n".join(parts or [text]).encode()).hexdigest()[:16]
        return cls(digest, text)


def check_run_event(
    group: str,
    event: RunEvent,
    timeout_s: float,
    *,
    always_vote: bool = False,
    timeout_option: str = COMPILE_TIMEOUT,
) -> None:
    """Check that every rank of a group, which has other ranks, comes to the same event.

    Args:
        timeout_s: seconds to wait for the other ranks.
        always_vote: vote also where the event was predicted. Windows do, to hear of failures.
        timeout_option: what the user sets to wait longer, for the error.

    Raises:
        AgreementError: when a rank comes to another event, failed, or does not come in time.
    """
    state = group_state(group)
    if always_vote or state.successors.get(state.events) != event.digest:
        _vote(group, state, event, timeout_s, timeout_option)
    state.events = (*state.events, event.digest)[-_CONTEXT:]


def forget_events(group: str) -> None:
    """Predict from nothing, after an event that ranks did not finish together."""
    group_state(group).events = ()


def _vote(
    group: str, state: GroupState, event: RunEvent, timeout_s: float, timeout_option: str
) -> None:
    ranks = compat.group_ranks(group)

    def combine(ballots: Sequence[Ballot]) -> Ballot:
        first = ballots[0]
        for rank, each in zip(ranks, ballots, strict=True):
            if each["digest"] != first["digest"]:
                return {"error": _difference(group, ranks[0], first["text"], rank, each["text"])}
        return {"error": None}

    ballot = {"digest": event.digest, "text": event.text}
    missed = f"come to {event.text}"
    error = vote(
        group,
        "the next graph or optimizer step",
        ballot,
        combine,
        timeout_s,
        missed=missed,
        timeout_option=timeout_option,
    )["error"]
    if error is not None:
        state.events = ()
        raise AgreementError(error)
    if len(state.successors) >= _MAX_PREDICTIONS:
        state.successors.clear()
    state.successors[state.events] = event.digest


def _difference(group: str, rank_a: int, a: str, rank_b: int, b: str) -> str:
    return (
        f"ranks of {name_group(group)} are about to do different things: rank {rank_a} comes to "
        f"{a}, but rank {rank_b} to {b}. Every rank must take the same branches, and run as many "
        "forwards, backwards and optimizer steps as the others. Layers that are skipped at random "
        "must be skipped on every rank alike: with transformers, set the layerdrop values of the "
        "configuration to 0."
    )
