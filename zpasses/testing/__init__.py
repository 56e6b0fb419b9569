"""Test graphs and passes without a cluster."""
