"""Ranks decide identically: they vote through the store before they take a path that another rank
might not take.

Begin with `vote.py`, which is the protocol of all votes. `compared_collectives.py` (a graph before
its first run) and `run_order.py` (every later run) vote with it. `vote.py` asks `heartbeat.py`
about ranks that do not answer.
"""
