"""Trainers of other libraries: `zpasses.integrations.transformers`, `.accelerate` and `.lightning`.

Each module imports its library, so import only the one that you use. docs/trainers.md shows them.
"""
