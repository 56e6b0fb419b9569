"""The fields of a dataclass: name, type, default, and the docstring below each."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from zpasses.option_values import describe_type, field_types, format_value

# A full stop ends a sentence if a capital letter, a quote or a code span follows.
_SENTENCE = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<=\.)\s+(?=[A-Z\"'`])")


@dataclass(frozen=True)
class FieldDoc:
    """One field of a dataclass."""

    name: str
    type: str
    """As a user would say it: "int or none"."""
    default: Any
    """The default value; `dataclasses.MISSING` if a value must be given."""
    doc: str
    """The docstring below the field on one line; "" if there is none, or no source."""

    @property
    def default_text(self) -> str:
        """The default as pipelines write it."""
        required = self.default is dataclasses.MISSING
        return "(required)" if required else format_value(self.default)


def describe_fields(cls: type) -> tuple[FieldDoc, ...]:
    """The fields that the constructor of a dataclass takes, in order."""
    docs, types = _docstrings(cls), field_types(cls)
    fields = dataclasses.fields(cls)
    return tuple(
        FieldDoc(
            field.name, describe_type(types[field.name]), _default(field), docs.get(field.name, "")
        )
        for field in fields
        if field.init
    )


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, without its full stop."""
    return _SENTENCE.split(" ".join(text.split()), maxsplit=1)[0].rstrip(".")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _docstrings(cls: type) -> dict[str, str]:
    """Field -> the string literal below it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, SyntaxError):
        return {}
    (definition,) = tree.body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
        ):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                found[field.target.id] = " ".join(text.split())
    return found
