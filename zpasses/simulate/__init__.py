"""Simulated ranks: reference collectives, the simulator, and the check of a pass by it."""
