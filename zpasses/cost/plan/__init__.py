"""Which collectives share a launch, where they start, and what stays in memory."""
