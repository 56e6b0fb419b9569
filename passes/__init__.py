"""The catalogue of passes, one rewrite per file, and the named pipelines that combine them."""

from zpasses.passes.average_replicas import AverageReplicas
from zpasses.passes.cache_params import CacheParams
from zpasses.passes.chunk_loss import ChunkLoss
from zpasses.passes.defer_reduction import DeferReduction
from zpasses.passes.exchange_rows import ExchangeRows
from zpasses.passes.flatten_on_device import FlattenOnDevice
from zpasses.passes.gather_params import GatherParams
from zpasses.passes.merge_reads import MergeReads
from zpasses.passes.pipelines import (
    ZERO1,
    ZERO2,
    ZERO2_ONE_AHEAD,
    ZERO3,
    ZERO3_ONE_AHEAD,
)
from zpasses.passes.reduce_grads import ReduceGrads
from zpasses.passes.reshard_after_forward import ReshardAfterForward
from zpasses.passes.schedule import Schedule
from zpasses.passes.sdma import Sdma

__all__ = [
    "ZERO1",
    "ZERO2",
    "ZERO2_ONE_AHEAD",
    "ZERO3",
    "ZERO3_ONE_AHEAD",
    "AverageReplicas",
    "CacheParams",
    "ChunkLoss",
    "DeferReduction",
    "ExchangeRows",
    "FlattenOnDevice",
    "GatherParams",
    "MergeReads",
    "ReduceGrads",
    "ReshardAfterForward",
    "Schedule",
    "Sdma",
]
