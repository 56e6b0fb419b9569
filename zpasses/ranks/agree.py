"""Ranks compare what they do, and decide identically what each of them plans by itself."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from zpasses import compat
from zpasses.errors import AgreementError
from zpasses.ranks.vote import Ballot, group_state, has_other_ranks, vote


def exchange(
    group: str,
    question: str,
    mine: Any,
    timeout_s: float | None = None,
    *,
    remember: str | None = None,
    merge: Callable[[Sequence[Any]], Any] = list,
) -> Any:
    """Every rank of a group tells the first its answer, so that all of them choose identically.

    Args:
        group: name of the process group. Where it has no other ranks (or is a fake one), this
            rank's answer is the only one.
        question: what is asked; it must be the same on all ranks.
        mine: this rank's answer, of plain JSON values.
        timeout_s: seconds to wait for the other ranks; None takes the limit of the compile.
        remember: a key. If something was asked under it before, the earlier result is returned. A
            rank may then repeat a compile that no other rank repeats.
        merge: what every rank gets of all answers, which are in the order of the group's ranks: a
            plain JSON value. It must not raise. The default takes them all, which each rank then
            reads: only for groups within a node.

    Returns:
        What `merge` makes of the answers on the group's first rank; the same on every rank.

    Raises:
        AgreementError: on every rank, when one of them asks something else, failed, or does not
            answer in time.
    """
    if not has_other_ranks(group):
        shared = _simulated_answers.get()
        if shared is None or remember is None:
            return merge([mine])
        return merge([shared.setdefault((group, remember), mine)])
    state = group_state(group)
    if remember is not None and remember in state.answers:
        return _recorded(group, remember, state.answers[remember])

    def combine(ballots: Sequence[Ballot]) -> Ballot:
        return {"merged": merge([each["answer"] for each in ballots])}

    merged = vote(group, question, {"answer": mine}, combine, timeout_s)["merged"]
    if remember is not None:
        state.answers[remember] = merged
        _recorded(group, remember, merged)
    return merged


def first_two(answers: Sequence[Any]) -> list[tuple[int, Any]]:
    """A `merge` that tells whether all answers are equal.

    Returns:
        The first answer and the first other one, if there is one, each with its place.
    """
    other = next((at for at, each in enumerate(answers) if each != answers[0]), 0)
    return [(at, answers[at]) for at in sorted({0, other})]


Difference = Callable[[int, Ballot, int, Ballot], str | None]
"""Returns the error about two ranks and what they said, or None if these agree."""


def compare(
    group: str,
    occasion: str,
    mine: Ballot,
    difference: Difference,
    timeout_s: float | None = None,
    *,
    on_difference: Callable[[], None] = lambda: None,
    **texts: str,
) -> None:
    """Compare what the ranks of a group say with what its first rank says.

    Args:
        group, occasion, timeout_s: as for `vote`.
        mine: what this rank says.
        difference: must not raise; it runs on the first rank only, in the order of the ranks.
        on_difference: called on every rank if two differ, but not after other errors of the vote.
        texts: `missed` and `advice` of `vote`.

    Raises:
        AgreementError: on every rank, if two differ, or as `vote` does.
    """

    def combine(ballots: Sequence[Ballot]) -> Ballot:
        ranks = compat.group_ranks(group)
        for rank, each in zip(ranks, ballots, strict=True):
            if each is ballots[0]:
                continue
            error = difference(ranks[0], ballots[0], rank, each)
            if error is not None:
                return {"error": error}
        return {"error": None}

    text = vote(group, occasion, mine, combine, timeout_s, **texts)["error"]
    if text is not None:
        on_difference()
        error = AgreementError(text)
        error._zpasses_group = group  # type: ignore[attr-defined]
        raise error


def adopt(
    groups: Iterable[str],
    question: str,
    signature: Any,
    mine: Any,
    *,
    planned_for: Any = None,
    merge: Callable[[Sequence[Any]], Any] = lambda plans: plans[0],
) -> tuple[Any, list[str]]:
    """Returns the plan that all ranks take, and the groups whose ranks all have this signature.

    A plan depends on shapes, and ranks may have different shapes. A rank may also recompile when
    the other ranks do not. The same signature therefore always gets the same plan, as long as
    `planned_for` and the model of `planning_for` are the same.

    Args:
        groups: names of process groups. Each passes on to the next what it adopts, so ranks of
            several groups end with the plan of one rank.
        question: what is planned; it must be the same on all ranks.
        signature: what the plan is about, equal on all ranks and independent of shapes. It has an
            equal `repr` wherever it is equal, and contains no name of a group: these differ between
            the replicas of hybrid sharding.
        mine: this rank's plan, of plain JSON values.
        planned_for: what else the plan depends on, such as the target.
        merge: makes one plan of those of all ranks, in group order. The default takes the first.

    Raises:
        AgreementError: on every rank, when one of them asks something else, failed, or does not
            answer in time.
    """
    key = _hash(question, signature)
    remember = _hash(key, planned_for, _model.get())
    shared = []

    def adopted(answers: Sequence[Any]) -> Any:
        if any(theirs != answers[0][0] for theirs, _ in answers):
            return None
        return [answers[0][0], merge([plan for _, plan in answers])]

    for group in groups:
        found = exchange(group, question, [key, mine], remember=remember, merge=adopted)
        # Where another rank has other collectives, the comparison of collectives reports it later.
        if found is not None and found[0] == key:
            mine = found[1]
            shared.append(group)
    return mine, shared


_model: contextvars.ContextVar[Any] = contextvars.ContextVar("zpasses.planned_model", default=None)


@contextlib.contextmanager
def planning_for(model: Any) -> Iterator[None]:
    """Context of the plans for a model. Other models get plans of their own, although the sizes of
    their parameters may be equal.

    Args:
        model: what tells models apart, with an equal `repr` on all ranks.
    """
    token = _model.set(model)
    try:
        yield
    finally:
        _model.reset(token)


def _hash(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


# --- remembered answers ---------------------------------------------------------------------------
Answers = dict[tuple[str, str], Any]
"""(Process group, key under which an answer is remembered) -> what its ranks got of all answers."""

_recorders: contextvars.ContextVar[tuple[Answers, ...]] = contextvars.ContextVar(
    "zpasses.recorded_answers", default=()
)


@contextlib.contextmanager
def recorded_answers(into: Answers) -> Iterator[None]:
    """Inside, remembered answers that are asked for are also stored in `into`."""
    token = _recorders.set((*_recorders.get(), into))
    try:
        yield
    finally:
        _recorders.reset(token)


def _recorded(group: str, remember: str, answers: Any) -> Any:
    for each in _recorders.get():
        each[group, remember] = answers
    return answers


def restore_answers(answers: Answers) -> None:
    """Remember answers that these ranks gave in an earlier process.

    All ranks of a group must restore the same ones.
    """
    for (group, remember), each in answers.items():
        group_state(group).answers[remember] = each


def is_remembered(group: str, remember: str) -> bool:
    """Whether a question was asked under this key on a group that has other ranks."""
    return has_other_ranks(group) and remember in group_state(group).answers


def forget_answer(group: str, remember: str) -> None:
    """Forget an answer on which nothing could be built. All ranks of the group must do so."""
    if has_other_ranks(group):
        group_state(group).answers.pop(remember, None)


def are_remembered(answers: Answers) -> bool:
    """Whether all of these answers are remembered in this process."""
    return all(
        group_state(group).answers.get(remember) == each
        for (group, remember), each in answers.items()
    )


_simulated_answers: contextvars.ContextVar[dict[tuple[str, str], Any] | None] = (
    contextvars.ContextVar("zpasses.simulated_answers", default=None)
)


@contextlib.contextmanager
def simulated_answers() -> Iterator[None]:
    """Inside, the ranks that one process plays in turn share the answers to remembered questions:
    those of the rank that was asked first. Real ranks adopt the answer of their group's first rank.
    """
    token = _simulated_answers.set({})
    try:
        yield
    finally:
        _simulated_answers.reset(token)
