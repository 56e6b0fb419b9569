"""What ranks of the tests of this folder run, and how their errors are told."""

import time

import torch

import zpasses
from zpasses.testing import world_mesh

LIMIT_S = 5.0
SLACK_S = 120.0
"""How much longer than the limit an error may take on a loaded machine; 10 s on an idle one."""


def compiled(model, **options):
    zpasses.shard(model, mesh=world_mesh())
    return compiled_part(model, **options)


def compiled_part(module, **options):
    options = {"codegen": "eager", "agreement_timeout_s": LIMIT_S, **options}
    return torch.compile(module, backend="zpasses", options=options)


def outcome_of(fn):
    """Seconds until the error, and its text."""
    started = time.monotonic()
    try:
        fn()
    except Exception as error:
        return time.monotonic() - started, f"{type(error).__name__}: {error}"
    return time.monotonic() - started, None


def in_time(outcome, after_s=0.0):
    """The text of the error of a rank, which must have come within the limit."""
    assert outcome.result is not None, outcome
    seconds, error = outcome.result
    assert after_s <= seconds < LIMIT_S + SLACK_S
    return error
