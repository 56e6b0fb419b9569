"""JSON for people and for `grep`: a line per item, down to some depth."""

from __future__ import annotations

import json
from typing import Any

_SHORT = 100
"""Characters of an object or list that stays on one line."""


def json_text(value: Any, levels: int, line: str = "\n") -> str:
    """JSON in which each item has a line, down to a nesting depth of `levels`. What is deeper, or
    short and flat, is one line. All non-ASCII characters are escaped.

    Args:
        line: a line break and the indent of the value.
    """
    is_nested = isinstance(value, (dict, list, tuple)) and bool(value) and levels > 0
    if not is_nested or (len(value) < _SHORT and _is_flat(value)):
        text = json.dumps(value)
        if not is_nested or len(text) <= _SHORT:
            return text
    inner = f"{line} "
    if isinstance(value, dict):
        texts = (json_text(item, levels - 1, inner) for item in value.values())
        items = [f"{json.dumps(str(key))}: {text}" for key, text in zip(value, texts, strict=True)]
        return f"{{{inner}{f',{inner}'.join(items)}{line}}}"
    items = [json_text(item, levels - 1, inner) for item in value]
    return f"[{inner}{f',{inner}'.join(items)}{line}]"


def _is_flat(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return not any(isinstance(item, (dict, list, tuple)) for item in items)
