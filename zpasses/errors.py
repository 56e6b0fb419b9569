"""The exceptions of zpasses. Each message says what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ZpassesError(RuntimeError):
    """Base class of the errors below, except OptionError."""


class ShardingError(ZpassesError):
    """A model cannot be sharded, or an operation on its parameters would silently do nothing."""


class PassError(ZpassesError):
    """A pass failed or left an invalid graph. The message names the pass and, where known, the
    node.
    """


class AgreementError(ZpassesError):
    """Ranks are about to run different collectives, or a rank failed or did not respond in time."""


class MemoryBudgetError(ZpassesError):
    """A step does not fit the option `memory_budget`."""


class OptionError(ValueError):
    """An option, pass or pipeline is unknown, or a value has the wrong type."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: ' Did you mean "x"?' if a known name is
    similar, followed by the list of known names.
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    return f"{hint} Known: {', '.join(names)}." if names else hint
