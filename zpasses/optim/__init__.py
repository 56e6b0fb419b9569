"""Optimizers that are exact on sharded parameters where torch's own are not.

Most of torch's optimizers are exact as they are, because they compute element by element. These
compute over whole matrices. They take the same arguments, and their state consists of DTensors, so
distributed checkpoints work. Parameters that are not sharded may be in the same optimizer.
"""

from zpasses.optim.adafactor import Adafactor
from zpasses.optim.muon import Muon
from zpasses.optim.offload import state_plan
from zpasses.optim.offload_params import ParameterPlan, parameter_plan
from zpasses.optim.state_buckets import StatePlan

__all__ = [
    "Adafactor",
    "Muon",
    "ParameterPlan",
    "StatePlan",
    "parameter_plan",
    "state_plan",
]
