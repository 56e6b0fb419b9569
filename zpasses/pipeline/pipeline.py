"""Pipelines: passes in order, their text, and the registry of installed passes."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from importlib.metadata import entry_points
from typing import Any, cast

from torch import fx

from zpasses import compat
from zpasses.errors import OptionError, suggestion
from zpasses.option_values import build_dataclass
from zpasses.pipeline.base_pass import Level, Pass, vote_key_suffix
from zpasses.pipeline.facts import Facts
from zpasses.pipeline.runner import run_passes

_FACT_OF = {
    "is_cacheable": "cacheable",
    "is_simulatable": "simulatable",
    "with_memory_budget": "plans_within",
}

_FACTS = (
    *(field.name for field in fields(Facts)),
    *_FACT_OF,
)
"""What a pass class must not have as attributes, because nothing reads them there."""


@dataclass(frozen=True)
class Pipeline(compat.CustomGraphPass):
    """Passes in the order in which they run; as text, `merge-reads,reduce-grads{form=all_reduce}`.
    A named pipeline takes options of its passes: `zero3{gather-params.encode=int8}`.

    Calling a pipeline on a graph runs all its passes on that graph, regardless of level. The
    backend runs each pass at its own level.

    Raises:
        OptionError: for something that is no pass, or a pass class without a name or level,
            or with a fact outside of its attribute `facts`.
    """

    passes: tuple[Pass, ...] = ()

    def __post_init__(self) -> None:
        for each in self.passes:
            if not isinstance(each, Pass):
                raise OptionError(
                    f"pipeline: got {each!r} ({type(each).__name__}); expected instances of Pass, "
                    "such as GatherParams()."
                )
            kind = type(each)
            if not isinstance(getattr(kind, "name", None), str):
                raise OptionError(
                    f"pass class {kind.__name__} has no name; give it one in kebab-case: "
                    'name = "my-pass".'
                )
            if not isinstance(getattr(kind, "level", None), Level):
                levels = ", ".join(f"Level.{level.name}" for level in Level)
                raise OptionError(
                    f"pass {each.name} has no level, which says what graph it rewrites; set "
                    f"{kind.__name__}.level to one of {levels}."
                )
            for name in _FACTS:
                if hasattr(kind, name):
                    raise OptionError(
                        f"pass class {kind.__name__} has an attribute {name!r}, which is read from "
                        f"its facts: facts = Facts({_FACT_OF.get(name, name)}=...)."
                    )

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """Parse pipeline text. A named pipeline in it stands for its passes.

        Raises:
            OptionError: for an unknown pass or option, or a value of the wrong type. The message
                suggests the most similar known name. Also for a pass that changes values after a
                named pipeline that has this pass, which has left nothing to change.
        """
        known = catalogue()
        passes: list[Pass] = []
        named: dict[str, str] = {}  # pass -> the first named pipeline that has it
        for name, options in _parse_items(text):
            entry = known.get(name)
            if entry is None:
                raise OptionError(f"pipeline {text!r}: {unknown_pass(name)}")
            if isinstance(entry, Pipeline):
                passes.extend(_with_options(entry, options, f"pipeline {text!r}: {name!r}"))
                named = {each.name: name for each in entry} | named
            else:
                made = build_dataclass(entry, options, f"pass {name!r}")
                if name in named and made.facts.changes_values is not None:
                    given = ",".join(f"{name}.{key}={value}" for key, value in options.items())
                    raise OptionError(
                        f"pipeline {text!r}: {named[name]!r} has the pass {name!r} already, which "
                        f"leaves nothing to {made}. Write {named[name]}{{{given}}}."
                    )
                passes.append(made)
        return cls(tuple(passes))

    def at(self, level: Level) -> tuple[Pass, ...]:
        """Return the passes that run at one level, in order.

        `FORWARD` and `BACKWARD` include the passes of level `PARTITIONED`.
        """
        both = Level.PARTITIONED if level in (Level.FORWARD, Level.BACKWARD) else level
        return tuple(each for each in self.passes if each.level in (level, both))

    def with_memory_budget(self, budget: str) -> Pipeline:
        """Return the pipeline for a memory budget of the step, such as "60GiB" or "10%": passes
        that plan a schedule get it as their option `memory_budget`.
        """
        passes = (
            replace(cast(Any, each), memory_budget=budget)
            if each.facts.plans_within is not None
            else each
            for each in self.passes
        )
        return Pipeline(tuple(passes))

    @property
    def memory_budget(self) -> str | None:
        """The memory budget of the passes that plan a schedule, if they have the same."""
        budgets = {each.facts.plans_within for each in self.passes} - {None}
        return budgets.pop() if len(budgets) == 1 else None

    @property
    def uses_engines(self) -> bool:
        """Whether copy engines may run collectives of the graphs, on the current target."""
        return any(each.facts.uses_engines for each in self.passes)

    def changes_values(self, graph: fx.Graph) -> None:
        """Rewrite the dialect of a graph to what the passes make of its values, if they change any;
        see `Facts.changes_values`.
        """
        for each in self.passes:
            if (change := each.facts.changes_values) is not None:
                change(graph)

    def __call__(self, graph: fx.Graph) -> None:
        run_passes(graph, self.passes)

    def uuid(self) -> str:
        """Return the pipeline's part of the key of Inductor's compile caches; see `Pass.uuid`."""
        return self.digest() + vote_key_suffix(self.passes)

    def digest(self) -> str:
        """Return a hash of everything that determines the passes.

        The backend uses it as the key, because it runs its passes before any cache lookup.
        """
        return hashlib.sha256("|".join(each.digest() for each in self.passes).encode()).hexdigest()

    def __str__(self) -> str:
        return ",".join(str(each) for each in self.passes)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)


def _with_options(named: Pipeline, options: dict[str, str], where: str) -> list[Pass]:
    """The passes of a named pipeline with options such as `gather-params.encode`."""
    of_pass: dict[str, dict[str, Any]] = {}
    for key, value in options.items():
        name, _, option = key.partition(".")
        if not option or name not in [each.name for each in named]:
            raise OptionError(
                f"{where} is a named pipeline, which has no option {key!r}; give options of its "
                f"passes, such as {named.passes[0].name}.option=value. It is {named}."
                f"{_advice(name)}"
            )
        of_pass.setdefault(name, {})[option] = value
    changed = []
    for each in named:
        given = {field.name: getattr(each, field.name) for field in fields(each) if field.init}  # type: ignore[arg-type]
        given |= of_pass.get(each.name, {})
        changed.append(build_dataclass(type(each), given, f"pass {each.name!r}"))
    return changed


# --- text -----------------------------------------------------------------------------------------
_ITEM = re.compile(r"\s*(?P<name>[A-Za-z][\w-]*)\s*(?:\{(?P<options>[^{}]*)\})?\s*(?P<end>,|$)")
_OPTION = re.compile(r"\s*(?P<key>(?:[a-z][a-z0-9-]*\.)?[A-Za-z_]\w*)\s*=\s*(?P<value>[^,=]*?)\s*$")


def _parse_items(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Parse `a,b{x=1,y=2}` into ("a", {}) and ("b", {"x": "1", "y": "2"})."""
    position = 0
    while position < len(text.rstrip()):
        match = _ITEM.match(text, position)
        if match is None or (match["end"] and not text[match.end() :].strip()):
            raise OptionError(
                f"pipeline {text!r}: cannot parse {text[position:].strip()!r}; expected passes "
                "separated by commas with options in braces, such as "
                "merge-reads,reduce-grads{form=all_reduce}. A named pipeline takes options of its "
                "passes with a dot, such as zero3{reduce-grads.encode=int8}."
            )
        yield match["name"], _options(text, match["options"])
        position = match.end()


def _options(text: str, inside: str | None) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in (inside or "").split(",") if (inside or "").strip() else []:
        match = _OPTION.match(part)
        if match is None:
            raise OptionError(
                f"pipeline {text!r}: cannot parse option {part.strip()!r}; expected name=value."
            )
        if match["key"] in options:
            raise OptionError(f"pipeline {text!r}: option {match['key']!r} is given twice.")
        options[match["key"]] = match["value"]
    return options


_REMOVED = {
    "bucket": "Write 'schedule{plan=one-ahead,...}' in place of 'bucket{...},overlap', and "
    "'schedule{plan=single,...}' in place of 'bucket{...}' alone. plan_for_overlap is gone.",
    "overlap": "Write 'schedule{plan=one-ahead,...}' in place of 'bucket{...},overlap', and "
    "'schedule{plan=one-ahead,cap_mb=0}' in place of 'overlap' alone.",
    **{
        f"{stage}-sdma": f"Write {stage!r}, which uses copy engines where the target has them."
        for stage in ("zero1", "zero2", "zero3")
    },
}
"""Passes and named pipelines that `schedule` and `zero3` replaced -> what to write."""


def unknown_pass(name: str) -> str:
    """The end of an error message about a name that the catalogue does not have."""
    return f"no pass is called {name!r}.{_advice(name) or suggestion(name, catalogue())}"


def _advice(name: str) -> str:
    return f" {_REMOVED[name]}" if name in _REMOVED else ""


# --- discovery ------------------------------------------------------------------------------------
_GROUP = "zpasses.passes"


@functools.cache
def catalogue() -> dict[str, type[Pass] | Pipeline]:
    """Return every installed pass and named pipeline by name, from the entry-point group
    `zpasses.passes`.

    Raises:
        OptionError: if an entry point does not load, is neither a pass nor a pipeline, or has
            another name than its pass; or if there are no entry points.
    """
    found: dict[str, type[Pass] | Pipeline] = {}
    for point in entry_points(group=_GROUP):
        try:
            entry = point.load()
        except Exception as error:
            raise OptionError(
                f"entry point {point.name} = {point.value} in group {_GROUP!r} does not load: "
                f"{error}"
            ) from error
        if not (
            isinstance(entry, Pipeline) or (isinstance(entry, type) and issubclass(entry, Pass))
        ):
            raise OptionError(
                f"entry point {point.name} = {point.value} is neither a Pass class nor a Pipeline."
            )
        if isinstance(entry, type) and entry.name != point.name:
            raise OptionError(
                f"entry point {point.name} = {point.value} holds the pass called {entry.name!r}; "
                "use one name."
            )
        found[point.name] = entry
    if not found:
        raise OptionError(
            f"no entry points in group {_GROUP!r}: install zpasses (pip install -e .) so that its "
            "passes can be found."
        )
    return found
