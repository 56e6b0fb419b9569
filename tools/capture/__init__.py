"""Captures a training step for any world size and target on this machine, without running it.

`zpasses.tools.capture.run` has the function, `zpasses.tools.capture.command` the command.
"""
