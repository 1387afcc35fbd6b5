"""What a power cut would have taken at each moment, read from a process's own system calls.

``strace`` writes down every write, sync, rename and mkdir of an owner and every line that it says. :func:`walk` goes
through them as a disk would that forgets whatever was not flushed: a write makes a file unsynced, a rename or mkdir its
directory, a sync that has *returned* makes it safe again. So "an answer survives a power cut" is seen without a cut.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CALLS = "write,pwrite64,fdatasync,fsync,rename,renameat,renameat2,mkdir,mkdirat"
_LINE = re.compile(r"(?P<pid>\d+) +(?P<at>\d+\.\d+) (?P<rest>.*)")
_CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)")
_FD = re.compile(r"\d+<(?P<path>[^>]*)>")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Said:
    """One line that the traced process said, when, and what was not on the disk at that moment."""

    at: float
    text: str
    unsynced: frozenset[str]


@dataclass(frozen=True)
class Sync:
    """A sync that returned: of what, when, and since when it had been due."""

    path: str
    at: float
    written_at: float | None


def command(trace: Path, *words: str) -> list[str]:
    """The command line that runs ``words`` under strace."""
    return ["strace", "-f", "-y", "-ttt", "-s", "400", "-o", str(trace), "-e", f"trace={CALLS}", *words]


def walk(trace: Path, state: Path) -> Iterator[Said | Sync]:
    """What was said and synced, in order; only files below ``state`` count."""
    dirty: dict[str, float] = {}
    unfinished: dict[str, str] = {}
    for line in trace.read_text(errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        pid, at, rest = match["pid"], float(match["at"]), match["rest"]
        if rest.endswith("<unfinished ...>"):
            unfinished[pid] = rest
            if not rest.startswith(("fsync", "fdatasync")):
                yield from _entered(rest, at, state, dirty)
            continue
        if rest.startswith("<..."):
            begun = unfinished.pop(pid, "")
            if begun.startswith(("fsync", "fdatasync")):
                yield from _synced(begun, at, dirty)
            continue
        yield from _entered(rest, at, state, dirty)
        if rest.startswith(("fsync", "fdatasync")):
            yield from _synced(rest, at, dirty)


def _entered(rest: str, at: float, state: Path, dirty: dict[str, float]) -> Iterator[Said]:
    match = _CALL.match(rest)
    if match is None:
        return
    name, arguments = match["name"], match["arguments"]
    if name in {"write", "pwrite64"}:
        fd = _FD.match(arguments)
        quoted = _QUOTED.search(arguments)
        if arguments.startswith("1<") and quoted is not None:
            yield Said(at, quoted[1], frozenset(dirty))
        elif fd is not None and fd["path"].startswith(str(state)):
            dirty.setdefault(fd["path"], at)
    elif name.startswith(("rename", "mkdir")):
        folder = _FD.match(arguments)
        for name in _QUOTED.findall(arguments)[-1:]:
            path = name if folder is None else f"{folder['path']}/{name}"
            if path.startswith(str(state)):
                dirty.setdefault(str(Path(path).parent), at)


def _synced(rest: str, at: float, dirty: dict[str, float]) -> Iterator[Sync]:
    fd = _FD.search(rest)
    if fd is not None:
        yield Sync(fd["path"], at, dirty.pop(fd["path"], None))
