"""The compile cache: compiled graphs on disk, which a later start of the program loads."""
