"""Keeping freed memory in the process: a step takes the same buffers again and again, and mapping
fresh pages for them each time costs a seventh of its time (docs/training.md)."""

import ctypes

# From glibc's malloc.h.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
SETTINGS = ((MMAP_THRESHOLD, 2**30), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, 2**26))


def keep_freed_memory() -> bool:
    """Take large buffers from the heap and keep them there. False where the C library is not
    glibc, and nothing changes."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    return option is not None and all(option(name, value) for name, value in SETTINGS)
