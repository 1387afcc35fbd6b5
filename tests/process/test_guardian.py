"""The guardian dies, works beside a new owner, is carried over an exec, and never keeps anybody waiting."""

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everdeck.deck import AsyncDeck, guardian_link
from everdeck.deck.guardian_link import GuardianLink
from everdeck.deck.watch import DeathWatch
from everdeck.kernel.containment import Tree, new_cookie
from support.child_owner import Owner, Reports
from support.child_program import Program
from support.repo_processes import own_children

WORST = Path(__file__).parents[1] / "support" / "child_worst.py"
PATIENCE_SECONDS = 20.0

COOPERATING = """
import os, sys
from everdeck.child import lifeline
with lifeline() as life:
    with open(sys.argv[2], "w") as fifo:
        fifo.write(f"{sys.argv[1]} leader {os.getpid()}\\n")
    life.wait()
"""


@pytest.fixture
def reports(tmp_path: Path) -> Iterator[Reports]:
    """Where the workers say who they are."""
    fifo = Reports(tmp_path / "fifo")
    yield fifo
    fifo.close()


def deaf(name: str, reports: Reports) -> list[str]:
    """A command that ignores every signal and its lifeline."""
    return [sys.executable, "-S", "-E", str(WORST), "deaf", name, str(reports.path)]


def start_deaf(owner: Owner, state: Path, name: str, reports: Reports, grace_seconds: float = 0.3) -> None:
    """Start a deaf worker, bound."""
    owner.do("start", state, name, deaf(name, reports), lifetime="bound", stop={"grace_seconds": grace_seconds})
    reports.await_roles(name, "leader")


def gone(pid: int) -> None:
    """Wait until a process is gone."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            assert select.select([pidfd], [], [], PATIENCE_SECONDS)[0], f"pid {pid} is still there"
        finally:
            os.close(pidfd)


def new_guardian(owner: Owner, state: Path, not_this: int) -> int:
    """Wait until the owner has another guardian."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (pid := owner.do("guardian", state)) in {None, not_this}:
        assert time.monotonic() < deadline, "no other guardian came"
    assert isinstance(pid, int)
    return pid


def await_on_post(guardian: int) -> None:
    """Wait until the guardian has started so far that it ignores SIGTERM."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    bit = 1 << (signal.SIGTERM - 1)
    while True:
        status = Path(f"/proc/{guardian}/status").read_text(encoding="ascii")
        if int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16) & bit:
            return
        assert time.monotonic() < deadline, "the guardian does not get ready"


def test_killing_the_guardian_alone_harms_nothing(tmp_path: Path, reports: Reports) -> None:
    """The workers go on, the owner starts another guardian, and that one knows everybody."""
    state = tmp_path / "state"
    with Owner() as owner:
        owner.do("open", state)
        start_deaf(owner, state, "bot", reports)
        first = owner.do("guardian", state)
        await_on_post(first)
        os.kill(first, signal.SIGTERM)  # a polite word does not make it leave its post
        assert owner.do("status", state, "bot")["state"] == "running"
        assert owner.do("guardian", state) == first
        os.kill(first, signal.SIGKILL)
        second = new_guardian(owner, state, first)
        assert reports.alive("bot") == ["leader"]
        owner.kill()
        assert reports.await_gone("bot", PATIENCE_SECONDS) == []
        gone(second)


def test_killing_guardian_and_owner_together_leaves_the_other_layers(tmp_path: Path, reports: Reports) -> None:
    """L1: who looks at its lifeline leaves. L4: the next open reaps who does not, and says so."""
    state = tmp_path / "state"
    with Owner() as owner:
        owner.do("open", state)
        start_deaf(owner, state, "deaf", reports)
        source = str(Path(__file__).parents[2] / "src")
        owner.do(
            "start",
            state,
            "polite",
            [sys.executable, "-c", COOPERATING, "polite", str(reports.path)],
            lifetime="bound",
            env={"PYTHONPATH": source},
        )
        reports.await_roles("polite", "leader")
        guardian = owner.do("guardian", state)
        owner.signal(signal.SIGSTOP)  # so that it cannot start another one in between
        os.kill(guardian, signal.SIGKILL)
        owner.kill()
        gone(guardian)
    assert reports.await_gone("polite", PATIENCE_SECONDS) == []
    assert reports.alive("deaf") == ["leader"]

    async def reopen() -> list[tuple[str | None, str]]:
        async with AsyncDeck(state) as deck:
            assert reports.alive("deaf") == []
            return [(event.worker, str(event.kind)) for event in await deck.events()]

    told = asyncio.run(reopen())
    assert ("deaf", "orphan-reaped") in told
    assert ("deaf", "killed") in told, "an escalation is an event"


def test_a_new_owner_and_the_guardian_work_side_by_side(tmp_path: Path, reports: Reports) -> None:
    """Both end the old tree; the next copy starts only when it is gone, and the guardian does not touch that one."""
    state = tmp_path / "state"
    with Owner() as owner:
        owner.do("open", state)
        start_deaf(owner, state, "bot", reports, grace_seconds=1.0)
        guardian = owner.do("guardian", state)
        owner.kill()

    async def reopen() -> None:
        async with AsyncDeck(state) as deck:
            from everdeck.model import Stop

            second = Reports(tmp_path / "second")
            try:
                await deck.start(
                    "bot",
                    [sys.executable, "-S", "-E", str(WORST), "deaf", "bot", str(second.path)],
                    lifetime="bound",
                    stop=Stop(grace_seconds=0.2),
                    replace=True,
                )
                assert reports.alive("bot") == [], "the next copy was started beside the first"
                second.await_roles("bot", "leader")
                await asyncio.to_thread(gone, guardian)
                assert second.alive("bot") == ["leader"]
                assert (await deck.status("bot")).restarts == 0
            finally:
                await deck.stop("bot")
                second.close()

    asyncio.run(reopen())


def test_a_fork_of_the_owner_is_not_the_owner(tmp_path: Path, reports: Reports) -> None:
    """A child that the host forked outlives the owner and holds copies of its descriptors; the workers leave."""
    state = tmp_path / "state"
    source = """
        import asyncio, os, signal, sys, warnings
        from everdeck.deck import AsyncDeck
        from everdeck.model import Stop
        warnings.simplefilter("ignore", DeprecationWarning)      # forking beside threads is what is tested

        async def main():
            deck = AsyncDeck(sys.argv[1])
            await deck.open()
            await deck.start("bot", sys.argv[2:], lifetime="bound", stop=Stop(grace_seconds=0.2))
            sys.stdin.readline()
            if (pid := os.fork()) == 0:
                print("fork", os.getpid(), flush=True)
                signal.pause()
            await asyncio.Event().wait()

        asyncio.run(main())
    """
    with Program(source, str(state), *deaf("bot", reports), has_lifeline=False) as owner:
        reports.await_roles("bot", "leader")
        os.write(owner._write_fd, b"fork\n")
        fork = int(owner.line().split()[1])
        try:
            owner.signal(signal.SIGKILL)
            owner.ended()
            assert reports.await_gone("bot", PATIENCE_SECONDS) == []
        finally:
            os.kill(fork, signal.SIGKILL)
            gone(fork)


def test_an_exec_in_place_keeps_workers_and_guardian(tmp_path: Path, reports: Reports) -> None:
    """A reload is not a death: same guardian, same worker; the death that follows is one."""
    state = tmp_path / "state"
    source = """
        import asyncio, json, os, re, sys
        from everdeck.deck import AsyncDeck
        from everdeck.model import Stop

        async def main():
            deck = AsyncDeck(sys.argv[1])
            await deck.open()
            if "SECOND" not in os.environ:
                await deck.start("bot", sys.argv[2:], lifetime="bound", stop=Stop(grace_seconds=0.2))
            status = await deck.status("bot")
            guardian = int(re.search(r"guardian pid (\\d+)", (await deck.layers("bot"))[0].why)[1])
            print(json.dumps([os.getpid(), status.pid, guardian, str(status.state)]), flush=True)
            sys.stdin.readline()
            if "SECOND" not in os.environ:
                told = deck.prepare_reexec()
                os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | told | {"SECOND": "1"})

        asyncio.run(main())
    """
    with Program(source, str(state), *deaf("bot", reports), has_lifeline=False) as owner:
        first = json.loads(owner.line())
        reports.await_roles("bot", "leader")
        os.write(owner._write_fd, b"exec\n")
        assert json.loads(owner.line()) == first
        owner.signal(signal.SIGKILL)
        owner.ended()
        assert reports.await_gone("bot", PATIENCE_SECONDS) == []
        gone(first[2])


def test_a_failed_recovery_leaves_the_guardian_to_its_duty(tmp_path: Path, reports: Reports) -> None:
    """An exec in place whose next image cannot recover: the guardian is not killed, so it ends whom it guards."""
    state = tmp_path / "state"
    source = """
        import asyncio, os, sys
        from everdeck.deck import AsyncDeck
        from everdeck.deck.recovery import Recovery
        from everdeck.errors import RegistryUnavailable
        from everdeck.model import Stop

        async def refuse(*_):
            raise RegistryUnavailable("a disk that is full")

        async def main():
            deck = AsyncDeck(sys.argv[1])
            if "SECOND" not in os.environ:
                await deck.open()
                await deck.start("bot", sys.argv[2:], lifetime="bound", stop=Stop(grace_seconds=0.2))
                print("started", flush=True)
                sys.stdin.readline()
                told = deck.prepare_reexec()
                os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | told | {"SECOND": "1"})
            Recovery.recover = refuse
            try:
                await deck.open()
            except RegistryUnavailable as err:
                print(err, flush=True)
            sys.stdin.readline()

        asyncio.run(main())
    """
    with Program(source, str(state), *deaf("bot", reports), has_lifeline=False) as owner:
        assert owner.line() == "started"
        reports.await_roles("bot", "leader")
        os.write(owner._write_fd, b"exec\n")
        assert owner.line() == "a disk that is full"
        assert reports.await_gone("bot", PATIENCE_SECONDS) == [], "nobody supervises it, and it is bound"


def test_orphans_of_a_subreaper_are_found(tmp_path: Path, reports: Reports) -> None:
    """Where orphans go to a subreaper (a user's systemd, a container) their parent is not pid 1: found all the same."""
    state = tmp_path / "state"
    source = """
        import ctypes, json, os, signal, subprocess, sys
        PR_SET_CHILD_SUBREAPER = 36
        assert ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        owner = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], stdout=subprocess.PIPE)
        worker, guardian = json.loads(owner.stdout.readline())
        owner.send_signal(signal.SIGSTOP)
        os.kill(guardian, signal.SIGKILL)
        owner.kill()
        owner.wait()
        parent = open(f"/proc/{worker}/stat").read().rpartition(")")[2].split()[1]
        print(worker, int(parent) == os.getpid(), flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)          # reap whatever comes
        sys.stdin.read()
    """
    owner = (
        "import asyncio, json, re, sys\n"
        "from everdeck.deck import AsyncDeck\n"
        "async def main():\n"
        "    deck = AsyncDeck(sys.argv[1])\n"
        "    await deck.open()\n"
        "    status = await deck.start('bot', sys.argv[2:], lifetime='bound')\n"
        "    why = (await deck.layers('bot'))[0].why\n"
        "    print(json.dumps([status.pid, int(re.search('guardian pid ([0-9]+)', why)[1])]), flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with Program(source, owner, str(state), "sleep", "60", has_lifeline=False) as reaper:
        pid, is_reaper = reaper.line().split()
        assert is_reaper == "True"

        async def reopen() -> list[str]:
            async with AsyncDeck(state) as deck:
                return [str(event.kind) for event in await deck.events(worker="bot")]

        assert "orphan-reaped" in asyncio.run(reopen())
        gone(int(pid))


def test_a_start_that_nobody_could_record_is_ended(tmp_path: Path, reports: Reports) -> None:
    """The owner bound the name before it spawned and died right after: the cookie is enough to find the worker."""
    source = """
        import asyncio, os, signal, sys
        from pathlib import Path
        from everdeck.deck.guardian_link import GuardianLink
        from everdeck.deck.watch import DeathWatch
        from everdeck.kernel import flock
        from everdeck.kernel.containment import Tree, new_cookie
        from everdeck.kernel.spawn import spawn

        async def main():
            watch = DeathWatch()
            watch.open(asyncio.get_running_loop())
            cookie, lock = new_cookie(), Path(sys.argv[1]) / "workers" / "bot" / "lock"
            lock_fd = flock.take(lock)
            GuardianLink(watch).bind(Tree("bot", cookie, lock), signal.SIGTERM, 0.2)
            null = os.open(os.devnull, os.O_RDWR)
            env = {"EVERDECK_COOKIE": cookie, "PATH": os.environ["PATH"]}
            spawn(sys.argv[2:], env=env, cwd="/", stdin_fd=null, stdout_fd=null, stderr_fd=null, keep_fds=[lock_fd])
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    state = tmp_path / "state"
    (state / "workers" / "bot").mkdir(parents=True)
    with Program(source, str(state), *deaf("bot", reports), has_lifeline=False) as owner:
        assert owner.ended() == -signal.SIGKILL
    reports.await_roles("bot", "leader")
    assert reports.await_gone("bot", PATIENCE_SECONDS) == []


def test_what_the_guardian_did_can_be_read_by_the_next_owner(tmp_path: Path, reports: Reports) -> None:
    """Each tree and each escalation is a line of ``guardian.log``; other lines are none."""
    state = tmp_path / "state"
    with Owner() as owner:
        owner.do("open", state)
        start_deaf(owner, state, "bot", reports)
        guardian = owner.do("guardian", state)
        pidfd = os.pidfd_open(guardian)
        owner.kill()
        assert select.select([pidfd], [], [], PATIENCE_SECONDS)[0]
        os.close(pidfd)
    with (state / "guardian.log").open("a") as log:
        log.write('Traceback (most recent call last)\n{"half": \n[1]\n')
    (report,) = guardian_link.reports(state)
    assert (report["worker"], report["gone"], report["survivors"]) == ("bot", True, [])
    assert [killed["command"].split()[-2] for killed in report["killed"]] == ["bot"]
    guardian_link.forget_reports(state)
    assert guardian_link.reports(state) == []
    assert guardian_link.reports(tmp_path / "nowhere") == []


class Link:
    """A link in this process, in a loop of its own."""

    def __init__(self) -> None:
        self.watch = DeathWatch()
        self.watch.open(asyncio.get_running_loop())
        self.link = GuardianLink(self.watch)

    def bind(self, name: str) -> None:
        """Bind a tree that nobody runs."""
        self.link.bind(Tree(name, new_cookie(), None), signal.SIGTERM, 0.1)

    async def close(self) -> None:
        """Close both."""
        await self.link.close()
        self.watch.close()


def test_a_guardian_with_nobody_to_guard_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept for a moment, because a worker may just be restarting; then it goes, and comes back when needed."""
    monkeypatch.setattr(guardian_link, "IDLE_SECONDS", 0.2)

    async def scenario() -> None:
        one = Link()
        one.bind("bot")
        first = one.link.pid
        assert first is not None
        one.link.unbind("bot")
        one.bind("bot")
        await asyncio.sleep(0.5)
        assert one.link.pid == first, "a worker that restarts keeps its guardian"
        one.link.unbind("bot")
        await asyncio.to_thread(gone, first)
        one.bind("bot")
        assert one.link.pid not in {first, None}
        one.link.unbind("bot")
        await one.close()

    before, children = len(list(Path("/proc/self/fd").iterdir())), own_children()
    asyncio.run(scenario())
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert own_children() <= children


def test_a_guardian_that_does_not_listen_holds_nobody_up() -> None:
    """A stopped guardian and a full channel: the owner goes on, and everything is said once it listens again."""

    async def scenario() -> None:
        one = Link()
        one.bind("first")
        guardian = one.link.pid
        assert guardian is not None
        os.kill(guardian, signal.SIGSTOP)
        began = time.monotonic()
        for number in range(3000):
            one.bind(f"bot-{number}")
        assert time.monotonic() - began < PATIENCE_SECONDS
        assert one.link._unsaid, "the channel took everything; the test is too small"
        os.kill(guardian, signal.SIGCONT)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while one.link._unsaid:  # noqa: ASYNC110 - what empties it is the loop itself
                await asyncio.sleep(0.01)
        for number in range(3000):
            one.link.unbind(f"bot-{number}")
        one.link.unbind("first")
        await one.close()

    children = own_children()
    asyncio.run(scenario())
    assert own_children() <= children
