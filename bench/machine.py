"""On which machine the absolute numbers were taken."""

import os
import platform
import shutil
import subprocess
from pathlib import Path


def machine() -> dict[str, str]:
    """Processor, cores, memory, kernel, Python, filesystem of the state directories."""
    return {
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": str(os.cpu_count()),
        "memory": _field("/proc/meminfo", "MemTotal"),
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
    stat = shutil.which("stat")
    if stat is None:
        return "unknown"
    done = subprocess.run(
        [stat, "-f", "-c", "%T", str(Path(__file__).parent)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
