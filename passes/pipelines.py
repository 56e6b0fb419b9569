"""The named pipelines: the ZeRO stages as lists of passes.

| stage | full parameters live | gradients |
| --- | --- | --- |
| 1 | from the first forward after a step until gradients are reduced | reduced to shards in each backward, or in the last of a window |
| 2 | the same | the same |
| 3 | around their use; gathered again in backward | the same |
"""

from zpasses.passes.bucket import Bucket
from zpasses.passes.defer_reduction import DeferReduction
from zpasses.passes.gather_params import GatherParams
from zpasses.passes.keep_params import KeepParams
from zpasses.passes.merge_reads import MergeReads
from zpasses.passes.overlap import Overlap
from zpasses.passes.reduce_grads import ReduceGrads
from zpasses.passes.regather import Regather
from zpasses.passes.sdma import Sdma
from zpasses.pipeline import Pipeline

__all__ = ["ZERO1", "ZERO2", "ZERO3", "ZERO3_SDMA"]

ZERO2 = Pipeline((MergeReads(), GatherParams(), ReduceGrads(), KeepParams(), Bucket(), Overlap(), DeferReduction()))
ZERO1 = ZERO2
"""The same passes as stage 2: windows (`backwards_per_step`) decide how long gradients stay full, which is what tells the two apart."""
ZERO3 = Pipeline((MergeReads(hold_mb=1.0), GatherParams(), ReduceGrads(), Regather(), Bucket(mb=12.0), Overlap(), DeferReduction()))
ZERO3_SDMA = Pipeline(
    (MergeReads(hold_mb=1.0), GatherParams(), ReduceGrads(), Regather(), Bucket(mb=512.0), Overlap(), DeferReduction(), Sdma())
)
"""Stage 3 for nodes with copy engines: buckets of a layer rather than of a few MiB, since engines take longer to start."""
