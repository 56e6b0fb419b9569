"""What rests on the host: saved values, optimizer states, parameters and gradients; the memory that
they take there, and the copies on the side.
"""

# Importing it registers operators, which code from a warm compile cache may call.
from zpasses.host import host_memory as _host_memory

del _host_memory
