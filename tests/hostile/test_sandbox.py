"""``strict`` with real programs: they run; and what is not theirs is out of reach, also for root."""

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everdeck import AsyncDeck
from everdeck.errors import EverdeckError, LimitUnavailable
from everdeck.kernel import native, sandbox
from everdeck.model import Restart, Sandbox, WorkerSpec
from support.cli_daemon import free_port
from support.hostile_accounts import Account, open_place

STRICT = Sandbox("strict")
PATIENCE_SECONDS = 120.0


@pytest.fixture(autouse=True)
def _able() -> None:
    if (why := sandbox.why_not_strict()) is not None:
        pytest.skip(f"this machine has no strict sandbox: {why}")


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """As ``place``, without needing root."""
    with open_place() as path:
        yield path


@pytest.fixture(params=["natively", "in Python"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr(native, "_library", lambda: None)
    elif not native.available():
        pytest.skip("the C side is not built here (no compiler when the package was installed)")


async def said_by(deck: AsyncDeck, name: str, command: list[str], box: Sandbox = STRICT, **fields: Any) -> list[str]:
    """Run a program to its end; what it printed, and how it ended as the last line."""
    await deck.start(name, command, sandbox=box, restart=Restart("never"), **fields)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await deck.status(name)).state.is_live:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    lines = [line for line in await deck.logs(name, lines=200) if not line.startswith("--- everdeck")]
    return [*lines, str((await deck.status(name)).exit)]


def ran(place: Path, command: list[str], box: Sandbox = STRICT, **fields: Any) -> list[str]:
    """The same in a deck of its own."""

    async def scenario() -> list[str]:
        async with AsyncDeck(place / "state") as deck:
            return await said_by(deck, "alice", command, box, **fields)

    return asyncio.run(scenario())


def needs(program: str) -> str:
    """The program, or a reason to skip."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"needs {program}")
    return found


# --- they run ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_way")
def test_a_shell_runs_with_what_basic_promises(open_dir: Path) -> None:
    """No new privileges, no core, umask 077, an empty bounding set where we may empty it, and it can work."""
    script = "echo x > f; cat f; ulimit -c; umask; grep -E 'NoNewPrivs|CapBnd|Seccomp:' /proc/self/status; mktemp"
    for box, seccomp in ((Sandbox("basic"), "0"), (STRICT, "2")):
        lines = ran(open_dir / box.level, ["sh", "-c", script], box)
        assert lines[:3] == ["x", "0", "0077"], lines
        status = dict(line.split(":\t") for line in lines[3:6])
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == seccomp
        if sandbox.can_empty_capabilities():
            assert int(status["CapBnd"], 16) == 0
        assert lines[-1] == "exit code 0"
    assert lines[-2].startswith(str(open_dir / "strict/state/workers/alice/tmp/"))


def test_python_runs_and_makes_a_virtual_environment_with_pip(open_dir: Path) -> None:
    """The interpreter of this session, wherever it is installed; pip lists what is in the new environment."""
    code = "import ssl, sqlite3, json, tempfile, subprocess; print(subprocess.check_output(['echo', 'sub']))"

    async def scenario() -> None:
        async with AsyncDeck(open_dir / "state") as deck:
            lines = await said_by(deck, "alice", [sys.executable, "-c", code])
            assert lines == ["b'sub\\n'", "exit code 0"]
            lines = await said_by(deck, "alice", [sys.executable, "-m", "venv", "v"], replace=True)
            assert lines[-1] == "exit code 0", lines
            pip = ["sh", "-c", "v/bin/python -m pip --disable-pip-version-check list"]
            box = Sandbox("strict", read=sandbox.beside_program(os.path.realpath(sys.executable), ""))
            lines = await said_by(deck, "alice", pip, box, replace=True)
            assert any(line.startswith("pip ") for line in lines), lines
            assert lines[-1] == "exit code 0"

    asyncio.run(scenario())


def test_node_runs(open_dir: Path) -> None:
    """Files, a child process, and the usual refusal for what is not its own."""
    node = needs("node")
    script = (
        "const fs=require('fs');fs.writeFileSync('x','y');console.log(String(fs.readFileSync('x')));"
        "try{fs.readFileSync('/etc/shadow')}catch(e){console.log(e.code)};"
        "require('child_process').exec('echo sub',(e,o)=>console.log(o.trim()))"
    )
    assert ran(open_dir, [node, "-e", script]) == ["y", "EACCES", "sub", "exit code 0"]


def test_git_runs(open_dir: Path) -> None:
    """A repository is made and a commit is read back."""
    needs("git")
    who = "-c user.email=a@b -c user.name=n"
    script = f"git init -q r && cd r && git {who} commit -q --allow-empty -m x && git log -1 --format=%s"
    assert ran(open_dir, ["sh", "-c", script]) == ["x", "exit code 0"]


@pytest.mark.parametrize("program", ["redis-server", "nginx"])
def test_a_server_runs_on_its_own_port_only(open_dir: Path, program: str) -> None:
    """It is given a port; it listens there and answers, and on no other."""
    needs(program)

    def command(port: str) -> list[str]:
        if program == "redis-server":
            return ["sh", "-c", f"exec redis-server --port {port} --bind 127.0.0.1 --save '' --dir ."]
        conf = (
            # One process: a root without capabilities cannot become the account of nginx's own workers.
            "daemon off; master_process off; user root root; pid nginx.pid; error_log stderr; events {}"
            " http { access_log off;"
            " client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3; uwsgi_temp_path t4;"
            " scgi_temp_path t5;"
            " server { listen 127.0.0.1:PORT; location / { return 200 hello; } } }"
        )
        text = conf.replace("PORT", port)
        return ["sh", "-c", f'echo "{text}" > c; exec nginx -p "$PWD" -c "$PWD/c"']

    async def scenario() -> None:
        async with AsyncDeck(open_dir / "state") as deck:
            status = await deck.start("alice", command("$PORT"), sandbox=STRICT, port=True)
            assert status.port is not None
            await asyncio.to_thread(_answers, status.port, program)
            await deck.stop("alice")
            lines = await said_by(deck, "bob", command(str(free_port())))
            assert any("ermission denied" in line for line in lines), lines

    asyncio.run(scenario())


def _answers(port: int, program: str) -> None:
    from support.cli_daemon import until

    def once() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as to:
                to.sendall(b"PING\r\n" if program == "redis-server" else b"GET / HTTP/1.0\r\n\r\n")
                return to.recv(100).startswith((b"+PONG", b"HTTP/1.1 200"))
        except OSError:
            return False

    until(once, f"{program} did not answer")


# --- and reach nothing else -------------------------------------------------------------------------------------

ABSTRACT = f"everdeck-test-{os.getpid()}"
ATTACKS = {
    "another worker's directory": "open(sys.argv[1] + '/workers/victim/data/diary').read()",
    "another worker's directory, listed": "os.listdir(sys.argv[1] + '/workers/victim/data')",
    "the registry": "open(sys.argv[1] + '/deck.db', 'rb').read(1)",
    "the deck, listed": "os.listdir(sys.argv[1])",
    "/etc/shadow": "open('/etc/shadow').read()",
    "a file of root's": "os.listdir('/root')",
    "writing to the system": "open('/usr/lib/x', 'w')",
    "writing to /proc/sys": "open('/proc/sys/kernel/core_pattern', 'w')",
    "/tmp": "open('/tmp/everdeck-x', 'w')",
    "the owner's environment": "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "the owner's descriptors": "os.readlink(f'/proc/{os.getppid()}/fd/0')",
    "signalling the owner": "os.kill(os.getppid(), 0)",
    "a foreign socket": "socket.socket(socket.AF_UNIX).connect(sys.argv[1] + '/deck.sock')",
    "an abstract socket": "socket.socket(socket.AF_UNIX, 2).sendto(b'x', chr(0) + sys.argv[4])",
    "an unlisted port": "socket.create_connection(('127.0.0.1', int(sys.argv[2])), 5)",
    "an unlisted port by MPTCP": "socket.socket(2, 1, 262).connect(('127.0.0.1', int(sys.argv[2])))",
    "an unlisted port by fast open": "socket.socket().sendto(b'x', 0x20000000, ('127.0.0.1', int(sys.argv[2])))",
    "listening on an unlisted port": "socket.create_server(('127.0.0.1', int(sys.argv[3])))",
    "ptrace": "call(101, 16, os.getppid(), 0, 0)",
    "mount": "call(165, b'none', b'/mnt', b'tmpfs', 0, 0)",
    "a user namespace": "call(272, 0x10000000)",
    "a user namespace by clone": "call(56, 0x10000011, 0, 0, 0, 0)",
    "a packet socket": "socket.socket(17, 3, 0)",
    "io_uring": "call(425, 8, ctypes.create_string_buffer(120))",
    "bpf": "call(321, 0, 0, 0)",
    "a device node": "os.mknod('dev', 0o020666, os.makedev(1, 1))",
    "a link into another directory": "(os.symlink(sys.argv[1] + '/workers/victim/data', 'v'), os.listdir('v'))",
    "another project": "fcntl.ioctl(here, 0x401c5820, fcntl.ioctl(here, 0x801c581f, bytes(28)))",
    "flags of a file": "fcntl.ioctl(here, 0x40086602, fcntl.ioctl(here, 0x80086601, bytes(8)))",
    "a limit of the owner": "resource.prlimit(os.getppid(), 4, resource.prlimit(os.getppid(), 4))",
    "the owner's nice": "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "the nice of its account": "os.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_PROCESS, 0))",
    "the owner's processors": "changed(os.sched_getaffinity, os.sched_setaffinity, {min(os.sched_getaffinity(0))})",
    "the owner's schedule": "changed(os.sched_getscheduler, os.sched_setscheduler, os.SCHED_BATCH, os.sched_param(0))",
    "the owner's turn at the disk": "call(251, 1, os.getppid(), 3 << 13)",
    "a program for root": "os.chmod('here', 0o4755)",
    "a program for root, by its descriptor": "os.fchmod(here, 0o2755)",
    "the 32-bit calls": "call(0x40000000 + 39)",
}
CODE = """
import ctypes, fcntl, os, resource, socket, sys
open("here", "w").close()
here = os.open(".", os.O_RDONLY)
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    if libc.syscall(*numbers) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def changed(look, act, *words):
    before = look(os.getppid())
    act(os.getppid(), *words)
    if look(os.getppid()) == before:
        raise OSError(1, "it had no effect")
"""


def _attack_command(python: str, state: Path, port: int) -> list[str]:
    names = list(ATTACKS)
    attempts = "".join(
        f"\ntry:\n    {code}\nexcept OSError as e: print({at}, 'refused', e.errno)\nelse: print({at}, 'DONE')\n"
        for at, code in enumerate(ATTACKS.values())
    )
    assert len(names) == len(ATTACKS)
    return [python, "-c", CODE + attempts, str(state), str(port), str(free_port()), ABSTRACT]


@contextlib.contextmanager
def _abstract_socket() -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        abstract.bind(f"\0{ABSTRACT}")
        yield


def _all_refused(lines: list[str]) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of the calls in this test are those of x86-64")
    names = list(ATTACKS)
    done = [names[int(line.split()[0])] for line in lines if line.endswith("DONE")]
    refused = [line for line in lines if " refused " in line]
    assert done == []
    assert len(refused) == len(names), lines


@pytest.mark.usefixtures("_way")
def test_every_attack_is_refused(open_dir: Path) -> None:
    """As the account that owns the deck, root included: modes do not matter, the sandbox does."""
    with socket.create_server(("127.0.0.1", 0)) as foreign:

        async def scenario() -> None:
            async with AsyncDeck(open_dir / "state") as deck:
                await deck.start("victim", ["sleep", "1000"])
                (open_dir / "state/workers/victim/data/diary").write_text("dear diary")
                try:
                    with _abstract_socket():
                        attack = _attack_command(sys.executable, open_dir / "state", foreign.getsockname()[1])
                        _all_refused(await said_by(deck, "alice", attack))
                finally:
                    await deck.stop_all()

        asyncio.run(scenario())


def test_a_program_may_speak_of_its_own_threads(open_dir: Path) -> None:
    """The C library calls a thread by its number, as if it were a stranger; libzmq aborts if that is refused."""
    code = (
        "import ctypes; c = ctypes.CDLL(None); c.pthread_self.restype = ctypes.c_ulong\n"
        "print(c.pthread_setschedparam(ctypes.c_ulong(c.pthread_self()), 0, ctypes.byref(ctypes.c_int(0))))"
    )
    assert ran(open_dir, [sys.executable, "-c", code], Sandbox("strict")) == ["0", "exit code 0"]


def test_a_listed_port_and_path_are_reached(open_dir: Path) -> None:
    """What is listed is allowed, and nothing beside it."""
    shared = open_dir / "shared"
    shared.mkdir()
    (shared / "book").write_text("words")
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        code = (
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print(open('{shared}/book').read())\n"
            f"try: open('{shared}/new', 'w')\nexcept OSError: print('read only')"
        )
        box = Sandbox("strict", read=(str(shared),), tcp_connect=(port,))
        assert ran(open_dir, [sys.executable, "-c", code], box) == ["words", "read only", "exit code 0"]


def test_a_link_that_the_worker_made_does_not_widen_its_next_start(open_dir: Path) -> None:
    """Its working directory, its program and what it may write are where it can put a link to anywhere."""
    treasure = open_dir / "treasure"
    treasure.mkdir()
    (treasure / "gold").write_text("gold")

    async def scenario() -> None:
        async with AsyncDeck(open_dir / "state") as deck:
            home = open_dir / "state/workers/alice/data"
            make = ["sh", "-c", f"ln -s {treasure} app; ln -s {treasure}/gold run; echo made"]
            assert await said_by(deck, "alice", make) == ["made", "exit code 0"]
            steal = ["sh", "-c", f"cat {treasure}/gold; cat app/gold; cat run"]
            box = Sandbox("strict", read=(str(home / "app"),), write=(str(home / "run"),))
            lines = await said_by(deck, "alice", steal, box, cwd=str(home), replace=True)
            assert "gold" not in lines, lines

    asyncio.run(scenario())


def test_a_working_directory_around_the_deck_does_not_show_the_deck(open_dir: Path) -> None:
    """A project with its .everdeck inside: the program reads its own files, not those of the other workers.

    A link in it that leads up again shows nothing more.
    """
    project = open_dir / "project"
    project.mkdir()
    (project / "bot.py").write_text("print(open('bot.py').read()[:5]); print(open('.everdeck/deck.db','rb').read(3))")

    (open_dir / "beside").write_text("not of the project")
    (project / "up").symlink_to("..")

    async def scenario() -> None:
        async with AsyncDeck(project / ".everdeck") as deck:
            lines = await said_by(deck, "alice", [sys.executable, "bot.py"], cwd=str(project))
            assert lines[0] == "print"
            assert "PermissionError" in " ".join(lines)
            lines = await said_by(deck, "bob", ["cat", "up/beside"], cwd=str(project))
            assert "Permission denied" in lines[0]

    asyncio.run(scenario())


OWNER = """
import asyncio, sys
from everdeck import AsyncDeck
from everdeck.model import Restart, Sandbox
async def main():
    async with AsyncDeck(sys.argv[1]) as deck:
        await deck.start("victim", ["sleep", "1000"])
        open(sys.argv[1] + "/workers/victim/data/diary", "w").write("dear diary")
        await deck.start("alice", sys.argv[2:], sandbox=Sandbox("strict"), restart=Restart("never"))
        while (await deck.status("alice")).state.is_live:
            await asyncio.sleep(0.02)
        print("\\n".join(await deck.logs("alice", lines=200)))
        await deck.stop_all()
asyncio.run(main())
"""


def test_it_holds_without_root(place: Path, mallory: Account) -> None:
    """A deck of an ordinary account: the same attacks, the same answers."""
    python = "/usr/bin/python3"
    packages = Path(sysconfig.get_path("purelib"))
    source = Path(__file__).parents[2] / "src"
    paths = f"{source}:{packages}"
    able = mallory.run("env", f"PYTHONPATH={paths}", python, "-Pc", "import everdeck.deck.owner", expect=None)
    if able.returncode != 0:
        pytest.skip(f"the account cannot run everdeck with {python}: {able.stderr[-200:]}")
    home = place / "home"
    home.mkdir(mode=0o700)
    os.chown(home, mallory.uid, mallory.gid)
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        attack = _attack_command(python, home / "state", foreign.getsockname()[1])
        with _abstract_socket():
            done = mallory.run("env", f"PYTHONPATH={paths}", python, "-Pc", OWNER, home / "state", *attack)
    _all_refused([line for line in done.stdout.splitlines() if not line.startswith("--- everdeck")])


# --- what cannot be had is refused ------------------------------------------------------------------------------


def test_a_machine_that_cannot_hold_it_refuses(open_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a weaker one under the same name; nothing is written."""
    monkeypatch.setattr(sandbox, "landlock_abi", lambda: 4)
    with pytest.raises(LimitUnavailable, match="Landlock ABI 6"):
        ran(open_dir, ["true"])
    assert not (open_dir / "state/workers/alice").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"level": "loose"},
        {"level": "basic", "read": ("/srv",)},
        {"level": "strict", "read": ("relative",)},
        {"level": "strict", "tcp_connect": (0,)},
        {"level": "strict", "tcp_bind": ("443",)},
        {"level": "strict", "write": "/srv"},
    ],
)
def test_a_sandbox_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    """By its field."""
    with pytest.raises(EverdeckError, match="sandbox"):
        Sandbox(**fields)


def test_the_level_alone_says_it() -> None:
    """In code, in a file and on the command line."""
    assert WorkerSpec(("true",), sandbox="strict").sandbox == Sandbox("strict")  # type: ignore[arg-type]
