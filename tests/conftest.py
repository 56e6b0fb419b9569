"""Set before torch's thread pools start; the rank processes of tests/ranks.py inherit it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
