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

if "PYTEST_CURRENT_TEST" in os.environ:
    # Ranks rewrite the assertions of test modules, so that a failure shows the values. A program
    # that a test starts may lack pytest.
    with contextlib.suppress(ImportError):
        from _pytest import assertion, config

        assertion.install_importhook(config.get_config())

compat.warm_up_compilers()
gc.freeze()  # collections in the forks leave the shared memory alone
