"""Find the pass that breaks a run."""
