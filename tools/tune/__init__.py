"""`zpasses tune`: runs a program with several plans, and remembers the fastest."""
