"""Benchmarks: zpasses beside its peers, runtime overhead, compile time, and predicted schedules.

Every measurement runs in new processes, so that it does not inherit compile caches, threads or
memory from another. Without the name of a suite, `train` runs.
"""
