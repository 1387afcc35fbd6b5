"""On which machine the absolute numbers were taken."""

import os
import platform
from pathlib import Path


def machine() -> dict[str, str]:
    """Processor, cores, memory, kernel, Python, filesystem of the state directories."""
    return {
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": str(os.cpu_count()),
        "memory": _memory(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "filesystem": _filesystem(),
    }


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        field, _, value = line.partition(":")
        if field.strip() == name:
            return value.strip()
    return "unknown"


def _filesystem() -> str:
    """The type of what is mounted closest above us."""
    here, best, kind = Path(__file__).resolve(), "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, of_kind, *_ = line.split()
        if here.is_relative_to(place) and len(place) > len(best):
            best, kind = place, of_kind
    return kind


def _memory() -> str:
    kibibytes = int(_field("/proc/meminfo", "MemTotal").split()[0])
    return f"{kibibytes / 2**20:.0f} GiB"
