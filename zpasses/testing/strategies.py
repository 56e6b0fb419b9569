"""Hypothesis strategies for tests of passes. They need hypothesis, unlike the other tools."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from zpasses.testing.drawing import Param

__all__ = ["param_lists"]


def param_lists(max_size: int = 4, **fixed: Any) -> st.SearchStrategy[list[Param]]:
    """Lists of parameters, some of unusual shapes: scalars, no rows, fewer rows than ranks, and up
    to three dimensions. `fixed` gives fields that are not drawn.
    """
    shape = st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 9)),
        st.tuples(st.integers(0, 9), st.integers(0, 3)),
        st.tuples(st.integers(1, 5), st.just(2), st.just(2)),
    )
    options: dict[str, st.SearchStrategy[Any]] = {
        "param_dtype": st.sampled_from([None, torch.bfloat16, torch.float64]),
        "reduce_dtype": st.sampled_from([None, torch.float32, torch.float64]),
        "frozen": st.booleans(),
        "reads": st.integers(1, 3),
        **{name: st.just(value) for name, value in fixed.items()},
    }
    return st.lists(st.builds(Param, shape, **options), min_size=1, max_size=max_size)
