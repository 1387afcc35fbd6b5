"""What a large request needed for a moment is the machine's again afterwards."""

import platform
import subprocess
import sys

import pytest

FREED = """
import os
from everdeck.kernel import heap

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

request = [bytes(600) for _ in range(50_000)]  # too large for Python's own allocator
kept = bytes(600)  # at the top of the heap: by itself the C library gives back only what lies above it
del request
before = resident()
heap.give_back()
print(before - resident())
"""


def test_what_was_freed_goes_back_to_the_machine() -> None:
    """Thirty megabytes were freed below something that is kept; most of them are given back."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("malloc_trim is glibc's")
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 15_000_000
