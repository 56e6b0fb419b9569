"""What zpasses raises. Every message says what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ZpassesError(RuntimeError):
    """Base of the errors below."""


class ShardingError(ZpassesError):
    """A model that cannot be sharded, or a use of its parameters that would silently do nothing."""


class PassError(ZpassesError):
    """A pass left a graph that is not right. The message names the pass and the node."""


class AgreementError(ZpassesError):
    """Ranks were about to run different collectives, or one of them failed."""


class OptionError(ValueError):
    """An option, pass or pipeline that zpasses does not know, or a value of the wrong type."""


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean "x"?' when something near is known, and the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    return f"{hint} Known: {', '.join(names)}." if names else hint
