"""Programs of the stress suite `programs` that are written by hand: they train on two ranks, beside
unsharded references.
"""

import dataclasses

import torch

from zpasses.testing import run_on_ranks
from zpasses.tools.stress.compared_programs import run_program
from zpasses.tools.stress.drawn_models import ModelChoice
from zpasses.tools.stress.drawn_programs import Action, Program

ARGUMENTS = {
    "average_model": {"rows": (2, 2), "grad": True, "compiled": True},
    "backward": {
        "rows": (3, 3),
        "micro": 1,
        "window": "none",
        "form": "plain",
        "through": "compiled",
    },
    "clip": {"kind": "norm", "bound": 0.25},
    "edit": {"factor": 0.5},
    "evaluate": {"rows": (2, 2), "grad": "enable_grad", "training": True, "through": "compiled"},
    "moving_average": {"rows": (2, 2), "way": "data.copy_", "grad": False},
    "step": {"rate": 1.0},
    "zero_grad": {"set_to_none": True},
}
"""Action -> arguments that a program may leave out."""


def act(name, **arguments):
    return Action(name, {**ARGUMENTS.get(name, {}), **arguments})


def program(*actions, blocks=("feed",), optimizer=("SGD", {"lr": 0.1}), **shard):
    """A program of actions, or of names of actions. `shard` is for `zpasses.shard`."""
    return Program(
        seed=0,
        model=ModelChoice(blocks),
        dtype=torch.float64,
        mesh=(2,),
        shard=shard,
        how="whole",
        dynamic=None,
        options={},
        optimizer=optimizer,
        offloads=None,
        rests=None,
        actions=tuple(act(each) if isinstance(each, str) else each for each in actions),
    )


def check(given, how="whole", **options):
    """Runs a program. All values must be equal to those of the references after each action."""
    options = {"codegen": "eager", "agreement_timeout_s": 20.0, **options}
    given = dataclasses.replace(given, options=options, how=how)
    for report in run_on_ranks(run_program, given, timeout_s=280):
        assert not report.wrong, report
        assert not report.error, report
