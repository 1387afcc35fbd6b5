"""What the daemon's libraries import, and a daemon may never use, is loaded when somebody does use it.

Litestar imports the debugger and PyYAML, uvicorn a command line and ``multiprocessing``, asyncio OpenSSL: together
megabytes of a daemon that lives for years and may never see a certificate. A module that is put off stands in
``sys.modules`` under its name, with its place and nothing in it; the first attribute that somebody asks for loads it.
``importlib.util.LazyLoader`` does so for any attribute, also for those that a second ``import`` looks at, which is too
early here.

Some libraries look into such a module while they are imported themselves. For what they look at there is a stand-in,
which says what is known without the module, or asks it when it is used. This file is for our own program: what a host
has loaded is not ours to put off, so the library does not use it.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from importlib.abc import Loader  # loads tempfile and every format of archives


class _ClassLater(type):
    """Stands for a class of a module that is put off: before it is loaded there is no instance of it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        module = sys.modules[cls.__module__]
        return not isinstance(module, _PutOff) and isinstance(instance, getattr(module, cls.__name__))


def _class(module: str, name: str) -> type:
    return _ClassLater(name, (), {"__module__": module})


def _function(module: str, name: str) -> Callable[..., Any]:
    """Stands for a function: whoever calls it loads its module."""

    def called(*args: Any, **named: Any) -> Any:
        return _found(sys.modules[module], name)(*args, **named)

    return called


_PUT_OFF: Final[dict[str, dict[str, Any]]] = {
    "annotated_types": {},
    "asyncio.sslproto": {},
    "bz2": {},
    "calendar": {},
    "configparser": {"RawConfigParser": _class("configparser", "RawConfigParser")},  # uvicorn.config: is it one?
    "csv": {},
    "hashlib": {},  # it, hmac and secrets load the half of OpenSSL that ssl does not
    "hmac": {},
    "html": {"escape": _function("html", "escape")},  # litestar's page for a program that is being debugged
    "http.client": {},
    "logging.config": {},
    "lzma": {},
    "pdb": {},
    "pickle": {},
    "secrets": {"compare_digest": _function("secrets", "compare_digest")},  # litestar.middleware.csrf, not used here
    "shutil": {},  # with every format of archives
    "ssl": {
        "CERT_NONE": 0,  # uvicorn.config: defaults; ours are in everdeck.server.fitness
        "PROTOCOL_TLS_SERVER": 17,
        "SSLSocket": _class("ssl", "SSLSocket"),  # asyncio asks whether a listener is one
    },
    "tomllib": {},
    "uvicorn": {},  # only what lies below it is used: its root imports its command line
    "yaml": {},
}


class _PutOff(ModuleType):
    """A module that is loaded by the first look at what is in it."""

    def __getattr__(self, name: str) -> Any:
        stand_ins = _PUT_OFF[self.__name__]
        if stand_ins and name == "__path__":  # asked for by `from … import …`; a package has it from the start
            raise AttributeError(name)
        return stand_ins[name] if name in stand_ins else _found(self, name)


def _found(module: ModuleType, name: str) -> Any:
    """What is in a module, which is loaded for that if it was put off."""
    if (later := _waiting.get(module.__name__)) is not None:
        later.load(module)
    return ModuleType.__getattribute__(module, name)


class _Later:
    """Loads a module in two steps: its name at once, what is in it when somebody asks."""

    def __init__(self, loader: "Loader") -> None:
        self._loader = loader
        self._begun = False
        # One for each: under one for all, two threads that load different modules could wait for each other, by way
        # of the locks that the import system has for each module.
        self._lock = threading.RLock()

    def create_module(self, _: ModuleSpec) -> None:
        """An ordinary one will do."""

    def exec_module(self, module: ModuleType) -> None:
        """The first step."""
        _waiting[module.__name__] = self
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__class__ = _PutOff

    def load(self, module: ModuleType) -> None:
        """The second step. Other threads wait for its end; the module itself, on its way, finds what it has so far."""
        with self._lock:
            if self._begun:
                return
            self._begun = True
            try:
                self._loader.exec_module(module)
            except BaseException:
                self._begun = False
                raise
            module.__class__ = ModuleType
            del _waiting[module.__name__]


_waiting: Final[dict[str, _Later]] = {}


class _Finder:
    """Finds those that are put off, before anybody else does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the import system would, but with two steps."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _PUT_OFF else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)  # type: ignore[assignment]  # has its methods, and not its ancestors
        return spec


def put_off() -> None:
    """Call this before anything imports them; what is loaded already stays as it is."""
    sys.meta_path.insert(0, _Finder())
