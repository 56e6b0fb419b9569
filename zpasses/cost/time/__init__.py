"""How long kernels, collectives and graphs take on a target."""
