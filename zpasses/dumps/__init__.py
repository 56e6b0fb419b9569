"""The dump format and its reader.

A dump holds every graph of a compile, before and after every pass. Importing this package does not
import torch.
"""

from zpasses.dumps.dump_errors import (
    DamagedDumpError,
    DumpError,
    DumpPathError,
    DumpTooLargeError,
    DumpVersionError,
    NotADumpError,
    OtherRunError,
)
from zpasses.dumps.format import VERSION, Compile, Dump, Graph, Rank, Step
from zpasses.dumps.limits import Limits
from zpasses.dumps.nodes import Node, Snapshot
from zpasses.dumps.reader import read

__all__ = [
    "VERSION",
    "Compile",
    "DamagedDumpError",
    "Dump",
    "DumpError",
    "DumpPathError",
    "DumpTooLargeError",
    "DumpVersionError",
    "Graph",
    "Limits",
    "Node",
    "NotADumpError",
    "OtherRunError",
    "Rank",
    "Snapshot",
    "Step",
    "read",
]
