"""Look at a dump: listings, differences, collectives, memory, timelines and report pages. Importing
this loads no torch.

    dump = zpasses.inspect.open("dump")
    dump                                   # what there is; notebooks show a table
    dump.diff("backward", "bucket")        # what a pass changed
    dump.memory("backward")                # peaks of all steps, and what is alive at the last one's
    dump.memory_of("backward").by_kind     # figures

The command line (`zpasses --help`) shows the same pages.
"""

from zpasses.dumps import DumpError, Limits
from zpasses.inspect.communication import Communication, Row, communication
from zpasses.inspect.difference import Change, Difference, compare
from zpasses.inspect.find import NotInDumpError
from zpasses.inspect.inspection import Inspection
from zpasses.inspect.inspection import open_dump as open
from zpasses.inspect.listing import Where, listing
from zpasses.inspect.memory import Alive, Memory, memory
from zpasses.inspect.pairing import pair
from zpasses.inspect.schedule import Flight, Schedule, schedule
from zpasses.inspect.timeline import chrome_trace
from zpasses.inspect.view import View

__all__ = [
    "Alive",
    "Change",
    "Communication",
    "Difference",
    "DumpError",
    "Flight",
    "Inspection",
    "Limits",
    "Memory",
    "NotInDumpError",
    "Row",
    "Schedule",
    "View",
    "Where",
    "chrome_trace",
    "communication",
    "compare",
    "listing",
    "memory",
    "open",
    "pair",
    "schedule",
]
