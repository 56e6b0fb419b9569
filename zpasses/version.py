"""The version of zpasses, without importing any of it."""

__version__ = "0.1.0"
