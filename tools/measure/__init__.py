"""`zpasses measure`: runs a program with a dump and a profiler, and shows both side by side."""
