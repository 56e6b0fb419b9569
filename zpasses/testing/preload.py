"""Imported by the server that rank processes fork from.

A compile imports some hundred modules and prepares patterns of graphs. The forks inherit that.
"""

import contextlib
import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# No pool of compile workers, each of which would import torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

from zpasses import compat, passes, sharding  # noqa: F401
from zpasses.backend import compiler  # noqa: F401

with contextlib.suppress(ImportError):
    import pytest  # noqa: F401

compat.warm_up_compilers()
gc.freeze()  # collections in the forks leave the shared memory alone
