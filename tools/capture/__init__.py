"""Captures a training step for any world size and target on this machine, without running it.

The module `captured_step` has the function, `capture_command` the command.
"""
