"""Channels of one link, which share it, and of different links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpasses.cost.time.clock import Channel, Clock, CollectiveTiming

FIRST, SECOND, ENGINE = (
    CollectiveTiming(0.0, channel=Channel("node", queue))
    for queue in ("groups", "beside", "engines")
)


def started(*collectives):
    """Returns a clock at which collectives, given as (duration, timing), have started."""
    clock = Clock()
    for number, (duration, timing) in enumerate(collectives):
        clock.enqueue(number, duration, timing)
    return clock


def done(clock):
    for number in {int(entry[3]) for queue in clock.busy.values() for entry in queue}:
        clock.wait(number)
    return [clock.done_us[number] for number in sorted(clock.done_us)]


def test_collectives_of_one_group_run_one_after_another():
    assert done(started((100, FIRST), (10, FIRST))) == [100, 110]
    assert done(started((100, SECOND), (10, SECOND))) == [100, 110]


def test_an_urgent_gather_overtakes_a_long_reduction_on_another_group():
    assert done(started((100, SECOND), (10, FIRST))) == pytest.approx([110, 20])


def test_groups_share_the_bandwidth_only_while_both_have_a_collective():
    found = done(started((30, SECOND), (10, FIRST), (5, FIRST), (40, SECOND)))
    assert found == pytest.approx([45, 20, 30, 85])


def test_links_of_a_node_and_the_network_are_not_shared():
    network = CollectiveTiming(0.0, channel=Channel("network", "beside"))
    assert done(started((100, network), (10, FIRST))) == [100, 10]


def test_copy_engines_share_the_links_with_the_groups():
    found = done(started((30, SECOND), (30, ENGINE), (10, FIRST)))
    assert found == pytest.approx([70, 70, 30])


def test_a_kernel_slows_both_and_is_slowed_by_the_worse():
    slow = CollectiveTiming(0.0, 2.0, 4.0, Channel("node", "beside"))
    mild = CollectiveTiming(0.0, 1.25, 1.0)
    clock = started((10, slow), (10, mild))
    clock.work(10)  # at half its speed; 20 us in which the mild one ends
    assert clock.now_us == pytest.approx(20)
    # Alone, one moves 1/4 and the other 1 of its bytes per time. Together, they move as many as
    # the faster one alone, in proportion: 1/5 and 4/5.
    assert clock.done_us == {1: pytest.approx(12.5)}
    left = 10 - 12.5 / 5 - 7.5 / 4
    clock.wait(0)
    assert clock.now_us == pytest.approx(20 + left)
    assert clock.exposed_us == pytest.approx(left)


times = st.floats(0.01, 100.0)


@given(st.lists(st.tuples(times, st.booleans()), min_size=1, max_size=8), st.lists(times))
def test_second_groups_move_the_same_bytes_in_the_same_time(collectives, kernels):
    """The links are busy as long as anything is in flight, whatever the groups."""
    ends = []
    for groups in ((FIRST, FIRST), (FIRST, SECOND), (ENGINE, FIRST)):
        clock = started(*((duration, groups[reduces]) for duration, reduces in collectives))
        for kernel in kernels:
            clock.work(kernel)
        ends.append(max(done(clock)))
        total = sum(duration for duration, _ in collectives)
        assert clock.now_us == pytest.approx(max(sum(kernels), total))
    assert ends == pytest.approx([ends[0]] * 3)


@given(st.lists(times, min_size=1, max_size=5), st.lists(times, min_size=1, max_size=5))
def test_gathers_never_end_later_with_their_own_group(reductions, gathers):
    ends = []
    for group in (FIRST, SECOND):
        clock = started(
            *((each, group) for each in reductions), *((each, FIRST) for each in gathers)
        )
        ends.append(done(clock)[len(reductions) :])
    for shared, own in zip(*ends, strict=True):
        assert own <= shared * (1 + 1e-9)
