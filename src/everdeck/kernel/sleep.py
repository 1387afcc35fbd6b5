"""A sleep that ends at a moment of CLOCK_BOOTTIME, which goes on while the machine is suspended.

``time.sleep`` counts with CLOCK_MONOTONIC, which stands still meanwhile: whoever must act at a moment would be late by
as long as he had left to sleep. See clock_nanosleep(2), time_namespaces(7).
"""

import ctypes
import errno
import math
import os
import time
from functools import cache
from typing import Any, Final

_ABSOLUTE: Final = 1  # TIMER_ABSTIME


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep_until(at: float) -> None:
    """Sleep until ``boottime()`` says so; a signal does not end it earlier."""
    whole = math.floor(at)
    moment = _Timespec(whole, int((at - whole) * 1e9))
    while failed := _clock_nanosleep()(time.CLOCK_BOOTTIME, _ABSOLUTE, ctypes.byref(moment), None):
        if failed != errno.EINTR:
            raise OSError(failed, os.strerror(failed))


@cache
def _clock_nanosleep() -> Any:
    return ctypes.CDLL(None, use_errno=False).clock_nanosleep
