"""What the libraries of the front import and the daemon never uses is loaded when somebody does use it.

Litestar imports the debugger and PyYAML, uvicorn a command line and ``multiprocessing``: together some megabytes of a
daemon that lives for years. A module that is put off stands in ``sys.modules`` under its name, with its place and
nothing in it; the first attribute that somebody asks it for loads it. ``importlib.util.LazyLoader`` does so for any
attribute, also for those that a second ``import`` looks at, which is too early here.
"""

import sys
import threading
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, Final

_NEVER_USED: Final = ("logging.config", "pdb", "pickle", "uvicorn", "yaml")
"""Of uvicorn only what lies below it is used: its root imports its command line."""
_loading: Final = threading.RLock()


class _PutOff(ModuleType):
    """A module that is loaded by the first look at what is in it."""

    def __getattr__(self, name: str) -> Any:
        with _loading:
            if type(self) is _PutOff and self.__spec__ is not None and self.__spec__.loader is not None:
                self.__class__ = ModuleType  # type: ignore[assignment]  # from here on it is an ordinary one
                try:
                    self.__spec__.loader.exec_module(self)
                except BaseException:
                    self.__class__ = _PutOff
                    raise
        return getattr(self, name)


def put_off() -> None:
    """Call this before anything imports them; what is loaded already stays as it is."""
    for name in _NEVER_USED:
        spec = None if name in sys.modules else find_spec(name)
        if spec is not None:
            module = module_from_spec(spec)
            module.__class__ = _PutOff
            sys.modules[name] = module
            package, _, last = name.rpartition(".")
            if package:
                setattr(sys.modules[package], last, module)
