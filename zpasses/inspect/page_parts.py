"""What several pages of the inspector share: plain values for JSON, and warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zpasses.dumps.format import Prediction, Step
from zpasses.dumps.nodes import Items, Record
from zpasses.inspect.find import SelectedGraph, failure_text
from zpasses.inspect.view import Text, text_of


def to_json_value(value: Any) -> Any:
    """A dump's data as plain values for JSON."""
    kind: Any = type(value)
    if value is None or kind in (str, int, bool):
        return value
    if kind is float:
        return value if math.isfinite(value) else str(value)  # JSON has no infinity and no NaN
    if kind is tuple or kind is list:
        return [to_json_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if kind is Items:
        return to_json_value(value.items)
    if isinstance(value, Record):
        names = zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
        return {shown: to_json_value(getattr(value, name)) for shown, name in names}
    return str(value)


def about_step(each: SelectedGraph, step: Step) -> dict[str, Any]:
    """What a page is about, for JSON."""
    return {
        "rank": each.rank,
        "compile": each.compile.name,
        "graph": each.graph.name,
        "step": step.index,
        "after": step.after,
    }


def unmodelled(each: SelectedGraph, step: Step) -> list[str]:
    """The message for a graph that the memory and cost models do not cover, if it is one."""
    message = (
        f"{each.title} is the graph that Dynamo captured. The memory and cost models start at the "
        "joint graph."
    )
    return [message] if step.level == "captured" else []


def failure_parts(step: Step) -> list[Text]:
    """The warning about a step whose pass failed, if it did."""
    return [text_of(failure_text(step))] if step.error is not None else []


def prediction_of(each: SelectedGraph, step: Step) -> Prediction | None:
    """The prediction, if it is about the graph at this step."""
    found = each.graph.prediction
    return found if found is not None and found.number == step.number else None
