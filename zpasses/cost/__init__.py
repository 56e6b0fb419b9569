"""What a graph costs on a target: compute, collectives, memory, the time of a step, and which moves
of collectives fit a budget."""
