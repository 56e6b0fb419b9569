"""What a test has dumped."""

from zpasses.dumps import read


def only_compile(folder, rank=0):
    (found,) = read(folder).ranks[rank].compiles
    return found
