"""Tests of the inspector's pages and figures."""

import expecttest
import pytest

from tests.zpasses.inspect.graphs import (
    chain,
    dump_of,
    gather,
    graph_of,
    node,
    output,
    placeholder,
    replace,
    small_dump,
    snapshot,
    two_gathers,
    two_groups,
    wait,
)
from zpasses.dumps.format import Counts, Failure, Prediction
from zpasses.dumps.nodes import Buffer, Collective, Source
from zpasses.inspect import (
    Inspection,
    NodeFilter,
    NotInDumpError,
    communication,
    compare,
    listing,
    memory,
    schedule,
)
from zpasses.inspect.overview_page import prediction_bar
from zpasses.inspect.report.payload import payload


def expect(view, text):
    expecttest.assert_expected_inline(str(view), text, skip=1)


# --- pages ----------------------------------------------------------------------------------------
def test_overview_lists_graphs_and_passes():
    expect(
        Inspection(small_dump()).overview(),
        """\
dump: zpasses 0.1.0, torch 2.13.0, world size 2

Rank 0, the only one in the dump.

Compile 0/0 (000-0_0): done, codegen eager, target cpu
pipeline: overlap

graph      step  after               rewrites    nodes    collectives    input bytes    pass    checks  notes
-------  ------  ----------------  ----------  -------  -------------  -------------  ------  --------  -------
forward       0  -                                  10              2           64 B
              1  bucket{cap_mb=0}           0       10              2           64 B  1.5 ms    250 us
              2  overlap                    1       10              2           64 B  1.5 ms    250 us""",  # noqa: E501
    )


def test_overview_shows_a_failed_pass():
    failure = Failure("ValueError", "no such group", "sdma")
    dump = dump_of(
        graph_of("joint", (None, chain(3)), ("sdma", None), error=failure), error=failure
    )
    expect(
        Inspection(dump).overview(),
        """\
dump: zpasses 0.1.0, torch 2.13.0, world size 2

Rank 0, the only one in the dump.

Compile 0/0 (000-0_0): failed, codegen eager, target cpu
pipeline: overlap

graph      step  after      rewrites     nodes    collectives    input bytes    pass    checks  notes
-------  ------  -------  ----------  --------  -------------  -------------  ------  --------  ------------------
joint         0  -                           4              0            0 B
              1  sdma                 4 before       0 before                                   FAILED: ValueError

FAILED in sdma: ValueError: no such group""",  # noqa: E501
    )


def test_show_names_shapes_bytes_and_parameters():
    expect(
        Inspection(small_dump()).show("forward"),
        """\
# 0/0 forward, after overlap: 10 nodes; peak 320 B
x: f32[4, 4]                                        # 64 B
w_shard: f32[4, 4]                                  # 64 B; shard: w
v_shard: f32[4, 4]                                  # 64 B; shard: v
gather_w = all_gather_into_tensor(w_shard, 2, '0')  # f32[4, 4] 64 B; gather: w
w = wait_tensor(gather_w)                           # f32[4, 4] 64 B; full: w
gather_v = all_gather_into_tensor(v_shard, 2, '0')  # f32[4, 4] 64 B; gather: v
mm = mm(x, w)                                       # f32[4, 4] 64 B
v = wait_tensor(gather_v)                           # f32[4, 4] 64 B; full: v
mm_1 = mm(mm, v)                                    # f32[4, 4] 64 B
return [mm_1]""",
    )


def test_difference_of_a_pass():
    expect(
        Inspection(small_dump()).diff("forward", "overlap"),
        """\
graph                       figure         before    after    change
--------------------------  -----------  --------  -------  --------
0/0 forward, after overlap  time            36 us    28 us    -22.2%
                            exposed         20 us    12 us    -40.0%
                            peak            256 B    320 B    +25.0%
                            collectives         2        2         =
                            nodes              10       10         =

0/0 forward, after overlap: 1 moved

0/0 forward, after overlap, what is alive at the peaks: parameter 128 B -> 256 B, activation 128 B -> 64 B

at peak    allocated by    kind          bytes  parameters
---------  --------------  ----------  -------  ------------
new        gather_w        parameter     128 B  w
gone       mm_1            activation     64 B

0/0 forward, after overlap:
> moved gather_v: after w (-1)""",  # noqa: E501
    )


def test_difference_groups_what_moved_together():
    before = chain(8)
    nodes = list(before.nodes)
    after = snapshot(*nodes[:1], *nodes[5:7], *nodes[1:5], *nodes[7:])
    dump = dump_of(graph_of("joint", (None, before), ("shuffle", after)))
    expect(
        Inspection(dump).diff("joint", "shuffle"),
        """\
0/0 joint, after shuffle: 2 moved

0/0 joint, after shuffle:
> moved n5 to n6 (2 nodes): after x (-4)""",
    )


def test_copies_from_the_host_are_not_counted_as_collectives():
    shards = [placeholder(id, f"shard{id}") for id in (0, 1)]
    reload = Collective("reload", "host-in", 1, 32, 32, (3,))
    copy = replace(gather(2, "reload_w", 0, 3), collective=reload)
    gathered = gather(4, "gather_v", 1, 5, param="v"), wait(5, "v", 4)
    found = snapshot(*shards, copy, wait(3, "w", 2), *gathered)
    shown = communication(found)
    assert [row.kind for row in shown.rows] == ["reload", "all_gather_into_tensor"]
    assert shown.to_json()["totals"]["collectives"] == 1
    assert Counts.of(found) == Counts(nodes=6, collectives=1, nbytes=32)
    text = str(Inspection(dump_of(graph_of("forward", (None, found)))).collectives("forward"))
    assert "\n1 collective and 1 host copy, 64 B of input. " in text


def test_collectives_with_exposed_time_and_totals():
    expect(
        Inspection(small_dump()).collectives("forward"),
        """\
0/0 forward, after overlap
node      kind        group      ranks  parameters      bytes    distance    compute between    time    exposed
--------  ----------  -------  -------  ------------  -------  ----------  -----------------  ------  ---------
gather_w  all_gather  0              2  w                32 B           0                  0   10 us      10 us
gather_v  all_gather  0              2  v                32 B           1               8 us   10 us       2 us

2 collectives, 64 B of input. Communication 20 us, compute 16 us; exposed 12 us, hidden 40%. Times are estimates for the target.""",  # noqa: E501
    )


def test_memory_before_and_after_each_pass():
    shown = str(Inspection(small_dump()).memory("forward"))  # expecttest cannot handle the bars
    assert (
        shown
        == """\
0/0 forward
  step  after               peak    change  at node
------  ----------------  ------  --------  ---------
     0  -                  256 B         =  mm_1
     1  bucket{cap_mb=0}   256 B         =  mm_1
     2  overlap            320 B    +25.0%  mm

after overlap:
   ▄▄▇█▅▇▂  320 B
At the peak, 320 B are alive while mm runs.

kind          bytes    share
----------  -------  -------
parameter     256 B      80%
activation     64 B      20%

allocated by    kind          bytes  parameters    last use
--------------  ----------  -------  ------------  ----------
gather_w        parameter     128 B  w             mm
gather_v        parameter     128 B  v             mm_1
mm              activation     64 B                mm_1

parameter      bytes
-----------  -------
w              128 B
v              128 B"""
    )


# --- figures --------------------------------------------------------------------------------------
def test_gather_is_exposed_for_the_time_that_compute_does_not_cover():
    late = Inspection(small_dump()).collectives_of("forward", 0)
    early = Inspection(small_dump()).collectives_of("forward")
    for found, second in ((late, (0, 0, 10, 10)), (early, (1, 8, 10, 2))):
        rows = [(row.distance, row.compute_us, row.time_us, row.exposed_us) for row in found.rows]
        assert rows == [(0, 0, 10, 10), second]
    assert (late.schedule.total_us, early.schedule.total_us) == (36, 28)
    assert early.schedule.hidden == pytest.approx(0.4)


def test_collectives_of_a_group_share_one_stream():
    # Both are issued at once. The second runs after the first, so compute hides a part of it.
    graph = Inspection(small_dump()).step_of("forward").snapshot
    by = graph.by_name
    order = ("x", "w_shard", "v_shard", "gather_w", "gather_v", "w", "mm", "v", "mm_1", "output")
    plan = schedule(snapshot(*(by[name] for name in order)))
    spans = [(span.start_us, span.end_us, span.exposed_us) for span in plan.collectives]
    assert spans == [(0, 10, 10), (10, 20, 2)]
    assert plan.exposed_us == plan.total_us - plan.compute_us == 12


def test_an_op_of_the_dialect_includes_its_wait_and_a_launch_without_a_wait_is_not_exposed():
    unshard = gather(1, "unshard", 0, 0)
    launch = gather(3, "launch", 2, 0)
    unshard, launch = (
        replace(each, collective=replace(each.collective, waits=())) for each in (unshard, launch)
    )
    nodes = placeholder(0, "x"), unshard, node(2, "mm", cost_us=4.0), launch, output(4, 2)
    times = ((0, 0), (0, 10), (10, 14), (14, 24), (14, 14))
    graph = replace(snapshot(*nodes), spans=times)
    rows = [(row.exposed_us, row.wait, row.distance) for row in communication(graph).rows]
    assert rows == [(10, "unshard", 0), (0, "launch", 0)]
    plan = schedule(graph)
    assert (plan.total_us, plan.compute_us, plan.communication_us) == (14, 4, 20)


def labelled(snapshot, **labels):
    """The graph with labels of groups."""
    nodes = []
    for each in snapshot.nodes:
        if (of := each.collective) is not None:
            each = replace(each, collective=replace(of, label=labels[f"group_{of.group}"]))
        nodes.append(each)
    return replace(snapshot, nodes=tuple(nodes))


def test_groups_of_a_mesh_are_called_after_their_dimensions():
    graph = labelled(two_groups().step_of("forward").snapshot, group_0="dp", group_1="tp")
    dump = Inspection(
        dump_of(
            graph_of("forward", (None, graph)),
            groups={"0": (0, 2), "1": tuple(range(0, 40, 4)), "2": (0, 1)},
            group_labels={"0": "dp", "1": "tp"},
        )
    )
    assert schedule(graph).group_titles == {"0": "dp (2 ranks)", "1": "tp (2 ranks)"}
    events = dump.timeline("forward")["traceEvents"]
    names = [each["args"]["name"] for each in events if each["name"] == "thread_name"]
    groups = ["communication, group dp (2 ranks)", "communication, group tp (2 ranks)"]
    assert names == ["compute", *groups]
    columns = [line.split() for line in str(dump.collectives("forward")).splitlines()]
    assert [each[2] for each in columns if each[:1] in (["gather_w"], ["gather_v"])] == ["dp", "tp"]
    rows = dump.collectives_of("forward").to_json()["collectives"]
    assert [(each["group"], each["label"]) for each in rows] == [("0", "dp"), ("1", "tp")]
    assert "gather: v; over tp (2)" in str(dump.show("forward"))
    line = "groups: dp (2 ranks: 0, 2), tp (10 ranks: 0, 4, 8, 12, 16, 20, 24, 28, ...)"
    assert line in str(dump.overview())
    (compiled,) = payload(dump.dump, None, None)["compiles"]
    assert compiled["groups"]["dp"] == [0, 2]
    assert compiled["groups"]["2"] == [0, 1]
    gathers = [compiled["shared"][row[-2]] for row in compiled["nodes"] if row[-2] is not None]
    assert [compiled["strings"][group] for _, group, *_ in gathers] == ["dp", "tp"]


def test_each_group_has_its_own_stream():
    dump = two_groups()
    plan = dump.schedule_of("forward")
    assert plan.groups == ("0", "1")
    spans = [(each.group, each.start_us, each.end_us, each.exposed_us) for each in plan.collectives]
    assert spans == [("0", 0, 10, 10), ("1", 0, 10, 0)]
    assert (plan.total_us, plan.exposed_us, plan.hidden) == (26, 10, 0.5)
    assert [row.exposed_us for row in dump.collectives_of("forward").rows] == [10, 0]
    events = dump.timeline("forward")["traceEvents"]
    named = [event for event in events if event["name"] == "thread_name"]
    groups = ["communication, group 0 (2 ranks)", "communication, group 1 (2 ranks)"]
    tracks = {event["tid"]: event["args"]["name"] for event in named}
    assert tracks == {1: "compute", 2: groups[0], 3: groups[1]}
    gathers = [event for event in events if event.get("cat") == "all_gather_into_tensor"]
    assert {event["name"]: event["tid"] for event in gathers} == {"gather_w": 2, "gather_v": 3}


def test_memory_at_a_node_and_at_the_peak():
    inspection = Inspection(small_dump())
    peak = inspection.memory_of("forward")
    assert (peak.at.name, peak.nbytes, peak.peak_bytes) == ("mm", 320, 320)
    assert peak.by_kind == {"parameter": 256, "activation": 64}
    assert peak.by_parameter == {"w": 128, "v": 128}
    alive = [each.node for each in inspection.memory_of("forward", at="mm_1").alive]
    assert alive == ["gather_v", "mm", "mm_1"]


def test_shared_buffer_is_divided_by_parameter_size():
    buffer = Buffer(120, 0, 0, "bucket", ("a", "b"))
    graph = snapshot(node(0, "flat", buffers=(buffer,)), live=[120])
    assert memory(graph).by_parameter == {"a": 60, "b": 60}
    assert memory(graph, sizes={"a": 10, "b": 30}).by_parameter == {"b": 90, "a": 30}


# --- selection ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("where", "names"),
    [
        (NodeFilter(collectives=True), ["gather_w", "w", "gather_v", "v"]),
        (NodeFilter(params=("v*",)), ["v_shard", "gather_v", "v"]),
        (NodeFilter(ops=("mm",)), ["mm", "mm_1"]),
        (NodeFilter(names=("mm*", "x")), ["x", "mm", "mm_1"]),
        (NodeFilter(collectives=True, params=("w",)), ["gather_w", "w"]),
    ],
)
def test_listings_are_filtered(where, names):
    shown = Inspection(small_dump()).show("forward", 0, where).data[0]["nodes"]
    assert [each["name"] for each in shown] == names


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda it: it.show("foward"), "has no graph 'foward'. Did you mean \"forward\"?"),
        (
            lambda it: it.show("forward", "overlp"),
            "no pass 'overlp' ran on graph 0/0 forward. Did you mean \"overlap\"? Known: bucket, "
            "overlap.",
        ),
        (lambda it: it.show("forward", 7), "no step 7; expected 0 (before the first pass) to 2"),
        (lambda it: it.memory("forward", at="mmm"), "has no node 'mmm'. Did you mean \"mm\"?"),
        (lambda it: Inspection(it.dump, 3).show(), "contains only ranks 0, and not rank 3"),
        (
            lambda it: Inspection(it.dump, None, "1/0").show(),
            "has no compile '1/0'. Did you mean \"0/0\"?",
        ),
    ],
)
def test_unknown_names_are_refused_with_suggestions(ask, message):
    with pytest.raises(NotInDumpError) as caught:
        ask(Inspection(small_dump()))
    assert message in str(caught.value)


def test_steps_are_found_by_name_text_and_number():
    steps = {"bucket": 1, "bucket{cap_mb=0}": 1, "1": 1, 1: 1, None: 2, "overlap": 2}
    for after, index in steps.items():
        assert Inspection(small_dump()).step_of("forward", after).index == index


def test_long_lists_are_shortened_by_default():
    wide = node(0, "cat", "aten.cat.default", (tuple(range(40)),))
    assert "cat = cat([0, 1, 2, 3, 4, ... 34 more, 39])" in listing(snapshot(wide))
    assert "... " not in listing(snapshot(wide), most=None)


def test_filter_without_a_match_lists_the_parameters():
    missing, found = (
        str(Inspection(small_dump()).show("forward", where=NodeFilter(params=(name,))))
        for name in ("layers.*", "w")
    )
    assert missing.endswith("No node matches all conditions. The graph's parameters are w, v.")
    assert "parameters are" not in found


def test_captured_graph_has_no_estimates():
    inspection = Inspection(dump_of(graph_of("captured", (None, two_gathers()))))
    for page in (inspection.memory("captured"), inspection.collectives("captured")):
        assert str(page).startswith("0/0 captured is the graph that Dynamo captured")


def test_html_for_notebooks_escapes_names():
    hostile = "<script>alert(1)</script>"
    before, after = snapshot(placeholder(0, hostile)), snapshot(node(1, hostile))
    inspection = Inspection(dump_of(graph_of("joint", (None, before), ("retag", after))))
    pages = [inspection.memory("joint"), inspection.collectives("joint")]
    for view in (inspection, inspection.show(), inspection.diff(), *pages):
        assert "<script" not in view._repr_html_()
    assert "&lt;script&gt;" in inspection.diff()._repr_html_()


def test_missing_graph_does_not_hide_the_others():
    lost = graph_of("forward", (None, None), error=Failure("OSError", "disk full"))
    inspection = Inspection(dump_of(graph_of("joint", (None, chain(3))), lost))
    assert [each["graph"] for each in inspection.show().data] == ["joint"]
    titles = [each["title"] for each in inspection.diff().data["graphs"]]
    assert titles == ["0/0 joint, before its first pass"]
    said = "0/0 forward before the first pass is not in the dump"
    with pytest.raises(NotInDumpError, match=said):
        inspection.show("forward")
    assert "forward" in inspection.html()


@pytest.mark.parametrize(
    ("achieved", "possible", "bound", "bar"),
    [
        (100.0, 75.0, 50.0, "█" * 12 + "▓" * 6 + "░" * 6),
        (50.0, 50.0, 50.0, "█" * 12),
        (100.0, 100.0, 0.0, "▓" * 24),
        (0.0, 0.0, 0.0, ""),
        (60.0, 100.0, 50.0, "█" * 12 + "▓" * 12),  # the schedule of another budget
    ],
)
def test_bound_possible_and_achieved_are_one_bar(achieved, possible, bound, bar):
    found = Prediction(achieved, 0.0, possible, bound, 1, 1, 1)
    assert prediction_bar(found, 100.0) == bar


def test_slices_of_a_bucket_have_the_lines_and_modules_of_all_its_parameters():
    names, reads = ("layers.0.up.weight", "layers.1.up.weight"), []
    for at, name in enumerate(names):
        source = Source("model.py", at + 10, "code", name.rpartition(".")[0])
        about = {"params": (name,), "source": source}
        reads.append(node(at, name, "zpasses.unshard.default", **about))
    bucket = replace(gather(5, "bucket", 4, 6), params=names)
    forward = snapshot(placeholder(4, "shard"), bucket, wait(6, "w", 5), output(7, 6))
    joint = graph_of("joint", (None, snapshot(*reads)))
    dump = Inspection(dump_of(joint, graph_of("forward", (None, forward))))
    events = dump.timeline("forward")["traceEvents"]
    for name in ("bucket", "exposed: bucket"):
        (about,) = [each["args"] for each in events if each["name"] == name]
        assert about["source"] == "model.py:10, model.py:11"
        assert about["module"] == "layers.0.up, layers.1.up"
        assert about["params"] == "layers.0.up.weight, layers.1.up.weight"


def test_digits_of_counts_are_grouped_and_those_of_json_are_not():
    graph = chain(1234)
    view = Inspection(dump_of(graph_of("forward", (None, graph)))).overview()
    (row,) = [line for line in str(view).splitlines() if line.startswith("forward")]
    assert row.split()[:4] == ["forward", "0", "-", "1,235"]
    (compiled,) = view.data["compiles"]
    assert compiled["graphs"][0]["steps"][0]["counts"]["nodes"] == 1235
    start = snapshot(graph.nodes[0])
    assert compare(start, graph).summary == "1,234 inserted"
    steps = graph_of("forward", (None, start), ("p", graph))
    text = str(Inspection(dump_of(steps)).diff("forward", "p"))
    assert ["nodes", "1", "1,235"] in [line.split()[:3] for line in text.splitlines()]


def test_the_reason_of_a_route_is_shown_whole():
    why = "32 MiB per rank in 1,234 us by mori, would lose 17 us because no kernel runs beside it"
    nodes = placeholder(0, "shard"), gather(1, "gather_w", 0, 2, decision=why), wait(2, "full", 1)
    dump = dump_of(graph_of("forward", (None, snapshot(*nodes))))
    wide = str(Inspection(dump).collectives())
    narrow = Inspection(dump).collectives().text(width=60)
    assert why in wide
    assert why in " ".join(narrow.split())
