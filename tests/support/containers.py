"""The container recipe of the docs, run by runc: a bundle made from this machine's own root, without an image.

The root is an overlay over ``/`` (its upper half in memory), so everything that is installed here is in the container
and nothing that the container does stays. What the recipe says (user, directory, volume, health check, stop signal, the
command) is read from its page.

See the OCI runtime specification, config.md, and runc(8).
"""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.repo_examples import ROOT, examples_of
from support.waiting import until

UID = 12_345
PAGE = ROOT / "docs" / "how-to" / "run-in-a-container.md"
_NEEDED = (Path(sys.prefix), Path(sys.base_prefix), ROOT / "src")
_UNIFIED = Path("/sys/fs/cgroup/unified")
_KEPT_BY_ENGINES = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP"]


class Recipe:
    """What the page's Containerfile says about running."""

    def __init__(self) -> None:
        blocks = {block.file: block.text for block in examples_of(PAGE) if block.file is not None}
        self.config = blocks["everdeck.toml"]
        said: dict[str, str] = {}
        for line in blocks["Containerfile.bots"].splitlines():
            word, _, rest = line.partition(" ")
            said[word] = rest
        self.user, self.directory, self.volume = said["USER"], said["WORKDIR"], said["VOLUME"]
        self.stop_signal = said["STOPSIGNAL"].removeprefix("SIG")
        self.health = json.loads(said["HEALTHCHECK"].removeprefix("CMD "))
        self.command = json.loads(said["ENTRYPOINT"]) + json.loads(said["CMD"])


class Container:
    """One container of the recipe: ``runc run`` in the foreground, so its exit code is the container's."""

    def __init__(
        self,
        place: Path,
        recipe: Recipe,
        *,
        root: bool = False,
        proc_sys: bool = True,
        cgroup: Path | None = None,
        command: list[str] | None = None,
    ) -> None:
        self.recipe = recipe
        self.id = f"everdeck-{os.getpid()}-{place.name}"
        self.state = place / "volume"
        self._runc = ["runc", "--root", str(place / "runc")]
        self._log = place / "log"
        said = _config(place, recipe, root=root, proc_sys=proc_sys, cgroup=cgroup, command=command)
        (place / "config.json").write_text(json.dumps(said))
        words = [*self._runc, "run", "--bundle", str(place), self.id]
        if cgroup is not None:  # who is in it when the cgroup namespace is made has it as its root
            words = ["sh", "-c", f"echo $$ > {cgroup}/cgroup.procs && exec {shlex.join(words)}"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def said(self) -> str:
        """Everything that it printed so far."""
        return self._log.read_text()

    def is_up(self) -> bool:
        """Is the daemon ready? Fails at once when the container ended."""
        assert self.process.poll() is None, self.said
        return "supervising" in self.said

    def runs(self, *words: str, code: int = 0) -> str:
        """A command inside, as ``podman exec`` runs it."""
        done = subprocess.run(
            [*self._runc, "exec", self.id, *words], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def types(self, *words: str, code: int = 0) -> str:
        """An ``everdeck`` command inside."""
        return self.runs("everdeck", "--state", self.recipe.volume, *words, code=code)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Every worker by its name."""
        return {one["name"]: one for one in json.loads(self.types("ps", "--json"))["workers"]}

    def zombies(self) -> list[str]:
        """The dead inside that nobody has reaped."""
        listed = self.runs("sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null || true")
        return [line for line in listed.splitlines() if line.rpartition(")")[2].split()[:1] == ["Z"]]

    def stop(self) -> int:
        """The stop signal of the recipe; returns the exit code."""
        subprocess.run([*self._runc, "kill", self.id, self.recipe.stop_signal], check=True, capture_output=True)
        return self.process.wait(60)

    def end(self) -> None:
        """Whatever it does: afterwards it is gone."""
        subprocess.run([*self._runc, "delete", "--force", self.id], check=False, capture_output=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Engine:
    """A root and a volume; containers come and go."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.recipe = Recipe()
        self._containers: list[Container] = []

    def run(self, **options: Any) -> Container:
        """A container of the recipe, the one before being gone; returns when its daemon is ready or it has ended."""
        container = self.begin(**options)
        until(container.is_up, "the daemon did not come up")
        return container

    def begin(self, **options: Any) -> Container:
        """The same without waiting."""
        owner = (0, 0) if options.get("root") else (UID, UID)
        os.chown(self.place / "volume", *owner)
        container = Container(self.place, self.recipe, **options)
        self._containers.append(container)
        return container

    def end(self) -> None:
        """Nothing is left running."""
        for container in self._containers:
            container.end()


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """Everything that a container needs, and nothing of it afterwards."""
    if os.geteuid() != 0 or shutil.which("runc") is None:
        pytest.skip("needs root and runc (Debian package runc)")
    place = Path(tempfile.mkdtemp(prefix="everdeck-container-"))
    place.chmod(0o755)
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, place, ignore_errors=True)
        _mount(undo, place, "-t", "tmpfs", "none")
        place.chmod(0o755)
        for part in ("upper", "work", "rootfs", "volume", "runc"):
            (place / part).mkdir()
        overlay = f"lowerdir=/,upperdir={place}/upper,workdir={place}/work"
        _mount(undo, place / "rootfs", "-t", "overlay", "-o", overlay, "overlay")
        made = Engine(place)
        _furnish(place / "rootfs", made.recipe)
        undo.callback(made.end)
        yield made


@contextlib.contextmanager
def delegated_cgroup() -> Iterator[Path]:
    """A cgroup of version 2 that is a container's own; the kernel must have one beside the controllers of version 1."""
    if not (_UNIFIED / "cgroup.procs").exists():
        pytest.skip(f"needs a cgroup v2 hierarchy at {_UNIFIED}, which runc leaves alone")
    own = Path(tempfile.mkdtemp(prefix="everdeck-container-", dir=_UNIFIED))
    try:
        yield own
    finally:
        (own / "cgroup.kill").write_text("1")
        until(lambda: "populated 0" in (own / "cgroup.events").read_text(), "the cgroup is not empty")
        for inner in sorted((path for path in own.rglob("*") if path.is_dir()), reverse=True):
            inner.rmdir()
        own.rmdir()


def _mount(undo: contextlib.ExitStack, at: Path, *words: str) -> None:
    done = subprocess.run(["mount", *words, str(at)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system for a container can be mounted here: {done.stderr.strip()}")
    undo.callback(subprocess.run, ["umount", "-l", str(at)], check=False, capture_output=True)


def _furnish(root: Path, recipe: Recipe) -> None:
    """What the recipe's build does: the account, and the files in its directory. The packages are there already."""
    with (root / "etc" / "passwd").open("a") as accounts:
        accounts.write(f"{recipe.user}:x:{UID}:{UID}::/home/{recipe.user}:/bin/sh\n")
    for directory in (recipe.directory, recipe.volume):
        (root / directory.lstrip("/")).mkdir(parents=True, exist_ok=True)
    (root / recipe.directory.lstrip("/") / "everdeck.toml").write_text(recipe.config)
    # In the container's copy only: the interpreter may be in a home that is nobody else's.
    for needed in _NEEDED:
        (root / str(needed).lstrip("/")).mkdir(parents=True, exist_ok=True)  # it may lie on another file system
        for above in (needed, *needed.parents):
            inside = root / str(above).lstrip("/")
            if inside.stat().st_mode & 0o005 != 0o005:
                inside.chmod(inside.stat().st_mode | 0o055)


def _config(
    place: Path, recipe: Recipe, *, root: bool, proc_sys: bool, cgroup: Path | None, command: list[str] | None
) -> dict[str, Any]:
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    capabilities = _KEPT_BY_ENGINES if root else []
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=1777"]},
        {"destination": recipe.volume, "type": "bind", "source": str(place / "volume"), "options": ["bind", "rw"]},
        {"destination": "/sys", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
    ]
    for needed in _NEEDED:
        there = {"destination": str(needed), "type": "bind", "source": str(needed), "options": ["rbind", "ro"]}
        mounts.append(there)
    if cgroup is not None:
        own = {"destination": "/sys/fs/cgroup", "type": "bind", "source": str(cgroup), "options": ["bind", "rw"]}
        mounts.append(own)
    namespaces = ["pid", "mount", "ipc", "uts", "network", *(["cgroup"] if cgroup is not None else [])]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0} if root else {"uid": UID, "gid": UID},
            "args": command or recipe.command,
            "env": [f"PATH={path}", f"HOME=/home/{recipe.user}"],
            "cwd": recipe.directory,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "bots",
        "mounts": mounts,
        "linux": {
            "cgroupsPath": f"/everdeck-{os.getpid()}-{place.name}",
            "namespaces": [{"type": kind} for kind in namespaces],
            "maskedPaths": ["/proc/kcore", "/proc/keys", *([] if proc_sys else ["/proc/sys"])],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq"],
        },
    }
