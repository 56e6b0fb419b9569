"""Names that files with and without torch share. Loads no torch."""

from __future__ import annotations

SHORT_DTYPES = {
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "bf16",
}
"""Names of dtypes in listings of graphs."""

REPLICATE_DIMENSIONS = ("replicate", "dp_replicate")
"""Names of the mesh dimension over which shards are replicated in hybrid sharding."""
