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
from zpasses.runtime.platform import Platform

Answer = dict[str, Any]
"""A rank's answer; "refusal" holds its reason to refuse, or None."""


def attempt(
    group: str,
    question: str,
    work: Callable[[], str | None],
    platform: Platform,
    timeout_s: float,
) -> str | None:
    """Run `work` on every rank, as `run_with_timeout` does. Returns None if it succeeded on all
    ranks of the group, else the first refusal; the same on every rank.

    Raises:
        AgreementError: on every rank, if one of them does not answer within `timeout_s` seconds.
    """
    answer = {"refusal": run_with_timeout(timeout_s, work, platform)}
    return refusal_in(group, exchange(group, question, answer, timeout_s))


def refusal_in(group: str, answers: Sequence[Answer]) -> str | None:
    for rank, answer in zip(compat.group_ranks(group), answers, strict=True):
        if answer["refusal"]:
            return f"rank {rank}: {answer['refusal']}"
    return None


def unavailable_reason(group: str, answers: Sequence[Answer]) -> str | None:
    """Why a route cannot be started for the group: a rank refuses, or the ranks are not different
    devices of one node. None if it can.
    """
    refusal = refusal_in(group, answers)
    if refusal is not None:
        return refusal
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
