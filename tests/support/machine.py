"""The virtual machine of ``scripts/machine``, from outside: commands by ssh, its power switch and its disk."""

import contextlib
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

Cut: TypeAlias = int | Literal["all", "none", "sysrq"]
"""What the disk loses of what was not flushed: a number chooses some of it. ``sysrq``: the kernel resets."""

SCRIPT = Path(__file__).parents[2] / "scripts" / "machine"

BOOT_SECONDS = 900
COMMAND_SECONDS = 600
SUITE_SECONDS = 6000
LISTENS = "machine: sshd listens"
"""What the machine says on its console then; see scripts/machine."""


class Machine:
    """One that runs. Everything in it is slow, so every deadline here is long and none sets the pace."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def ssh(self, user: str = "root") -> list[str]:
        """The words that lead inside."""
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "ConnectTimeout=60", "BatchMode=yes"]
        words = ["ssh", "-q", "-F", "/dev/null", "-i", str(self._run / "key"), "-p", (self._run / "port").read_text()]
        for option in [*options, "ServerAliveInterval=10", "ServerAliveCountMax=30"]:
            words += ["-o", option]
        return [*words, f"{user}@127.0.0.1"]

    def run(self, command: str, *, user: str = "root", check: bool = True, given: str | None = None) -> str:
        """Run a shell command inside; returns what it printed."""
        done = subprocess.run(
            [*self.ssh(user), command],
            input=given if given is not None else "",
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=COMMAND_SECONDS,
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def python(self, program: str, *words: str, user: str = "root") -> Any:
        """Run a program inside that prints JSON, and return what it means."""
        return json.loads(self.run(shlex.join(["/opt/venv/bin/python", "-", *words]), user=user, given=program))

    def suite(self, command: str, *, user: str = "root") -> str:
        """Run what takes long, whoever hangs up meanwhile; returns what it printed, its exit code last."""
        log = f"/tmp/suite-{secrets.token_hex(4)}"
        kept = shlex.quote(f"{command}; echo ended $?")
        self.run(f"(setsid sh -c {kept} >{log} 2>&1 </dev/null &)", user=user)
        self.until("the suite ends", lambda: "ended" in self.run(f"tail -n 1 {log}"), SUITE_SECONDS)
        return self.run(f"cat {log}")

    def until(self, what: str, fact: Callable[[], bool], seconds: float = COMMAND_SECONDS) -> None:
        """Look again until it is so: another machine gives no event that we could wait for."""
        deadline = time.monotonic() + seconds
        while not fact():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
            time.sleep(1)

    def wait_up(self, other_than: str | None = None) -> None:
        """Until ssh lets us in, in another boot than the named one."""

        def up() -> bool:
            try:
                return self.boot_id() not in {"", other_than}
            except subprocess.TimeoutExpired:
                return False

        self.until("the machine boots", up, BOOT_SECONDS)

    def boot_id(self) -> str:
        """Which boot this is; empty while nobody answers."""
        return self.run("cat /proc/sys/kernel/random/boot_id", check=False).strip()

    def reboot(self) -> None:
        """As systemd does it."""
        before, listened = self.boot_id(), self._times_listened()
        self.run("systemctl reboot", check=False)
        # Whoever knocks earlier waits for qemu's network to knock again, ever later.
        self.until("sshd listens", lambda: self._times_listened() > listened, BOOT_SECONDS)
        self.wait_up(other_than=before)

    def _times_listened(self) -> int:
        return (self._run / "console").read_text(errors="replace").count(LISTENS)

    @contextlib.contextmanager
    def at_work(self, *, cold: bool, **given: Any) -> Iterator[IO[str]]:
        """Switch on the deck at work (``scripts/machine power``), by way of its kernel if ``cold``; what it says."""
        self._disk("on")
        subprocess.run([SCRIPT, "on", *(["--cold"] if cold else [])], check=True, timeout=BOOT_SECONDS)
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(BOOT_SECONDS)
            line.connect(str(self._run / "line"))
            with line.makefile("rw", errors="replace") as lines:
                self._monitor("cont")
                if cold:
                    lines.readline()  # it is ready; the one whose memory was kept said so long ago
                lines.write(json.dumps({"at": time.time(), "chance": secrets.token_hex(32), **given}) + "\n")
                lines.flush()
                yield lines

    def switch_off(self, how: Cut, line: IO[str]) -> int:
        """End what is at work, dead; returns how many blocks that were not flushed are gone."""
        pid = int((self._run / "qemu.part").read_text().split()[0])
        if how == "sysrq":
            line.write("b\n")
            line.flush()
            self.until("the kernel resets, and qemu ends with it", lambda: not _is_alive(pid))
        else:
            os.kill(pid, signal.SIGSTOP)  # not by its monitor, which would flush first; from here on nothing is told
        lost = self._disk(f"off {'none' if how == 'sysrq' else how}")
        subprocess.run([SCRIPT, "off"], check=True, timeout=COMMAND_SECONDS)
        subprocess.run(["cp", "--sparse=always", self._run / "data.img", self._run / "cut.img"], check=True)
        return lost

    def keep_disk(self, name: str) -> Path:
        """The disk as the last cut left it, put where it outlives the machine: a fault has a cause to be found."""
        kept = self._run.with_name(f"{self._run.name}-{name}.img")
        return (self._run / "cut.img").replace(kept)

    def _disk(self, order: str) -> int:
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(60)
            control.connect(str(self._run / "disk.ctl"))
            control.sendall(order.encode() + b"\n")
            return int(control.makefile().readline().split()[0])

    def _monitor(self, order: str) -> None:
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(60)
            monitor.connect(str(self._run / "qmp"))
            lines = monitor.makefile("rw")
            for words in ("qmp_capabilities", order):
                lines.readline()  # the greeting, then the answer to the order before
                lines.write(json.dumps({"execute": words}) + "\n")
                lines.flush()
            while "return" not in json.loads(lines.readline()):
                pass  # events in between


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def from_environment() -> Machine | None:
    """The machine that ``scripts/machine test`` has booted."""
    run = os.environ.get("EVERDECK_MACHINE")
    return None if run is None else Machine(Path(run))
