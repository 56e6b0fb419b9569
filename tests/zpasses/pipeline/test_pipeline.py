import dataclasses
import importlib.metadata
import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.graphs import Param, joint
from zpasses import Level, OptionError, Pass, PassError, Pipeline
from zpasses.option_values import field_types
from zpasses.passes import (
    ZERO3,
    CacheParams,
    GatherParams,
    MergeReads,
    ReduceGrads,
    ReshardAfterForward,
    Schedule,
)
from zpasses.pipeline.pipeline import catalogue
from zpasses.pipeline.runner import run_passes
from zpasses.testing import fake_world, listing, strategies


@dataclass(frozen=True)
class Nothing(Pass):
    """Changes nothing."""

    name: ClassVar[str] = "nothing"
    level: ClassVar[Level] = Level.JOINT

    size: int = 1
    form: Literal["a", "b"] = "a"
    dtype: torch.dtype | None = None

    def rewrite(self, graph):
        return 0


class Broken(Nothing):
    def rewrite(self, graph):
        raise KeyError("mine")


def small():
    return joint([Param((4, 2)), Param((3,))], 0, 2)


# --- text -----------------------------------------------------------------------------------------
def test_text_is_read_as_passes_with_options():
    text = "merge-reads{max_hold_mb=2}, gather-params ,reduce-grads{form=all_reduce}"
    expected = (MergeReads(max_hold_mb=2.0), GatherParams(), ReduceGrads("all_reduce"))
    assert Pipeline.parse(text).passes == expected
    # Only options that differ from their defaults are written.
    assert str(Pipeline(expected)) == text.replace("=2", "=2.0").replace(" ", "")
    assert Pipeline.parse("zero3,cache-params").passes == (*ZERO3.passes, CacheParams())
    assert Pipeline.parse("") == Pipeline.parse("  ") == Pipeline()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gather-param",
            r"no pass is called 'gather-param'. Did you mean \"gather-params\"\? Known: "
            r"average-replicas, cache-params, chunk-loss, defer-reduction, exchange-rows, flatten",
        ),
        ("zebra", r"no pass is called 'zebra'"),
        ("bucket{cap_mb=1},overlap", r"'bucket'. Write 'schedule\{plan=one-ahead,...\}' in place"),
        ("overlap", r"'overlap'. Write .*'schedule\{plan=one-ahead,cap_mb=0\}' in place of"),
        ("zero3-sdma", r"'zero3-sdma'. Write 'zero3', which uses copy engines"),
        (
            "merge-reads{hold=2}",
            r"pass 'merge-reads' has no option 'hold'. Did you mean \"max_hold_mb\"\?",
        ),
        (
            "merge-reads{max_hold_mb=big}",
            r"pass 'merge-reads', option 'max_hold_mb': got 'big' \(str\); expected float or none",
        ),
        ("merge-reads{max_hold_mb=1,max_hold_mb=2}", r"option 'max_hold_mb' is given twice"),
        (
            "zero3,gather-params{encode=int8,block=64}",
            r"'zero3' has the pass 'gather-params' already, which leaves nothing to .*\. Write "
            r"zero3\{gather-params\.encode=int8,gather-params\.block=64\}\.",
        ),
        ("merge-reads{max_hold_mb}", r"cannot parse option 'max_hold_mb'; expected name=value"),
        (
            "zero3{max_hold_mb=1}",
            r"'zero3' is a named pipeline, which has no option 'max_hold_mb'; give options of its "
            r"passes, such as merge-reads.option=value. It is merge-reads\{max_hold_mb=1.0\}",
        ),
        (
            "zero3{sdma.gathers=all}",
            r"which has no option 'sdma.gathers'; give options of its passes",
        ),
        ("zero3{bucket.cap_mb=25}", r"no option 'bucket.cap_mb'.* Write 'schedule\{plan=one-ahead"),
        ("zero3{merge-reads.hold=1}", r"pass 'merge-reads' has no option 'hold'"),
        ("gather-params,", r"cannot parse 'gather-params,'; expected passes separated by commas"),
        (
            "gather-params reshard-after-forward",
            r"cannot parse 'gather-params reshard-after-forward'",
        ),
        ("merge-reads{max_hold_mb=1", r"cannot parse"),
        ("{}", r"cannot parse"),
    ],
)
def test_wrong_text_says_what_is_wrong(text, message):
    with pytest.raises(OptionError, match=message):
        Pipeline.parse(text)


KINDS = [MergeReads, GatherParams, ReduceGrads, ReshardAfterForward, CacheParams, Schedule]


ALONE = {
    GatherParams: {"block": st.none(), "exact_below_kib": st.just(16.0)},
    ReduceGrads: {
        "block": st.none(),
        "exact_below_kib": st.just(16.0),
        "form": st.just("reduce_scatter"),
        "feedback": st.just("off"),
        "hops": st.just("auto"),
    },
    Schedule: {"cap_mb": st.none()},
}
"""Values of options that others exclude."""


@given(
    st.lists(
        st.one_of([strategies.passes(each, **ALONE.get(each, {})) for each in KINDS]), max_size=6
    )
)
def test_random_pipelines_round_trip_through_text(passes):
    pipeline = Pipeline(tuple(passes))
    assert Pipeline.parse(str(pipeline)) == pipeline


# --- discovery ------------------------------------------------------------------------------------
@pytest.fixture
def entry_points(monkeypatch):
    """Installs entry points for one test."""
    catalogue.cache_clear()

    def install(**points):
        made = [
            importlib.metadata.EntryPoint(name.replace("_", "-"), value, "zpasses.passes")
            for name, value in points.items()
        ]
        monkeypatch.setattr("zpasses.pipeline.pipeline.entry_points", lambda group: made)

    yield install
    catalogue.cache_clear()


def test_every_pass_of_the_catalogue_is_found_under_its_name():
    known = catalogue()
    assert {each.name for each in KINDS} <= known.keys()
    assert all(entry.name == name for name, entry in known.items() if isinstance(entry, type))


def test_pass_of_another_package_is_found(entry_points):
    entry_points(nothing=f"{__name__}:Nothing")
    assert Pipeline.parse("nothing{size=3,form=b,dtype=bfloat16}").passes == (
        Nothing(3, "b", torch.bfloat16),
    )


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            {"nothing": "no_such_module:Nothing"},
            "entry point nothing = no_such_module:Nothing .* does not load",
        ),
        ({"nothing": "json:dumps"}, "is neither a Pass class nor a Pipeline"),
        ({"something": f"{__name__}:Nothing"}, "holds the pass called 'nothing'; use one name"),
        ({}, "no entry points in group 'zpasses.passes': install zpasses"),
    ],
)
def test_entry_point_that_is_wrong_is_named(entry_points, points, message):
    entry_points(**points)
    with pytest.raises(OptionError, match=message):
        catalogue()


# --- cache keys -----------------------------------------------------------------------------------
CHANGED = {
    "chunks": 3,
    "gradients": "backward",
    "encode": "fp8",
    "block": 64,
    "exact_below_kib": 1.0,
    "max_hold_mb": 7.0,
    "form": "all_reduce",
    "tier": "host",
    "group": "0",
    "replicated": True,
    "free_bytes": 1,
    "cap_mb": 7.0,
    "mode": "flat",
    "memory_budget": "7MiB",
    "keep": "nothing",
    "reduction_group": "own",
    "plan": "single",
    "copy_engines": "on",
    "part": "average",
    "gathers": "all",
    "rows": "on",
    "feedback": "on",
    "hops": "two",
}


@pytest.mark.parametrize(
    "cls",
    [entry for entry in catalogue().values() if isinstance(entry, type)],
    ids=lambda cls: cls.name,
)
def test_uuid_changes_with_every_option(cls):
    for option in field_types(cls):
        encodes = {"encode": "int8"}
        needs = {
            "block": encodes,
            "exact_below_kib": encodes,
            "feedback": encodes,
            "hops": encodes,
            "cap_mb": {"plan": "single"},
        }
        needs = needs.get(option, {})
        changed = dataclasses.replace(cls(), **{option: CHANGED[option], **needs})
        assert cls(**needs).uuid() != changed.uuid(), option


def test_uuids_of_passes_differ_and_stay():
    everything = [*(each() for each in KINDS), Nothing(), Nothing(2), Nothing(form="b")]
    assert len({each.uuid() for each in everything}) == len(everything)
    assert Nothing(2).uuid() == Nothing(2).uuid()


def test_uuid_changes_with_the_source_of_the_pass(tmp_path, monkeypatch):
    source = f"from {__name__} import Nothing\nclass Mine(Nothing):\n    name = 'mine'\n"
    uuids = []
    for i, text in enumerate((source, source + "# another\n")):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "zpasses_test_mine.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))
        sys.modules.pop("zpasses_test_mine", None)
        uuids.append(__import__("zpasses_test_mine").Mine().uuid())
    sys.modules.pop("zpasses_test_mine", None)
    assert uuids[0] != uuids[1]


def test_uuid_changes_with_the_source_of_zpasses_and_the_backends_of_groups(monkeypatch):
    before = GatherParams().uuid()
    with fake_world(2):
        assert GatherParams().uuid() != before
    monkeypatch.setattr("zpasses.pipeline.base_pass.package_digest", lambda: "another")
    assert GatherParams().uuid() != before


def test_uuid_of_a_pipeline_changes_with_its_passes_and_their_order():
    first, second = GatherParams(), ReshardAfterForward()
    several = [(), (first, second), (second, first), (first,)]
    assert len({Pipeline(each).uuid() for each in several}) == 4


# --- running --------------------------------------------------------------------------------------
def test_pipeline_and_pass_can_be_called_on_a_graph():
    with fake_world(2):
        by_pipeline, one_by_one = small(), small()
        Pipeline.parse("gather-params,reshard-after-forward")(by_pipeline.graph)
        GatherParams()(one_by_one.graph)
        ReshardAfterForward()(one_by_one.graph)
    assert listing(by_pipeline) == listing(one_by_one)
    assert "all_gather_into_tensor" in listing(by_pipeline)


def test_passes_are_taken_by_level():
    pipeline = Pipeline((CacheParams(), GatherParams(), ReshardAfterForward()))
    assert pipeline.at(Level.FORWARD) == (CacheParams(),)
    assert pipeline.at(Level.JOINT) == (GatherParams(), ReshardAfterForward())
    assert pipeline.at(Level.BACKWARD) == ()


class Nameless(Pass):
    level = Level.JOINT

    def rewrite(self, graph):
        return 0


class Unplaced(Nameless):
    name, level = "unplaced", None


class Voting(Nameless):
    name = "voting"

    def votes(self):
        return True


class Unsimulatable(Nothing):
    name = "unsimulatable"
    simulatable = False


class Budgeted(Nothing):
    name = "budgeted"

    def with_memory_budget(self, budget):
        return self


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("schedule", r"got 'schedule' \(str\); expected instances of Pass"),
        (GatherParams, r"got .*GatherParams.*\(ABCMeta\); expected instances of Pass"),
        (Nameless(), "pass class Nameless has no name"),
        (Voting(), r"class Voting has an attribute 'votes', .* facts = Facts\(votes=...\)"),
        (Budgeted(), r"attribute 'with_memory_budget', .* facts = Facts\(plans_within=...\)"),
        (Unsimulatable(), r"attribute 'simulatable', .* facts = Facts\(simulatable=...\)"),
        (Unplaced(), "pass unplaced has no level, .* set Unplaced.level to one of Level.CAPTURED"),
    ],
)
def test_what_is_no_complete_pass_is_refused(wrong, message):
    with pytest.raises(OptionError, match=message):
        Pipeline((GatherParams(), wrong))


def test_every_pass_leaves_a_record_and_is_observed():
    seen = []

    def observe(record, graph):
        seen.append((record.name, len(graph.nodes)))

    with fake_world(2):
        gm = small()
        nothing, gather = run_passes(gm.graph, [Nothing(3), GatherParams()], observe=observe)
    assert (nothing.name, nothing.text, nothing.changes) == ("nothing", "nothing{size=3}", 0)
    assert nothing.nodes_before == nothing.nodes_after == gather.nodes_before
    assert (gather.changes, gather.nodes_after) == (2, len(gm.graph.nodes))
    assert (gather.collectives_before, gather.collectives_after) == (4, 4)
    # An all-gather's input is this rank's rows, whether lowered or not.
    assert gather.bytes_before == gather.bytes_after == (16 + 8) + (32 + 12)
    assert gather.time_us > 0
    assert gather.check_us > 0
    assert seen == [("nothing", nothing.nodes_after), ("gather-params", gather.nodes_after)]


def test_pass_that_raises_is_named_with_its_options():
    with (
        fake_world(2),
        pytest.raises(PassError, match=r"pass 'nothing\{size=2\}' failed: KeyError: 'mine'"),
    ):
        Broken(2)(small().graph)


def test_a_named_pipeline_takes_options_of_its_passes():
    changes = "merge-reads.max_hold_mb=2,schedule.cap_mb=3,schedule.plan=single"
    given = Pipeline.parse(f"zero3{{{changes}}},sdma")
    assert given.passes[0] == MergeReads(max_hold_mb=2.0)
    assert given.passes[5] == Schedule("single", cap_mb=3.0)
    plain = Pipeline.parse("zero3,sdma")
    assert [type(each) for each in given] == [type(each) for each in plain]
    assert Pipeline.parse(str(given)) == given
