"""Sharding of models (`zpasses.shard`): DTensor parameters, modules whose parameter reads gather,
and flat buffers.
"""
