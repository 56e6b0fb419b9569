"""Every private torch API that zpasses uses, in one file per torch subsystem.

torch 2.13 to 2.15 are supported. A name that moved between these versions is resolved only in this
package, so support for a new torch is added here. Other code imports the package (`from zpasses
import compat`) and calls `compat.<name>`: all names that a file defines without an underscore.
tests/zpasses/compat/private_names.txt lists the private names, and which versions have them. Three
places also serve torch 2.11, on which tests marked `gpu` may run: `placeholder_source`,
`is_to_local`, and `zpasses/sdma/ops.py` for operators with `out`.

| torch subsystem | file |
| --- | --- |
| AOTAutograd, the partitioner | `aot.py` |
| compiled graphs as bytes | `artifacts.py`, `graph_code.py` |
| the autograd engine | `autograd.py` |
| process groups, stores, collectives | `c10d.py` |
| DTensor | `dtensor.py` |
| Dynamo, the structured trace | `dynamo.py` |
| fake tensors, symbolic sizes | `fake.py` |
| stacks of Python and C++ frames | `frames.py` |
| FX graphs, operators, pytrees | `fx_graph.py` |
| Inductor | `inductor.py`, and `inductor_*.py` and `code_peaks.py` for its scheduler |
| optimizers | `optimizers.py` |
| pipeline stages | `pipelining.py` |
"""

from zpasses.compat.aot import *
from zpasses.compat.artifacts import *
from zpasses.compat.autograd import *
from zpasses.compat.c10d import *
from zpasses.compat.code_peaks import *
from zpasses.compat.dtensor import *
from zpasses.compat.dynamo import *
from zpasses.compat.fake import *
from zpasses.compat.frames import *
from zpasses.compat.fx_graph import *
from zpasses.compat.inductor import *
from zpasses.compat.inductor_peaks import *
from zpasses.compat.optimizers import *
from zpasses.compat.pipelining import *
