"""Capture a training step for any world size and target on this machine, without running it:
zpasses.tools.capture.run."""
