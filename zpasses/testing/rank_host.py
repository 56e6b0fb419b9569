"""Where rank processes run their calls: below pytest, if the session that starts them runs pytest.

This module loads no torch, because the pytest plugin imports it in every project.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PytestHost", "current_host", "enter_host", "leave_host"]


@dataclass(frozen=True)
class PytestHost:
    """What a rank needs to import test modules as the session's pytest does."""

    root: str
    """The session's root folder."""
    import_mode: str
    """How pytest imports test modules: "prepend", "append" or "importlib"."""
    python_files: tuple[str, ...]
    """Patterns of the files whose assertions are rewritten."""
    verbosity: int
    """How much of a comparison is shown."""
    traceback: str
    """The style of tracebacks, as in `pytest --tb`."""


_hosts: list[PytestHost] = []


def current_host() -> PytestHost | None:
    """The pytest session that this process runs; None outside pytest."""
    return _hosts[-1] if _hosts else None


def enter_host(host: PytestHost) -> None:
    """A pytest session starts. Sessions may be nested, as in tests of plugins."""
    _hosts.append(host)


def leave_host(host: PytestHost) -> None:
    """A pytest session ends."""
    _hosts.remove(host)
