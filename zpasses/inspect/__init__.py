"""Shows what passes did, from a dump: listings, differences, collectives, memory, timelines and
report pages. Importing this package does not import torch.

    dump = zpasses.inspect.open("dump")
    dump                                   # compiles, graphs and passes; a table in notebooks
    dump.diff("backward", "schedule")      # the changes of a pass
    dump.memory("backward")                # peaks of all steps, buffers at the last step's peak
    dump.memory_of("backward").by_kind     # the same as plain values

The command line (`zpasses --help`) shows the same pages.
"""

from zpasses.dumps import DumpError, Limits
from zpasses.inspect.collectives_page import CollectiveRows
from zpasses.inspect.communication import CollectiveRow, Communication, communication
from zpasses.inspect.difference import Change, Difference, compare
from zpasses.inspect.find import NotInDumpError
from zpasses.inspect.inspection import Inspection
from zpasses.inspect.inspection import open_dump as open
from zpasses.inspect.listing import NodeFilter, listing
from zpasses.inspect.measured import Measured, MeasuredCollective, MeasuredGraph
from zpasses.inspect.memory import LiveBuffer, Memory, memory
from zpasses.inspect.node_spans import CollectiveSpan, Schedule, schedule
from zpasses.inspect.pairing import pair_nodes
from zpasses.inspect.timeline import chrome_trace
from zpasses.inspect.view import View

__all__ = [
    "Change",
    "CollectiveRow",
    "CollectiveRows",
    "CollectiveSpan",
    "Communication",
    "Difference",
    "DumpError",
    "Inspection",
    "Limits",
    "LiveBuffer",
    "Measured",
    "MeasuredCollective",
    "MeasuredGraph",
    "Memory",
    "NodeFilter",
    "NotInDumpError",
    "Schedule",
    "View",
    "chrome_trace",
    "communication",
    "compare",
    "listing",
    "memory",
    "open",
    "pair_nodes",
    "schedule",
]
