"""Inputs of reductions that are held, against a sum over all of them."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from zpasses.cost.plan.held_inputs import HeldInputs


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 100), st.integers(0, 3)), max_size=30))
def test_held_bytes_are_the_sum_over_all_that_is_ready_and_not_awaited(drawn):
    held, jobs = HeldInputs(), []
    for slot, (later, nbytes, removed) in enumerate(drawn):
        job = SimpleNamespace(number=slot, held_from=slot + later - 2, full_bytes=nbytes)
        held.add(job)
        jobs.append(job)
        for _ in range(min(removed, len(jobs))):
            held.remove(jobs.pop(removed % len(jobs)))
        expected = sum(each.full_bytes for each in jobs if each.held_from <= slot)
        assert held.nbytes(slot) == expected
