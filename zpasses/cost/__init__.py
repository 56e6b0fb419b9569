"""Cost models of a graph on a target.

They cover compute, collectives, memory, the time of a step, and the moves of collectives that fit a
memory budget.
"""
