"""The benchmark: zpasses beside its peers, its overhead per parameter, and its compile time at
scale.

    python -m zpasses.tools.bench [train]     peers train the same GPT on the same data
    python -m zpasses.tools.bench coalesce    several backwards in one step: reduced in each, or once
    python -m zpasses.tools.bench buckets     many small parameters: collectives one by one, and in buckets
    python -m zpasses.tools.bench overhead    runtime overhead per parameter
    python -m zpasses.tools.bench scaling     compile time against the number of layers, on 512 fake ranks
    python -m zpasses.tools.bench startup     time from start to end of `zpasses` on the command line
    python -m zpasses.tools.bench dump        what a dump adds to a cold compile
    python -m zpasses.tools.bench flatten     flat buffers made on the host, on the device, and in parts by all ranks

Everything is measured in processes started for that purpose, so that no run inherits another's
compile caches, threads or memory."""
