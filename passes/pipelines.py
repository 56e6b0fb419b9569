"""The named pipelines: the ZeRO stages as lists of passes.

| stage | full parameters live | gradients |
| --- | --- | --- |
| 1 | from the first forward after a step to the reduction | reduced in each backward or window |
| 2 | as in stage 1 | as in stage 1 |
| 3 | around each use; gathered again in backward | as in stage 1 |
"""

from zpasses.passes.average_replicas import AverageReplicas
from zpasses.passes.cache_params import CacheParams
from zpasses.passes.defer_reduction import DeferReduction
from zpasses.passes.exchange_rows import ExchangeRows
from zpasses.passes.gather_params import GatherParams
from zpasses.passes.merge_reads import MergeReads
from zpasses.passes.reduce_grads import ReduceGrads
from zpasses.passes.reshard_after_forward import ReshardAfterForward
from zpasses.passes.schedule import Schedule
from zpasses.pipeline.pipeline import Pipeline

_STAGE2 = (MergeReads(), GatherParams(), ReduceGrads(), CacheParams())
_STAGE3 = (
    MergeReads(max_hold_mb=1.0),
    ExchangeRows(rows="off"),  # so that `zero3{exchange-rows.rows=on}` finds it
    GatherParams(),
    ReduceGrads(),
    ReshardAfterForward(),
)

_LAST = (AverageReplicas(), DeferReduction())

ZERO2 = Pipeline((*_STAGE2, Schedule(), *_LAST))
ZERO1 = ZERO2
"""The same passes as stage 2. The stages differ in windows (`backwards_per_step`), which determine
how long gradients stay full.
"""
ZERO3 = Pipeline((*_STAGE3, Schedule(), *_LAST))

ZERO2_ONE_AHEAD = Pipeline((*_STAGE2, Schedule("one-ahead", memory_budget="5%"), *_LAST))
ZERO3_ONE_AHEAD = Pipeline(
    (*_STAGE3, Schedule("one-ahead", cap_mb=12.0, memory_budget="5%"), *_LAST)
)
"""The stages with buckets of a fixed size, and one gather and one reduction in flight. They need no
figures of the target, and plan large graphs sooner.
"""
