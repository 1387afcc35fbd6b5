"""Installs every peer into a place of its own below ``bench/work/peers``; nothing outside is changed.

Python peers get a virtual environment each, pm2 a ``node_modules``, s6 and runit are unpacked from Debian's packages
without being installed (no maintainer script runs, no service is enabled). What cannot be had is reported and skipped.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.places import PEERS

_PYTHON_PEERS = {
    "supervisor": ["supervisor>=4.3", "setuptools<81"],  # it still imports pkg_resources
    "circus": ["circus>=0.19"],
    "workerdeck": ["workerdeck>=0.1"],
    "honcho": ["honcho>=2"],
}
_DEBIAN_PEERS = {
    "s6": (["s6", "execline"], "usr/bin/s6-svscan"),
    "runit": (["runit"], "usr/bin/runsvdir"),
}


def install_peers(say: Callable[[str], None]) -> None:
    """Install what is missing; a peer that cannot be installed costs its own column only."""
    PEERS.mkdir(parents=True, exist_ok=True)
    for name, packages in _PYTHON_PEERS.items():
        _attempt(name, PEERS / name / "installed", partial(_python, name, packages), say)
    for name, (packages, program) in _DEBIAN_PEERS.items():
        _attempt(name, PEERS / name / program, partial(_debian, name, packages), say)
    _attempt("pm2", PEERS / "pm2/node_modules/.bin/pm2", partial(_npm, "pm2", "pm2@7"), say)


def _attempt(name: str, proof: Path, install: Callable[[], None], say: Callable[[str], None]) -> None:
    if proof.exists():
        return
    say(f"installing {name}")
    try:
        install()
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or ""
        say(f"{name} could not be installed and is left out: {error} {str(detail)[-300:]}")


def _python(name: str, packages: list[str]) -> None:
    place = PEERS / name
    shutil.rmtree(place, ignore_errors=True)
    # Without a pip of its own: to unpack that takes longer than the peer.
    _run([sys.executable, "-m", "venv", "--without-pip", str(place)])
    _run([sys.executable, "-m", "pip", "--python", str(place / "bin/python"), "install", "--quiet", *packages])
    (place / "installed").touch()


def _debian(name: str, packages: list[str]) -> None:
    place = PEERS / name
    place.mkdir(parents=True, exist_ok=True)
    wanted = sorted({*packages, *_libraries(packages)})
    _run(["apt-get", "download", *wanted], place)
    for archive in place.glob("*.deb"):
        _run(["dpkg", "-x", str(archive), str(place)])
    if name == "s6":
        _make_relocatable(place / "usr/bin/s6-svscan")


def _make_relocatable(scanner: Path) -> None:
    """Debian's s6-svscan runs ``/usr/bin/s6-supervise``; ours is not there, and we install nothing system-wide.

    The scanner has the scan directory as its working directory, so a relative path of the same length, padded with
    NUL, leads to a ``bin`` link that the driver puts beside the scan directory.
    """
    absolute, relative = b"/usr/bin/s6-supervise", b"../bin/s6-supervise"
    program = scanner.read_bytes()
    scanner.write_bytes(program.replace(absolute, relative.ljust(len(absolute), b"\0")))


def _libraries(packages: list[str]) -> set[str]:
    """The small libraries of the skarnet family; everything else is the C library, which is there."""
    listed = _run(["apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests", *packages])
    names = {line.strip() for line in listed.splitlines() if line and not line.startswith(" ")}
    return {name for name in names if name.startswith(("libskarnet", "libs6", "libexecline"))}


def _npm(name: str, package: str) -> None:
    place = PEERS / name
    place.mkdir(parents=True, exist_ok=True)
    _run(["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(place), package])


def _run(command: list[str], directory: Path | None = None) -> str:
    done = subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout
