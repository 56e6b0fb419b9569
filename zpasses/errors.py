"""The exceptions of zpasses. Each message says what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Sequence


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
    """What a step needs does not fit `memory_budget`, `host_memory` or `host_bytes`."""


class OptionError(ValueError):
    """An option, pass or pipeline is unknown, or a value has the wrong type."""


def raising_line(error: BaseException) -> str:
    """Where an exception or its cause was raised: "FILE:LINE in FUNCTION: CODE".

    The innermost line outside of libraries is taken, because that is the line to look at in a pass
    that calls into torch. Returns an empty text if the exception was never raised.
    """
    seen = {id(error)}
    while (
        error.__cause__ is not None
        and id(error.__cause__) not in seen
        and error.__cause__.__traceback__ is not None
    ):
        error = error.__cause__
        seen.add(id(error))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _LIBRARY.search(frame.filename)]
    found = own[-1] if own else frames[-1] if frames else None
    if found is None:
        return ""
    code = f": {found.line}" if found.line else ""
    return f"{found.filename}:{found.lineno} in {found.name}{code}"


_LIBRARY = re.compile(
    r"[/\\](site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]"
    r"|[/\\]zpasses[/\\](graph|pipeline|compat|backend|dumps|ranks|cost)[/\\]|^<"
)


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: ' Did you mean "x"?' if a known name is
    similar, followed by the list of known names.
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    return f"{hint} Known: {', '.join(names)}." if names else hint


def some_of(texts: Sequence[str], most: int = 1) -> str:
    """The first of some texts, and how many there are besides: "a, b and 3 more"."""
    shown = ", ".join(texts[:most])
    return f"{shown} and {len(texts) - most:,} more" if len(texts) > most else shown
