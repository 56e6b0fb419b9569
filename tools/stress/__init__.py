"""Tries to break zpasses with drawn cases, each of which one number reproduces.

    python -m zpasses.tools.stress                      all suites, 100 cases each
    python -m zpasses.tools.stress graphs --count 10000
    python -m zpasses.tools.stress --only graphs:417    one case again

A case that is wrong, hangs or crashes is a bug. "refused" is an error that says what to do.
"""
