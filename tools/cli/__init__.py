"""The command line `zpasses`: inspect dumps, list passes, capture training steps, and bisect
passes.

Exit codes: 0 for success; 1 from `diff` if graphs differ, and from `bisect` if a pass was found; 2
for an error, whose message says what to do.
"""
