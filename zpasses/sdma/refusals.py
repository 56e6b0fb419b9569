"""Votes by which the ranks of a group decide together, before and after they touch a copy engine.

Ranks can differ in imports, versions, architectures, free memory and the results of an
initialisation. Each rank sends what it sees to all ranks of the group through the store, with a
time limit. Every rank draws the same conclusion from the same answers: if one rank refuses, all
refuse.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from zpasses import compat
from zpasses.ranks.agree import exchange
from zpasses.sdma.platform import Platform

Answer = dict[str, Any]
"""A rank's answer; "refusal" holds its reason to refuse, or None."""


def first_refusal(group: str, question: str, reason: str | None, timeout_s: float) -> str | None:
    """Returns None if no rank of the group refuses, else the first refusal; the same on every rank.

    Raises:
        AgreementError: on every rank, if one of them does not answer within `timeout_s` seconds.
    """
    return refusal_in(group, exchange(group, question, {"refusal": reason}, timeout_s))


def refusal_in(group: str, answers: Sequence[Answer]) -> str | None:
    for rank, answer in zip(compat.group_ranks(group), answers, strict=True):
        if answer["refusal"]:
            return f"rank {rank}: {answer['refusal']}"
    return None


def placement_obstacle(answers: Sequence[Answer]) -> str | None:
    """Why the ranks are not different devices of one node; None if they are."""
    nodes = {answer["node"] for answer in answers}
    if len(nodes) > 1:
        return f"the group spans {len(nodes)} nodes"
    if len({answer["device"] for answer in answers}) < len(answers):
        return "ranks of the group share a device"
    return None


def run_with_timeout(
    timeout_s: float, work: Callable[[], str | None], platform: Platform
) -> str | None:
    """Run `work`, which may hang or fail, in another thread.

    Returns:
        The result of `work`: None, or what went wrong. Also a reason if it raised, or did not
        return after `timeout_s` seconds (the thread then keeps running).
    """
    outcome: list[str | None] = []
    bind = platform.bind_thread()

    def run() -> None:
        try:
            bind()
            outcome.append(work())
        except Exception as error:
            outcome.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="zpasses-sdma", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcome[0] if outcome else f"no result within {timeout_s:g} s"
