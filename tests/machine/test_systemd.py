"""The exported units, really installed: workers stay through every end of the daemon, once each, with their limits."""

import json
import time
from typing import Any

import pytest

from support.machine import Machine

STATE = "/var/lib/everdeck"
LIMITED = """
import json, sys
from everdeck import Deck, Limits, Restart
forever = ["sh", "-c", "exec sleep 100000"]
hog = ["/opt/venv/bin/python", "-SEc", "x = []\\nwhile 1: x.append(bytearray(1 << 20))"]
with Deck(sys.argv[1]) as deck:
    deck.start("stays", forever, limits=Limits(memory_bytes=64 << 20, cpu_percent=20, pids=20))
    deck.stop("byhand")  # which the unit's file has started
    deck.start("hog", hog, limits=Limits(memory_bytes=48 << 20), restart=Restart("never"))
    family = ["sh", "-c", '"$@"; exec sleep 100000', "sh", *hog]
    deck.start("family", family, limits=Limits(memory_bytes=48 << 20))
    told = {}
    for event in deck.follow(after=0):
        if event.kind in ("crashed", "killed"):
            told.setdefault(event.worker, []).append([str(event.kind), event.detail])
        if any(kind == "crashed" for kind, _ in told.get("hog", [])) and "family" in told:
            break
    status = {one.name: [str(one.state), one.pid, str(one.containment), str(one.exit), one.health_reason]
              for one in deck.list()}
print(json.dumps({"told": told, "status": status}))
"""
SHARED = """
import json, sys, time
from pathlib import Path
from everdeck import Deck, Limits
busy = ["/opt/venv/bin/python", "-SEc", "while 1: pass"]
fork = "import os,time\\nfor _ in range(30):\\n try: os.fork() or time.sleep(9e4)\\n except: 0\\ntime.sleep(9e4)"
with Deck(sys.argv[1]) as deck:
    deck.start("busy", busy, limits=Limits(cpu_percent=20))
    deck.start("bomb", ["/opt/venv/bin/python", "-SEc", fork], limits=Limits(pids=10))
    home = Path("/sys/fs/cgroup" + Path("/proc/%d/cgroup" % deck.status("busy").pid).read_text().strip()[3:])
    spent = lambda: int((home / "cpu.stat").read_text().split()[1])
    begun, before = time.monotonic(), spent()
    time.sleep(20)
    share = (spent() - before) / 1e4 / (time.monotonic() - begun)
    bomb_home = home.parent / "bomb"
    most = int((bomb_home / "pids.current").read_text())
    refused = int((bomb_home / "pids.events").read_text().split()[1])
    deck.remove("busy")
    deck.remove("bomb")
print(json.dumps({"share": share, "most": most, "refused": refused}))
"""
START = """
import json, sys
from everdeck import Deck
with Deck(sys.argv[1]) as deck:
    print(json.dumps(deck.start("{name}", ["sleep", "100000"]).pid))
"""
LOOK = """
import json, sys
from everdeck import Deck
with Deck(sys.argv[1]) as deck:
    print(json.dumps({one.name: [str(one.state), one.pid, one.adopted] for one in deck.list()}))
"""
KNOCK = """
import http.client, json, os, socket, sys
state = sys.argv[1]
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(state + "/http.sock")
def code(connection):
    connection.request("GET", "/healthz")
    return connection.getresponse().status
print(json.dumps({"unix": code(Unix("deck", timeout=500)),
                  "tcp": code(http.client.HTTPConnection("127.0.0.1", 8787, timeout=500)),
                  "file": os.stat(state + "/http.sock").st_ino}))
"""
HERE = """
import json, sys
from everdeck import Deck, Limits
from everdeck.errors import LimitUnavailable
from everdeck.kernel.containment import own_cgroup
limits = Limits(memory_bytes=64 << 20, cpu_percent=20, pids=20)
with Deck(sys.argv[1]) as deck:
    try:
        deck.start("limited", ["sleep", "1000"], limits=limits)
        why = None
    except LimitUnavailable as error:
        why = str(error)
    strength = str(deck.start("plain", ["sleep", "1000"]).containment)
    deck.stop_all()
print(json.dumps({"why": why, "strength": strength, "type": (own_cgroup() / "cgroup.type").read_text().strip()}))
"""
INTERFACES = "import socket, json; print(json.dumps(socket.if_nameindex() != []))"


class Unit:
    """One installed unit: of the system for root or ``--run-as`` another account, or of a user's own manager."""

    def __init__(self, machine: Machine, whose: str = "system", file: str = "") -> None:
        self._machine = machine
        self.user = "root" if whose == "system" else "bots"
        self.state = {"system": STATE, "run-as": "/var/lib/decks/bots", "user": "/home/bots/deck"}[whose]
        self._words = {"system": "", "run-as": "--run-as bots", "user": "--user"}[whose]
        self._administrator = "bots" if whose == "user" else "root"
        self._manager = "systemctl --user" if whose == "user" else "systemctl"
        self._folder = "~/.config/systemd/user" if whose == "user" else "/etc/systemd/system"
        if whose == "user":
            machine.run("loginctl enable-linger bots")
        self.install(file)

    def install(self, words: str, kind: str = "service") -> None:
        """As the documentation says it."""
        words = f"{words} {self._words} --state {self.state} -o {self._folder}/everdeck.{kind}"
        self._run(f"mkdir -p {self._folder} && everdeck export systemd {words}", self._administrator)
        self.systemctl("daemon-reload")

    def run(self, command: str) -> str:
        """As whoever the daemon runs as."""
        return self._run(command, self.user)

    def _run(self, command: str, user: str) -> str:
        return self._machine.run(f"export XDG_RUNTIME_DIR=/run/user/$(id -u); {command}", user=user)

    def systemctl(self, words: str) -> str:
        """Of the unit's manager."""
        return self._run(f"{self._manager} {words}", self._administrator)

    def look(self) -> Any:
        """The deck's workers: state, pid, adopted."""
        return self._machine.python(LOOK, self.state, user=self.user)

    def pid(self) -> int:
        """The daemon's."""
        return int(self.systemctl("show -p MainPID --value everdeck"))

    def is_active(self) -> bool:
        """Does its manager call it so?"""
        return self.systemctl("show -p ActiveState --value everdeck") == "active\n"

    def limit(self) -> str:
        """What the kernel has as the memory limit of the worker that stays."""
        unit = self.systemctl("show -p ControlGroup --value everdeck").strip()
        return self.run(f"cat /sys/fs/cgroup{unit}/everdeck-*/stays/memory.max").strip()


def doctored(machine: Machine, state: str, user: str) -> dict[str, Any]:
    """What the doctor says of the daemon of a deck, asked from a session by ssh: its strength, and what it lacks."""
    told = json.loads(machine.run(f"everdeck --state {state} doctor --json", user=user, check=False))
    lacking = [one["name"] for one in told["features"] if "cgroup" in one["name"] and not one["present"]]
    return {"containment": told["containment"], "lacking": lacking}


@pytest.mark.parametrize("whose", ["system", "run-as", "user"])
def test_workers_and_their_limits_outlive_every_end_of_the_daemon(machine: Machine, whose: str) -> None:
    """Start, limits, a lack of memory, reload, restart, stop, kill -9, reboot: one copy each; the stopped stay so."""
    machine.run("cat >/etc/everdeck.toml", given='[worker.byhand]\ncommand = ["sleep", "100000"]\n')
    unit = Unit(machine, whose, "/etc/everdeck.toml")
    unit.systemctl("enable --now everdeck")
    seen = machine.python(LIMITED, unit.state, user=unit.user)
    status, told = seen["status"], seen["told"]
    assert status["stays"][2] == status["family"][2] == "cgroup"
    assert status["hog"][3] == "killed by SIGKILL (out of memory)"
    assert told["hog"][-1][1]["exit"]["oom"] is True
    assert told["family"][0][0] == "killed"
    assert "out of memory" in status["family"][4]
    assert unit.limit() == str(64 << 20)
    pid = status["stays"][1]

    daemon = unit.pid()
    unit.systemctl("reload everdeck")
    assert unit.pid() == daemon
    unit.systemctl("restart everdeck")
    assert unit.pid() != daemon
    after = unit.look()
    assert after["stays"] == ["running", pid, True]
    assert after["byhand"][:2] == ["stopped", None]
    assert unit.limit() == str(64 << 20)

    unit.systemctl("stop everdeck")
    assert unit.run(f"cat /proc/{pid}/comm") == "sleep\n"
    unit.systemctl("start everdeck")
    assert unit.look()["stays"] == ["running", pid, True]

    daemon = unit.pid()
    unit.run(f"kill -9 {daemon}")
    machine.until("the next daemon", lambda: unit.pid() not in {0, daemon} and unit.is_active())
    assert unit.look()["stays"] == ["running", pid, True]
    assert unit.limit() == str(64 << 20)

    machine.reboot()
    machine.until("the unit is up", unit.is_active)
    after = unit.look()
    assert after["stays"][0] == after["family"][0] == "running"
    assert after["byhand"][:2] == ["stopped", None]
    assert machine.run("pgrep -cf 'slee[p] 100000'", check=False).strip() == "2"  # stays, family: one each
    machine.python(LOOK.replace("print", "deck.stop_all(); print"), unit.state, user=unit.user)
    unit.systemctl("disable --now everdeck")


def test_processor_and_processes_are_limited(machine: Machine) -> None:
    """A busy worker gets its share and no more; one that forks without end stops at its number, and only it."""
    unit = Unit(machine)
    unit.systemctl("start everdeck")
    seen = machine.python(SHARED, STATE)
    print(seen)
    assert 10 < seen["share"] < 22
    assert 0 < seen["most"] <= 10
    assert seen["refused"] > 0
    unit.systemctl("stop everdeck")


@pytest.mark.parametrize("user", ["root", "bots"])
def test_a_session_without_delegation_is_told_the_command_that_delegates(machine: Machine, user: str) -> None:
    """A limit is refused and nothing is broken by the attempt; the command of the refusal, as it stands, gives all."""
    state = f"/tmp/session-{user}"
    machine.run("loginctl enable-linger bots")
    here = machine.python(HERE, state, user=user)
    assert here["strength"] == ("cgroup" if user == "root" else "cookie")
    assert here["type"] == "domain", "no threaded cgroup, in which no worker could be born"
    command = here["why"].rsplit("by hand: ", 1)[1]
    assert command.startswith("systemd-run ")
    machine.run(
        f"export XDG_RUNTIME_DIR=/run/user/$(id -u); (setsid {command} --state {state} --no-http >{state}.log 2>&1 "
        f"</dev/null &); until grep -q supervising {state}.log; do sleep 1; done",
        user=user,
    )
    assert doctored(machine, state, user) == {"containment": "cgroup", "lacking": []}
    there = machine.python(HERE, state, user=user)
    assert (there["why"], there["strength"]) == (None, "cgroup")
    machine.run(f"everdeck --state {state} down", user=user)


@pytest.mark.parametrize("whose", ["system", "run-as"])
def test_the_system_unit_is_hardened_and_its_workers_work(machine: Machine, whose: str) -> None:
    """No worse than 4 by systemd's own count; a worker may ask for the network's interfaces."""
    unit = Unit(machine, whose)
    unit.systemctl("start everdeck")
    told = machine.run("systemd-analyze security everdeck --no-pager")
    assert float(told.rsplit("everdeck.service:", 1)[1].split()[0]) <= 4
    program = json.dumps(["/opt/venv/bin/python", "-SEc", INTERFACES])
    said = machine.python(
        "import json, sys\nfrom everdeck import Deck\nwith Deck(sys.argv[1]) as deck:\n"
        f"    deck.start('asks', {program})\n"
        "    for event in deck.follow(after=0):\n"
        "        if event.worker == 'asks' and event.kind in ('exited', 'crashed'): break\n"
        "    print(json.dumps(deck.logs('asks', lines=5)))\n",
        unit.state,
        user=unit.user,
    )
    assert any("true" in line for line in said)
    unit.systemctl("stop everdeck")


def test_a_hung_daemon_is_replaced_and_a_slow_one_is_not(machine: Machine) -> None:
    """The unit's own watchdog, at its own time: a twentieth of a processor is slow, a loop that stands is hung."""
    unit = Unit(machine)
    unit.systemctl("start everdeck")
    pid = machine.python(START.format(name="watched"), STATE)
    daemon = unit.pid()
    seconds = 60 * int(unit.systemctl("show -p WatchdogUSec --value everdeck").strip().removesuffix("min"))
    unit.systemctl("set-property --runtime everdeck CPUQuota=5%")
    watched = time.monotonic() + 1.5 * seconds
    while time.monotonic() < watched:
        unit.look()
    assert unit.pid() == daemon
    unit.systemctl("set-property --runtime everdeck CPUQuota=")

    unit.run(f"kill -STOP {daemon}")
    machine.until("the next daemon", lambda: unit.pid() not in {0, daemon} and unit.is_active())
    assert "watchdog" in machine.run("journalctl -u everdeck -o cat --no-pager").lower()
    assert unit.look()["watched"] == ["running", pid, True]
    machine.python(LOOK.replace("print", "deck.stop_all(); print"), STATE)
    unit.systemctl("stop everdeck")


@pytest.mark.parametrize("whose", ["system"])
def test_systemd_listens_for_the_daemon(machine: Machine, whose: str) -> None:
    """The exported socket unit: the first connection starts the daemon, those during a restart wait for the next."""
    unit = Unit(machine, whose)
    unit.systemctl("stop everdeck")
    machine.run(f"rm -rf {unit.state}")  # whoever comes first makes it
    unit.install("--socket", "socket")
    unit.systemctl("start everdeck.socket")
    assert not unit.is_active()
    first = machine.python(KNOCK, unit.state, user=unit.user)
    assert (first["unix"], first["tcp"]) == (200, 200)
    assert unit.is_active()
    daemon = unit.pid()
    unit.systemctl("reload everdeck")
    assert machine.python(KNOCK, unit.state, user=unit.user) == first
    assert unit.pid() == daemon

    unit.systemctl("--no-block restart everdeck")
    assert machine.python(KNOCK, unit.state, user=unit.user) == first, "the same sockets, and nobody was turned away"
    unit.systemctl("stop everdeck")
    assert machine.python(KNOCK, unit.state, user=unit.user) == first
    unit.systemctl("stop everdeck.socket everdeck")


def test_the_journal_has_what_the_daemon_says_and_no_secret(machine: Machine) -> None:
    """Ready and stopping are told there and in `systemctl status`; the token is not."""
    unit = Unit(machine)
    unit.systemctl("start everdeck")
    assert "supervising" in unit.systemctl("show -p StatusText --value everdeck")
    unit.systemctl("stop everdeck")
    said = machine.run("journalctl -u everdeck -o cat --no-pager")
    assert "supervising" in said
    token = machine.run(f"cat {STATE}/token").strip()
    assert token
    assert token not in said
