"""Imported by the server that the processes of tests/ranks.py fork from.

A compile imports some hundred modules and prepares patterns of graphs. The forks inherit that.
"""

import torch
import torch._inductor.compile_fx
import torch.distributed.tensor
from torch._dynamo.utils import counters

# Forward only: autograd does not work in forks of a process that ran a backward.
with torch.no_grad():
    torch.compile(torch.sin)(torch.ones(2))
    torch.compile(torch.cos, backend="aot_eager")(torch.ones(2))
torch._dynamo.reset()
counters.clear()
