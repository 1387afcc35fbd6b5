"""The first process of a worker's pod: nothing of the worker runs unless this pod holds the worker's Lease.

A node that is cut off goes on running its pods, and the cluster may start the same worker elsewhere. So before the
program is started the fence compares its pod's uid with the live pod of that name, takes the Lease, and from then on
must renew it. If it cannot, it asks the program to end, and kills everything in the pod before the Lease may be taken
by anybody else (:mod:`lease` says when). Then it goes on trying: a fence that gets its Lease back starts the
program again.

It relies on being process 1 of a pid namespace of its own, as a container's first process is: its death is the death
of everything in the pod, ``kill(-1, SIGKILL)`` reaches everything that is left, and every orphan is its child.
Anywhere else it refuses to run.

A fence that is stopped (SIGSTOP, a debugger) cannot kill anybody, so a second process stands beside it: the watchdog
reads the deadline from a piece of memory that both share, and kills when it passes. A fence that is continued
after that finds its deadline over, and so does the pod's deck, which looks at it before it starts the program.
Both count with CLOCK_BOOTTIME, which neither steps nor stands still during a suspend.

What the fence may do in the cluster is: read its own pod, read and update its own Lease. The state of the worker
travels in the Lease's annotations.

Standard library and our kernel layer only. See pid_namespaces(7), kill(2), memfd_create(2).
"""

import contextlib
import fcntl
import http.client
import json
import mmap
import os
import random
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from everdeck.cluster.lease import LONG_HELD_SECONDS, Seen, Terms, Watched, may_take_at, rest_after, watched
from everdeck.crashpoints import crash_point
from everdeck.kernel.identity import boottime
from everdeck.kernel.sleep import sleep_until

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
STATUS_ANNOTATION: Final = "everdeck.dev/status"
TOLD_ANNOTATION: Final = "everdeck.dev/told"
LEFT_ANNOTATION: Final = "everdeck.dev/left"
"""In the Lease: the uid of the pod that let go of it, when nothing was left in that pod but its fence."""
DEADLINE_FD_ENV: Final = "EVERDECK_FENCE_DEADLINE_FD"
REPORT_FD_ENV: Final = "EVERDECK_FENCE_REPORT_FD"
_DEADLINE: Final = struct.Struct("d")
_F_SEAL_FUTURE_WRITE: Final = 0x0010
_LOOK_AGAIN_SECONDS: Final = 1.0
_NOT_OURS: Final = 75  # EX_TEMPFAIL: this pod is not the worker's any more


# --- the deadline that three processes see ----------------------------------------------------------------------


class Deadline:
    """Until when the program may run, on CLOCK_BOOTTIME, in memory that is shared by inheriting its descriptor.

    Only who made it writes: it is sealed against others, since the program has the fence's own account and would find
    the descriptor below ``/proc/1/fd``. See F_SEAL_FUTURE_WRITE in fcntl(2).
    """

    def __init__(self, fd: int, *, writes: bool = False) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _DEADLINE.size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0))

    @classmethod
    def make(cls) -> "Deadline":
        """A new one, passed already."""
        fd = os.memfd_create("everdeck-deadline", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _DEADLINE.size)
        os.set_inheritable(fd, True)  # noqa: FBT003 - the call's own form
        made = cls(fd, writes=True)
        with contextlib.suppress(OSError):  # a kernel that is none (gVisor): then it is as open as it was
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return made

    @property
    def at(self) -> float:
        """When everything must be gone."""
        at: float = _DEADLINE.unpack_from(self._memory)[0]
        return at

    @at.setter
    def at(self, when: float) -> None:
        # Eight aligned bytes: a reader in another process sees the old value or the new one.
        _DEADLINE.pack_into(self._memory, 0, when)

    @property
    def passed(self) -> bool:
        """May nothing run any more?"""
        return boottime() >= self.at


def watchdog(deadline: Deadline) -> None:
    """Kill everything but ourselves and the fence when the deadline passes; for ever.

    It wakes once per duration while all is well. The fence is process 1 and our parent: when it dies, so do we.
    """
    killed = 0.0
    while True:
        at = deadline.at
        if at <= boottime() and at != killed:
            kill_everybody()
            killed = at
        # Passed and dealt with, or not yet there: only the fence makes it pass earlier, and that one then kills itself.
        sleep_until(at if at > boottime() else boottime() + _LOOK_AGAIN_SECONDS)


def kill_everybody() -> None:
    """SIGKILL for every process of this pid namespace but its first and the caller. Only inside of our own."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # noqa: TID251 - everybody in a pid namespace that is ours alone


# --- the cluster, as little of it as a fence needs --------------------------------------------------------------


class Refused(Exception):
    """The API server answered, and not with what was asked for."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:200]}")
        self.status = status


class Api:
    """HTTPS to the API server with the pod's own account. One connection, kept; every request has a deadline."""

    def __init__(self, seconds: float) -> None:
        self._host = os.environ["KUBERNETES_SERVICE_HOST"]
        self._port = int(os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
        self._seconds = seconds
        self._context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        self._connection: http.client.HTTPSConnection | None = None

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One request, within the time that one may take in all: a kept connection that went away is tried again."""
        ends = boottime() + self._seconds
        try:
            return self._ask(method, path, body, ends)
        except (ConnectionError, http.client.HTTPException):
            self.hang_up()
            if boottime() >= ends:
                raise
            return self._ask(method, path, body, ends)
        except OSError:
            self.hang_up()
            raise

    def hang_up(self) -> None:
        """Begin anew with the next request."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, method: str, path: str, body: Any, ends: float) -> Any:
        left = max(0.05, ends - boottime())
        if self._connection is None:
            self._connection = http.client.HTTPSConnection(self._host, self._port, timeout=left, context=self._context)
        elif self._connection.sock is not None:
            self._connection.sock.settimeout(left)
        # The token is a file that the kubelet replaces: read it each time.
        headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}", "Content-Type": "application/json"}
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status >= 300:  # noqa: PLR2004 - where HTTP's refusals begin
            raise Refused(answer.status, text.decode("utf-8", "replace"))
        return json.loads(text)


@dataclass(slots=True)
class Place:
    """Which pod this is, and which Lease is its worker's."""

    namespace: str
    pod: str
    uid: str
    lease: str
    node: str = ""

    @classmethod
    def of_environment(cls) -> "Place":
        """As the pod's manifest tells it."""
        return cls(
            namespace=os.environ["EVERDECK_NAMESPACE"],
            pod=os.environ["EVERDECK_POD"],
            uid=os.environ["EVERDECK_POD_UID"],
            lease=os.environ["EVERDECK_LEASE"],
            node=os.environ.get("EVERDECK_NODE", ""),
        )

    @property
    def holder(self) -> str:
        """How we sign."""
        return f"{self.pod}_{self.uid}"

    @property
    def pod_path(self) -> str:
        """The live pod of our name."""
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.pod}"

    @property
    def lease_path(self) -> str:
        """The worker's Lease."""
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/{self.lease}"


class NotOurs(Exception):
    """The live pod of our name is another one, or is being deleted: this one has nothing to run."""


# --- the fence --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Fence:
    """Holds the Lease, runs the pod's deck while it does, and ends everything when it may not any more."""

    place: Place
    terms: Terms
    api: Api
    command: list[str]
    deadline: Deadline
    _lease: dict[str, Any] | None = None
    _watch: Watched | None = None
    _owner: "subprocess.Popen[bytes] | None" = None  # noqa: TID251 - as where it is started
    _report: socket.socket | None = None
    _status: str | None = None
    _told: str | None = None
    _ending: bool = False
    _wake: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
    _watchdog: int = 0
    _renewed_at: float = 0.0
    _lost: bool = False
    _losses: int = 0
    _rests_until: float = 0.0

    def live(self) -> int:
        """Until the pod is to end; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked_to_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        try:
            while not self._ending:
                self._start_watchdog()
                if (rest := self._rests_until - boottime()) > 0:
                    self._wait(rest)
                    continue
                if not self._take():
                    continue
                crash_point("fence.taken")
                self._start_owner()
                started_at = boottime()
                lost = self._hold()
                self._rest(lost=lost, held_for=boottime() - started_at)
                if boottime() - started_at < _LOOK_AGAIN_SECONDS and not self._ending:
                    self._wait(_LOOK_AGAIN_SECONDS, quiet=True)  # a deck that cannot start is not tried in a circle
        except NotOurs as error:
            self._end_everything()
            say(f"this pod is not the worker's any more: {error}")
            return _NOT_OURS
        self._end_everything()
        self._let_go()
        return 0

    # --- taking ---------------------------------------------------------------------------------------------------

    def _take(self) -> bool:
        """Try to get the Lease; wait a little if it is not to be had now."""
        try:
            self._check_pod()
            lease = self.api.ask("GET", self.place.lease_path)
        except (OSError, Refused, http.client.HTTPException) as error:
            say(f"the API server does not answer: {error}")
            self._wait(_LOOK_AGAIN_SECONDS)
            return False
        self._watch = watched(self._watch, seen_in(lease), boottime())
        at = may_take_at(self._watch, self.place.holder, self.terms)
        if at > boottime():
            self._wait(min(at - boottime(), _LOOK_AGAIN_SECONDS))
            return False
        self._lease = lease
        return self._renew(taking=True)

    def _check_pod(self) -> None:
        """A healed node's old pod has a successor of the same name: only the live pod may take the Lease."""
        try:
            pod = self.api.ask("GET", self.place.pod_path)
        except Refused as refused:
            if refused.status == 404:  # noqa: PLR2004 - not found
                raise NotOurs("there is no pod of this name") from None
            raise
        if pod["metadata"]["uid"] != self.place.uid:
            raise NotOurs(f"the live pod is {pod['metadata']['uid']}, this one is {self.place.uid}")

    def _renew(self, *, taking: bool = False, again: bool = True) -> bool:
        """Write our name and the time into the Lease; the API server refuses if somebody else wrote meanwhile."""
        assert self._lease is not None  # noqa: S101 - taken before it is renewed
        sent_at = boottime()
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec = {
            **self._lease.get("spec", {}),
            "holderIdentity": self.place.holder,
            "leaseDurationSeconds": round(self.terms.duration),
            "renewTime": now,
        }
        if taking:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        annotations = dict(self._lease["metadata"].get("annotations") or {})
        annotations["everdeck.dev/node"] = self.place.node
        annotations.pop(LEFT_ANNOTATION, None)
        if self._status is not None:
            annotations[STATUS_ANNOTATION] = self._status
        if self._told is not None:
            annotations[TOLD_ANNOTATION] = self._told
        body = {**self._lease, "metadata": {**self._lease["metadata"], "annotations": annotations}, "spec": spec}
        try:
            self._lease = self.api.ask("PUT", self.place.lease_path, body)
        except Refused as refused:
            if refused.status == 409 and again:  # noqa: PLR2004 - written by somebody else since we read it
                return self._read_again(taking=taking)
            say(f"the Lease cannot be renewed: {refused}")
            return False
        except (OSError, http.client.HTTPException) as error:
            say(f"the Lease cannot be renewed: {error}")
            return False
        self.deadline.at = sent_at + self.terms.kill
        self._renewed_at = sent_at
        return True

    def _read_again(self, *, taking: bool) -> bool:
        """Somebody wrote it: an annotation for us (a verb), or a successor's name."""
        try:
            lease = self.api.ask("GET", self.place.lease_path)
        except (OSError, Refused, http.client.HTTPException) as error:
            say(f"the Lease cannot be read: {error}")
            return False
        if taking:
            return False
        if (holder := lease["spec"].get("holderIdentity")) != self.place.holder:
            # Nobody may take it before our time is over; but people can, by hand, and clocks of a machine that was
            # paused from outside have stood still. Whoever it was, it is not ours: nothing may run another moment.
            say(f"the Lease was taken from us by {holder or 'somebody who left it free'}")
            self.deadline.at = 0.0
            return False
        self._lease = lease
        return self._renew(again=False)

    # --- holding --------------------------------------------------------------------------------------------------

    def _rest(self, *, lost: bool, held_for: float) -> None:
        """After a Lease that was lost, and soon lost again."""
        if not lost or held_for >= LONG_HELD_SECONDS:
            self._losses = 0
        if lost:
            self._losses += 1
            rest = rest_after(self._losses, random.random())  # noqa: S311 - to be spread
            self._rests_until = boottime() + rest
            if rest:
                say(f"the Lease was lost {self._losses} times in a row; the next attempt is in {rest:.0f} s")

    def _hold(self) -> bool:
        """Renew until it cannot be done any more, then end what runs, in time; was the Lease lost?"""
        asked = troubled = False
        next_renewal = self._renewed_at + self.terms.renew
        while not self._ending:
            now = boottime()
            unrenewed = now - self._renewed_at
            if unrenewed >= self.terms.kill or self.deadline.passed or (asked and self._owner_is_gone()):
                break
            self._start_watchdog()  # it may have been killed: by the kernel for its memory, by the program
            if unrenewed >= self.terms.polite and not asked:
                say(f"not renewed for {unrenewed:.1f} s: the program is asked to end")
                self._ask_owner_to_end()
                asked = True
            if now >= next_renewal:
                renewed = self._renew()
                if renewed and troubled:
                    self._check_pod_quietly()  # we may have been away while a successor was made
                troubled = not renewed
                if renewed and asked:
                    break  # it is on its way out; it is started again when it is gone
                next_renewal = boottime() + (self.terms.renew if renewed else self.terms.renew / 4)
                continue
            if not asked and self._owner_is_gone():
                say("the pod's deck has ended; it is started again")
                break
            until = min(next_renewal, self._renewed_at + (self.terms.kill if asked else self.terms.polite))
            if self._wait(max(0.0, until - now)):
                next_renewal = min(next_renewal, boottime())  # news for the Lease
        if not self._ending:
            lost = self._lost = self.deadline.passed or boottime() - self._renewed_at >= self.terms.polite
            self._end_everything()
            self._lost = False
            return lost or asked
        return False

    def _check_pod_quietly(self) -> None:
        with contextlib.suppress(OSError, Refused, http.client.HTTPException):
            self._check_pod()

    def _start_owner(self) -> None:
        """The pod's deck. It looks at the deadline itself before it starts the program."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)  # noqa: FBT003 - the call's own form
        environment = {
            **os.environ,
            DEADLINE_FD_ENV: str(self.deadline.fd),
            REPORT_FD_ENV: str(theirs.fileno()),
        }
        # -P: what lies in the working directory is the worker's and not for us to import.
        words = [sys.executable, "-P", "-m", "everdeck.cluster.pod", "--", *self.command]
        self._owner = subprocess.Popen(  # noqa: TID251 - the fence is a process of its own below the deck
            words, env=environment, pass_fds=(self.deadline.fd, theirs.fileno()), start_new_session=True
        )
        theirs.close()
        self._report = ours
        crash_point("fence.owner-started")

    def _owner_is_gone(self) -> bool:
        return self._owner is None or self._owner.poll() is not None

    def _ask_owner_to_end(self) -> None:
        if self._owner is not None and self._owner.poll() is None:
            self._owner.send_signal(signal.SIGTERM)

    def _end_everything(self) -> None:
        """Politely as long as the Lease allows, then by SIGKILL; return when nobody of the pod is left."""
        self._ask_owner_to_end()
        polite_until = boottime() + self._grace()
        while not self._owner_is_gone() and boottime() < min(self.deadline.at, polite_until):
            # A Lease that can be renewed is: the program may take all of its grace.
            if boottime() - self._renewed_at >= self.terms.renew and not self._lost:
                self._lost = not self._renew()
            until = min(self.deadline.at, polite_until)
            if not self._lost:
                until = min(until, self._renewed_at + self.terms.renew)
            self._wait(until - boottime(), quiet=True)
        kill_everybody()  # the watchdog too: it is started again before anything else is
        while _reap_all():
            self._wait(0.05, quiet=True)
            kill_everybody()
        self._owner = None
        self._watchdog = 0
        self._hear()  # its last words
        self._hear_no_more()

    def _grace(self) -> float:
        return float(os.environ.get("EVERDECK_GRACE_SECONDS", "5")) + 2.0

    def _let_go(self) -> None:
        """Everything is gone: whoever comes next need not wait."""
        if self._lease is None:
            return
        with contextlib.suppress(OSError, Refused, http.client.HTTPException):
            lease = self.api.ask("GET", self.place.lease_path)
            if lease["spec"].get("holderIdentity") != self.place.holder:
                return
            annotations = lease["metadata"].setdefault("annotations", {})
            annotations[LEFT_ANNOTATION] = self.place.uid
            if self._status is not None:
                annotations[STATUS_ANNOTATION] = self._status
                annotations[TOLD_ANNOTATION] = self._told or "[]"
            lease["spec"]["holderIdentity"] = ""
            self.api.ask("PUT", self.place.lease_path, lease)

    # --- waiting --------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float, *, quiet: bool = False) -> bool:
        """Until something happens: a signal, a child's end, news from the pod's deck. True if there is news.

        ``quiet`` is for whoever waits for something else: news are kept for the next renewal.
        """
        watch = [self._wake[0]]
        if self._report is not None:
            watch.append(self._report.fileno())
        ready, _, _ = select.select(watch, [], [], max(0.0, seconds))
        if self._wake[0] in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._wake[0], 512):
                    pass
            self._reap()
        return self._report is not None and self._report.fileno() in ready and self._hear() and not quiet

    def _hear(self) -> bool:
        """Take what the pod's deck reports; the newest status counts, events are kept until the Lease has them."""
        news = False
        while self._report is not None:
            try:
                packet = self._report.recv(1 << 17)
            except (BlockingIOError, ConnectionError):
                break
            if not packet:
                self._hear_no_more()
                break
            told = json.loads(packet)
            events = json.dumps(told.pop("events"), separators=(",", ":"))
            # Numbers that only move (processor, memory) go with the next renewal.
            news = news or events != self._told or bool(told.get("fault"))
            self._told = events
            self._status = json.dumps(told, separators=(",", ":"))
        return news

    def _hear_no_more(self) -> None:
        if self._report is not None:
            self._report.close()
            self._report = None

    def _reap(self) -> None:
        """Everybody's orphans are our children: take their ends, but not the owner's, whom its object waits for."""
        known = {process.pid for process in (self._owner,) if process is not None}
        for pid in _children():
            if pid not in known:
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG)[0] == self._watchdog:
                        self._watchdog = 0

    def _start_watchdog(self) -> None:
        """A copy of ourselves: on a busy node the start of an interpreter may take longer than a Lease lasts."""
        if self._watchdog:
            return
        self._watchdog = os.fork()  # noqa: TID251 - the fence has one thread
        if self._watchdog == 0:
            try:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                os.setsid()
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the deadline is memory: it needs no descriptor
                watchdog(self.deadline)
            finally:
                os._exit(1)

    def _asked_to_end(self, *_: object) -> None:
        self._ending = True


def seen_in(lease: dict[str, Any]) -> Seen:
    """What of a Lease decides."""
    spec = lease.get("spec") or {}
    return Seen(
        spec.get("holderIdentity") or "",
        float(spec.get("leaseDurationSeconds") or 0),
        lease["metadata"]["resourceVersion"],
    )


def _children() -> list[int]:
    children = Path("/proc/1/task/1/children")
    return [int(pid) for pid in children.read_text().split()]


def _reap_all() -> bool:
    """Take the ends of all children; is anybody left in this pid namespace?"""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return any(entry.name.isdigit() and entry.name != "1" for entry in Path("/proc").iterdir())


def say(text: str) -> None:
    """A line of ours among the pod's output."""
    sys.stderr.write(f"--- everdeck fence: {text} ---\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """``python -m everdeck.cluster.fence -- COMMAND …``, as the first process of a container."""
    if os.getpid() != 1:
        say("it must be the first process of a container: elsewhere it would end processes that are not the pod's")
        return 2
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    terms = Terms(duration=float(os.environ.get("EVERDECK_LEASE_SECONDS", Terms().duration)))
    sleep_until(boottime() + random.random() * 0.2)  # noqa: S311 - a hundred pods of a dead node begin together
    return Fence(Place.of_environment(), terms, Api(terms.request), arguments, Deadline.make()).live()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
