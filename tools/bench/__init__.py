"""Benchmarks: zpasses beside its peers, runtime overhead, compile time, and more.

    python -m zpasses.tools.bench [train]     peers train the same GPT on the same data
    python -m zpasses.tools.bench device      one rank of a larger group on one accelerator, without
                                              communication
    python -m zpasses.tools.bench overhead    runtime overhead per parameter
    python -m zpasses.tools.bench compile     the first step, with cold and warm compile caches

Every measurement runs in new processes, so that it does not inherit compile caches, threads or
memory from another.
"""
