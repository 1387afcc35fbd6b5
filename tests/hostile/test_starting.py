"""What of a worker's own choice is used before its rights are its own: nothing."""

import asyncio
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everdeck import AsyncDeck, Health, Restart
from everdeck.errors import EverdeckError, StopFailed
from everdeck.kernel import containment, native
from everdeck.model import EventKind
from support.cli_daemon import until
from support.hostile_accounts import Account, open_place
from support.waiting import eventually

SLEEPER = ["sleep", "1000"]
# One that other accounts can read: this session's own may be in root's home.
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable


@pytest.fixture(params=["natively", "in Python"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr(native, "_library", lambda: None)
    elif not native.available():
        pytest.skip("the C side is not built here (no compiler when the package was installed)")


def _preload(place: Path, witness: Path) -> Path:
    """A library that notes as whom it was loaded."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc to make a library")
    source = place / "preload.c"
    source.write_text(
        "#include <fcntl.h>\n#include <stdio.h>\n#include <unistd.h>\n"
        "__attribute__((constructor)) static void loaded(void) {\n"
        f'  FILE *f = fopen("{witness}", "a"); if (f) {{ fprintf(f, "%d %d\\n", getuid(), geteuid()); fclose(f); }}\n'
        "}\n"
    )
    library = place / "preload.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    library.chmod(0o755)
    return library


@pytest.mark.usefixtures("_way")
def test_a_library_that_a_worker_preloads_is_loaded_as_the_worker_only(place: Path, mallory: Account) -> None:
    """``LD_PRELOAD`` is the worker's business; before it is the worker's account, nobody looks at it."""
    witness = place / "witness"
    witness.touch()
    witness.chmod(0o666)
    library = _preload(place, witness)

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            await deck.start("alice", SLEEPER, user=mallory.name, env={"LD_PRELOAD": str(library)})
            await asyncio.to_thread(until, witness.read_text)
            await deck.stop("alice")

    asyncio.run(scenario())
    assert set(witness.read_text().split()) == {str(mallory.uid)}


@pytest.mark.usefixtures("_way")
def test_a_health_command_runs_as_the_worker_in_its_cgroup(place: Path, mallory: Account) -> None:
    """It stands in the worker's own directory and may be the worker's own file: as root it would be root's."""
    witness = place / "witness"
    witness.mkdir()
    os.chown(witness, mallory.uid, mallory.gid)
    check = f"cd {witness} && (id -u; cat /proc/self/cgroup; echo $OLDPWD) > new && mv new told"

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            health = Health(command=("sh", "-c", check), interval_seconds=0.1)
            await deck.start("alice", SLEEPER, user=mallory.name, health=health)
            told = await asyncio.to_thread(
                until, lambda: (witness / "told").exists() and (witness / "told").read_text()
            )
            lines = told.splitlines()
            assert lines[0] == str(mallory.uid)
            assert lines[-1] == str(place / "state/workers/alice/data")
            if containment.cgroup_home() is not None:
                assert any(line.startswith("0::") and line.endswith("/alice") for line in lines), told
            await deck.stop("alice")

    asyncio.run(scenario())


def test_a_command_that_waits_to_be_stopped_delays_nobody(place: Path, mallory: Account) -> None:
    """The account stops every process of its own, also the one that is just becoming its worker."""
    if not native.available():
        pytest.skip("the C side is not built here (no compiler when the package was installed)")
    stopper = (
        subprocess.Popen(
            [
                *("setpriv", f"--reuid={mallory.uid}", f"--regid={mallory.gid}", "--clear-groups"),
                *("perl", "-e", "$SIG{TERM}='DEFAULT'; my $end=time+20; while (time<$end) { kill 'STOP', -1 }"),
            ]
        )
        if shutil.which("setpriv") and shutil.which("perl")
        else None
    )
    if stopper is None:
        pytest.skip("needs setpriv and perl")

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            for _ in range(5):
                async with asyncio.timeout(30):
                    try:
                        await deck.start("alice", SLEEPER, user=mallory.name)
                    except EverdeckError as error:
                        assert "stopped" in str(error)  # noqa: PT017
                    await deck.start("bob", SLEEPER)
                    await deck.stop_all()

    try:
        asyncio.run(scenario())
    finally:
        stopper.kill()
        stopper.wait()


ESCAPEE = """
import os, sys
# fork, setsid, fork, close everything, an empty environment: at once, before anybody can have looked.
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 1000)
        os.execve("/bin/sleep", ["sleep", sys.argv[1]], {})
    os._exit(0)
os.execv("/bin/sleep", ["sleep", "1000"])
"""


@pytest.mark.parametrize("other_account", [True, False])
def test_nothing_escapes_stop_by_being_quick(place: Path, mallory: Account, *, other_account: bool) -> None:
    """A process that leaves its session, its lock and its environment in its first milliseconds is in the cgroup."""
    if containment.cgroup_home() is None or not native.available():
        pytest.skip("needs a writable cgroup v2 directory, and the C side for a worker of our own account")
    mark = f"98765.{os.getpid()}"

    def escaped() -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    alive = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] not in {b"Z", b"X"}
                except OSError:
                    continue
                if alive and words[:2] == [b"sleep", mark.encode()]:
                    found.append(entry.name)
        return found

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            fields = {"user": mallory.name} if other_account else {}
            await deck.start("alice", [PYTHON, "-c", ESCAPEE, mark], **fields)
            await asyncio.to_thread(until, escaped)
            assert (await deck.status("alice")).containment == "cgroup"
            await deck.stop("alice")
            assert escaped() == []

    asyncio.run(scenario())


def test_a_worker_that_joined_later_is_said_to_have(
    place: Path, mallory: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the C side a plain worker of our own account joins its cgroup a moment after its start: we say so."""
    if containment.cgroup_home() is None:
        pytest.skip("needs a writable cgroup v2 directory")
    monkeypatch.setattr(native, "_library", lambda: None)

    async def scenario() -> None:
        async with AsyncDeck(place / "state") as deck:
            await deck.start("alice", SLEEPER)
            async with asyncio.timeout(60):
                while not str((await deck.status("alice")).containment).startswith("cgroup"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert (await deck.status("alice")).containment == "cgroup, joined after start"
            await deck.start("bob", SLEEPER, user=mallory.name)
            assert (await deck.status("bob")).containment == "cgroup"
            await deck.stop_all()

    asyncio.run(scenario())


LENDER = """
import array, os, socket, sys, time
lock = next(int(fd) for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").endswith("/lock"))
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
socket.send_fds(s, [b"x"], [lock])
time.sleep(1000)
"""


@pytest.mark.parametrize("with_cgroup", [True, False])
def test_a_stranger_who_was_handed_the_lock_is_not_signalled(
    place: Path, mallory: Account, monkeypatch: pytest.MonkeyPatch, *, with_cgroup: bool
) -> None:
    """A descriptor can be passed to any service that takes one; carrying it does not make it part of the worker."""
    if not with_cgroup:
        monkeypatch.setattr(containment, "cgroup_home", lambda: None)
    service = (
        "import os, socket, sys, time\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o777); s.listen()\n"
        "print('ready', flush=True)\n"
        "c, _ = s.accept(); m, fds, *_ = socket.recv_fds(c, 10, 4)\n"
        "print('got', flush=True); time.sleep(1000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", service, str(place / "service.sock")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as serving:
        assert serving.stdout is not None
        try:
            assert serving.stdout.readline() == "ready\n"

            async def scenario() -> None:
                async with AsyncDeck(place / "state") as deck:
                    command = [PYTHON, "-c", LENDER, str(place / "service.sock")]
                    await deck.start("alice", command, user=mallory.name)
                    assert await asyncio.to_thread(serving.stdout.readline) == "got\n"
                    if with_cgroup:
                        await deck.stop("alice")
                    else:  # without one nothing but the lock could prove that the tree is gone
                        with pytest.raises(StopFailed, match=f"lock is held by pid {serving.pid}"):
                            await deck.stop("alice")
                    assert serving.poll() is None
                    with pytest.raises(EverdeckError, match=f"lock is held by pid {serving.pid}"):
                        await deck.start("alice")
                    if with_cgroup:
                        kinds = [event.kind for event in await deck.events() if event.worker == "alice"]
                        assert EventKind.LOCK_CONFLICT in kinds

            asyncio.run(scenario())
            assert serving.poll() is None
        finally:
            serving.kill()


LEAVES = """
import array, os, socket, sys
held = {fd: os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
lock = next(int(fd) for fd, path in held.items() if path.endswith("/lock"))
to = socket.socket(socket.AF_UNIX)
to.connect(sys.argv[1])
to.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lock]))])
"""


def test_a_lock_left_in_a_socket_that_nobody_accepts_costs_nothing() -> None:
    """Held by no process that can be found: told as a conflict so many times, then it rests, and so do we."""

    async def scenario(place: Path) -> None:
        door = str(place / "door")
        command = [sys.executable, "-c", LEAVES, door]
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.bind(door)
            stranger.listen()
            async with AsyncDeck(place / "state") as deck:
                await deck.start("alice", command, restart=Restart("always", max_crashes=2, backoff_seconds=0.05))
                await eventually(lambda: select.select([stranger], [], [], 0)[0], "the lock is in the socket")
                if containment.cgroup_home() is not None:  # else nothing proves that it is gone, and it stays as it is
                    async with asyncio.timeout(100):
                        async for event in deck.follow(0):
                            if event.kind is EventKind.FAILED:
                                break
                    assert EventKind.LOCK_CONFLICT in [event.kind for event in await deck.events()]
                assert [event.kind for event in await deck.events()].count(EventKind.STARTED) == 1
                before, begin = time.process_time(), time.monotonic()
                await asyncio.sleep(2)
                assert time.process_time() - before < 0.05 * (time.monotonic() - begin)

    with open_place() as place:
        asyncio.run(scenario(place))
