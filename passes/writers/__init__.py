"""What passes match and write, where that takes more than the file of the pass."""
