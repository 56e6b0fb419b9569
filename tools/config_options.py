"""Options of a command line that are the fields of a frozen dataclass.

A field `time_limit_s` is the option --time-limit, and its docstring is the help. Fields of a
dataclass in a field are options, too. Fields without a default are not.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, get_args, get_origin

from zpasses.errors import OptionError
from zpasses.option_values import field_types, parse_value
from zpasses.tools.capture.mesh_shapes import MeshShape
from zpasses.tools.docs.fields import FieldDoc, describe_fields


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """Add the options of a dataclass to a parser."""
    for item in _options(config).values():
        flag = _flag(item.name)
        parser.add_argument(
            flag,
            dest=item.name,
            metavar=flag[2:].upper().replace("-", "_"),
            default=argparse.SUPPRESS,
            help=_help(item),
        )


def config_of(config: type, given: dict[str, Any], **more: Any) -> Any:
    """Make the dataclass of what was parsed.

    Args:
        config: the dataclass.
        given: values by name, as text. Those of the dataclass are taken out of it.
        more: values of fields that are not options.

    Raises:
        OptionError: for text that is no value of the field, and for a number below 1.
    """
    types = field_types(config)
    for name, kind in types.items():
        if name in given:
            more[name] = _value(given.pop(name), kind, _flag(name))
    nested = {name: config_of(kind, given) for name, kind in types.items() if _is_nested(kind)}
    return config(**nested, **more)


def _options(config: type) -> dict[str, FieldDoc]:
    """Name -> field. A field stands for one of the same name in a nested dataclass."""
    nested: dict[str, FieldDoc] = {}
    own = {}
    types = field_types(config)
    for item in describe_fields(config):
        if _is_nested(types[item.name]):
            nested |= _options(types[item.name])
        elif item.default is not dataclasses.MISSING:
            own[item.name] = item
    return {**nested, **own}


def _is_nested(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _flag(field: str) -> str:
    return "--" + field.removesuffix("_s").replace("_", "-")


def _help(item: FieldDoc) -> str:
    default = ",".join(map(str, item.default)) if isinstance(item.default, tuple) else item.default
    text = f"{item.doc} Default: {default}" if default else item.doc
    return text.replace("%", "%%")


def _value(text: str, kind: Any, flag: str) -> Any:
    if get_origin(kind) is tuple:
        return tuple(_value(part, get_args(kind)[0], flag) for part in text.split(","))
    if MeshShape in get_args(kind):
        return MeshShape.parse(text)
    value = parse_value(text, kind, flag)
    if isinstance(value, int | float) and value < 1:
        raise OptionError(f"{flag}: got {text}; expected at least 1.")
    return value
