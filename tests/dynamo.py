"""Dynamo without what tests do not need, in every process that imports this module: it takes a
tenth of the time of a compile.
"""

import torch._dynamo.guards
import torch._dynamo.trace_rules

# It empties the cache of the processor, to measure how long guards take.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# Each new process group makes it look up all functions of torch again, for the case that rules were
# read while torch was being imported.
torch._dynamo.trace_rules.clear_lru_cache()
torch._dynamo.trace_rules.clear_lru_cache = lambda: None
