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
event costs one look-up. In torch's anomaly mode, ranks vote at each event, because autograd raises
on the ranks alone that have a NaN.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zpasses.ranks.agree import compare
from zpasses.ranks.edit_log import EditLog
from zpasses.ranks.group_texts import name_group
from zpasses.ranks.vote import NOT_ALONE, Ballot, GroupState, group_state

ALIKE = (
    "Run the model, edit its parameters and step its optimizer on every rank alike, and catch an "
    f"error of a step only if it occurs on all ranks. {NOT_ALONE}"
)
"""Advice of errors about ranks that wait for each other."""

ANOMALY = "torch.autograd.detect_anomaly"
_ANOMALY_ALIKE = f"Turn {ANOMALY} on on every rank: in it, ranks vote before each graph."

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
    edits: EditLog,
    always_vote: bool = False,
) -> None:
    """Check that every rank of a group, which has other ranks, comes to the same event.

    Args:
        timeout_s: seconds to wait for the other ranks.
        edits: of parameters since the last event; equal on all ranks, too.
        always_vote: vote also where the event was predicted. Windows do, to hear of failures.

    Raises:
        AgreementError: when a rank comes to another event, failed, or does not come in time.
    """
    state = group_state(group)
    digest = f"{event.digest} {edits.digest}" if edits.count else event.digest
    votes = always_vote or looks_for_nan() or state.successors.get(state.events) != digest
    votes = votes or edits.needs_vote()
    if votes:
        _vote(group, state, event, edits, digest, timeout_s)
    edits.end_event(voted=votes)
    state.events = (*state.events, digest)[-_CONTEXT:]


def looks_for_nan() -> bool:
    """Whether autograd looks for NaN in what each node of a backward returns."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def forget_events(group: str) -> None:
    """Predict from nothing, after an event that ranks did not finish together."""
    group_state(group).events = ()


def _vote(
    group: str,
    state: GroupState,
    event: RunEvent,
    edits: EditLog,
    digest: str,
    timeout_s: float,
) -> None:
    def difference(rank_a: int, a: Ballot, rank_b: int, b: Ballot) -> str | None:
        if a["event"] != b["event"]:
            return _other_events(group, rank_a, a, rank_b, b)
        if (a["digest"], a["values"]) != (b["digest"], b["values"]):
            return _other_edits(group, rank_a, a, rank_b, b)
        return None

    def forget() -> None:
        state.events = ()
        edits.end_event(voted=True)  # all ranks took part; after other errors, all keep theirs

    ballot = {
        "digest": digest,
        "event": event.digest,
        "text": event.text,
        "values": edits.values,
        "edits": edits.told(),
        "count": edits.count,
    }
    missed = f"come to {event.text}{_since_last_time(state, event, edits)}"
    compare(
        group,
        "the next graph or optimizer step",
        ballot,
        difference,
        timeout_s,
        missed=missed,
        advice=f"{ALIKE} {_ANOMALY_ALIKE}" if looks_for_nan() else ALIKE,
        on_difference=forget,
    )
    if len(state.successors) >= _MAX_PREDICTIONS:
        state.successors.clear()
    state.successors[state.events] = digest


def _other_events(group: str, rank_a: int, a: Ballot, rank_b: int, b: Ballot) -> str:
    edits = (
        ""
        if a["edits"] == b["edits"]
        else f"Edits of parameters before it differ: {_first_difference(rank_a, a, rank_b, b)} "
    )
    return (
        f"ranks of {name_group(group)} are about to do different things: rank {rank_a} comes to "
        f"{a['text']}, but rank {rank_b} to {b['text']}. {edits}Every rank must take the same "
        "branches, make the same edits, and run as many forwards, backwards and optimizer steps as "
        f"the others. {NOT_ALONE}"
    )


def _since_last_time(state: GroupState, event: RunEvent, edits: EditLog) -> str:
    """Says what edits came before an event that was expected, if others were."""
    expected = state.successors.get(state.events)
    if expected is None or expected.partition(" ")[0] != event.digest:
        return ""
    told = [what for what, _ in edits.told()]
    more = f" and {edits.count - 3} more" if edits.count > 3 else ""
    which = f": {', '.join(told[:3])}{more}" if told else " (none now)"
    return f" after other edits of parameters than at earlier steps{which}"


def _other_edits(group: str, rank_a: int, a: Ballot, rank_b: int, b: Ballot) -> str:
    """The error about two ranks that come to one event after different edits."""
    return (
        f"ranks of {name_group(group)} come to {a['text']} after different edits of sharded "
        f"parameters. {_first_difference(rank_a, a, rank_b, b)} Edit parameters on every rank "
        "alike: the same operations, with the same values and settings, such as learning rates. "
        "Load the same state on every rank, and catch an error of an optimizer's step only if it "
        "occurs on all ranks."
    )


def _first_difference(rank_a: int, a: Ballot, rank_b: int, b: Ballot) -> str:
    """Says which of the edits of two ranks is the first that differs."""
    first_a, first_b = a["count"] - len(a["edits"]), b["count"] - len(b["edits"])
    pairs = (
        (i, _at(a["edits"], i - first_a), _at(b["edits"], i - first_b))
        for i in range(max(first_a, first_b), max(a["count"], b["count"]))  # the last are known
    )
    different = next((each for each in pairs if each[1] != each[2]), None)
    if different is None:
        return (
            "Arguments or values of earlier edits, or settings of an optimizer, differ between "
            f"rank {rank_a} and rank {rank_b}."
        )
    at, (what_a, _), (what_b, _) = different
    if what_a == what_b:
        return (
            f"Edit {at + 1}, {what_a}, has other arguments or values on rank {rank_b} than on rank "
            f"{rank_a}."
        )
    return f"Edit {at + 1} is {what_a} on rank {rank_a}, but {what_b} on rank {rank_b}."


def _at(edits: Sequence[tuple[str, int]], i: int) -> tuple[str, int]:
    return (edits[i][0], edits[i][1]) if 0 <= i < len(edits) else ("nothing", 0)
