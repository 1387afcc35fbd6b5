"""Builds the C side of a start (``src/everdeck/kernel/_spawn.c``) where there is a compiler.

Without one the package is pure Python, passes the same tests and starts some workers more slowly: no installation needs
a compiler. The result is called through ctypes, so one wheel per processor serves every version of Python.
``EVERDECK_NATIVE=0`` builds the pure one.
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "src/everdeck/kernel/_spawn.c"
RESULT = "src/everdeck/kernel/_spawn.so"


class CustomBuildHook(BuildHookInterface[Any]):
    """Called by hatchling before it puts a wheel, also an editable one, together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build it, and say that the wheel is for this processor; or leave everything as it is."""
        del version
        root = Path(self.root)
        compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
        if self.target_name != "wheel" or compiler is None or os.environ.get("EVERDECK_NATIVE") == "0":
            return
        fresh = root / f"{RESULT}.{os.getpid()}"  # beside it and renamed: a running deck may have the old one mapped
        words = [compiler, "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-o", str(fresh), str(root / SOURCE)]
        if subprocess.run(words, check=False).returncode != 0:
            fresh.unlink(missing_ok=True)
            self.app.display_warning("the C side could not be built; workers start without it, more slowly")
            return
        fresh.replace(root / RESULT)
        build_data["artifacts"].append(f"/{RESULT}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
