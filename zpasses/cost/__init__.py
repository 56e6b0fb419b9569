"""Cost models of a graph on a target.

They cover compute, collectives, memory, the time of a step, and the moves of collectives that fit a
memory budget.

Begin with `roofline.py` for the time of one node or collective, `step_time.py` for the time of a
graph, and `memory.py` for what is alive at each node.
"""
