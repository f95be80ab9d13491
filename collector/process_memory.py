"""Memory and threads of a process that takes in spans all day: what is freed in one pass is needed again in the next.

By default polars, Arrow and the C library each give memory back to the system at once, which a third of a busy writer's time in the
kernel goes to, and keep a heap for every thread. Work is many small steps, for which a pool of threads costs more than it brings.
"""

from __future__ import annotations

import ctypes
import os
import sys

# Read once, when the library is loaded. Whoever starts the process may say otherwise. Of polars: half a second is less than a pass; muzzy
# is what the system may take, and counts as ours until it does.
_VARIABLES = {
    "POLARS_MAX_THREADS": "1",
    "_RJEM_MALLOC_CONF": "dirty_decay_ms:2000,muzzy_decay_ms:0",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
_MIB = 1 << 20
# Numbers of the C library's mallopt: freed memory at the end of the heap that is kept, the size that is mapped for itself, and heaps.
_OPTIONS = {-1: 32 * _MIB, -3: 32 * _MIB, -8: 1}


def keep_memory() -> None:
    """Call first of all, before polars and Arrow are imported: afterwards it changes nothing for them."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # other C libraries have none
        for option, size in _OPTIONS.items():
            mallopt(option, size)
