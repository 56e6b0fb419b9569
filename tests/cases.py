"""Parameters of tests, of which `make test` runs some."""

import pytest

__all__ = ["some_quick"]


def some_quick(values, quick):
    """Returns the parameters, of which those outside `quick` are slow, because those in
    `quick` come close enough. A tuple is the values of several arguments.
    """
    values, quick = list(values), list(quick)
    assert quick
    assert all(each in values for each in quick), (quick, values)
    repeats = pytest.mark.slow(quick=f"the same test with {', '.join(map(str, quick))}")

    def parameter(value):
        several = value if isinstance(value, tuple) else (value,)
        return pytest.param(*several, marks=[] if value in quick else repeats)

    return [parameter(value) for value in values]
