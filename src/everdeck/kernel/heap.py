"""Memory that was needed for a moment goes back to the machine.

A request that names a thousand workers needs megabytes for its length. Python frees them to the C library, which keeps
what lies below the top of its heap for later; ``malloc_trim`` gives whole free pages back (malloc_trim(3), glibc).
"""

import ctypes
import gc


def give_back() -> None:
    """Collect what is garbage and let go of its pages; without glibc only the first. A few milliseconds."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
