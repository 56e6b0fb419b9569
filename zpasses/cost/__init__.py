"""Cost models of a graph on a target.

They cover compute, collectives, memory, the time of a step, and the moves of collectives that fit a
memory budget.

`zpasses.cost.time` says how long kernels, collectives and graphs take, and `zpasses.cost.memory`
what is alive at each node. `zpasses.cost.plan` chooses what to merge, move and keep.
"""
