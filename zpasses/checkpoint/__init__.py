"""Checkpoints of sharded models: full state dicts, and safetensors files that are written and read
without a full copy of the model on any rank.
"""
