"""What the ranks of a group tell each other before one of them touches a copy engine, and after.

Whatever a rank may see differently (an import, a version, an architecture, free memory, the result
of an initialisation) is told to all ranks of the group, through the store and with a time limit.
Every rank then draws the same conclusion from the same answers: one rank's no is everybody's no.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from zpasses import compat
from zpasses.ranks.vote import exchange
from zpasses.sdma.platform import Platform

__all__ = ["first_refusal", "one_node", "refusal_in", "run_with_timeout"]

Answer = dict[str, Any]
"""A rank's answer; "no" holds its reason to refuse, or None."""


def first_refusal(group: str, question: str, no: str | None, timeout_s: float) -> str | None:
    """None if no rank of the group refuses, else the first refusal; the same on every rank.

    Raises:
        AgreementError: on every rank, when one of them does not answer within `timeout_s` seconds.
    """
    return refusal_in(group, exchange(group, question, {"no": no}, timeout_s))


def refusal_in(group: str, answers: Sequence[Answer]) -> str | None:
    for rank, answer in zip(compat.group_ranks(group), answers, strict=True):
        if answer["no"]:
            return f"rank {rank}: {answer['no']}"
    return None


def one_node(answers: Sequence[Answer]) -> str | None:
    """Why the ranks that answered are not different devices of one node; None if they are."""
    nodes = {answer["node"] for answer in answers}
    if len(nodes) > 1:
        return f"the group spans {len(nodes)} nodes"
    if len({answer["device"] for answer in answers}) < len(answers):
        return "ranks of the group share a device"
    return None


def run_with_timeout(
    timeout_s: float, work: Callable[[], str | None], platform: Platform
) -> str | None:
    """Do something that may hang or fail, in another thread.

    Returns:
        What `work` returns: None, or what went wrong; also if it raised, or has not come back after
        `timeout_s` seconds (the thread is then left behind).
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
    return outcome[0] if outcome else f"nothing came back within {timeout_s:g} s"
