"""`zpasses tune`: runs a program with several plans, and finds the fastest."""
