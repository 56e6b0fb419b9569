"""How much memory a graph takes, and what moving its collectives costs."""
