"""One process gets exactly what it was given, and a failure leaves nothing behind."""

import errno
import fcntl
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from everdeck.errors import SpawnFailed
from everdeck.kernel import containment, escalation, exits, flock, native, spawn
from everdeck.kernel import identity as ids
from everdeck.kernel.birth import Birth
from everdeck.kernel.containment import Tree, new_cookie
from support.kernel_trees import Nursery
from support.repo_processes import own_children

TELL = "import os,sys;say=lambda *w:os.write(int(os.environ['SAY']),(' '.join(map(str,w))+'\\n').encode());"


@pytest.fixture(autouse=True, params=["natively", "in Python"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds with the C side and without it."""
    if request.param == "in Python":
        monkeypatch.setenv("EVERDECK_NATIVE", "0")
        monkeypatch.setattr(native, "_library", lambda: None)
    elif not native.available():
        pytest.skip("the C side is not built here (no compiler when the package was installed)")


def _own_fds() -> set[str]:
    return {link.name for link in Path("/proc/self/fd").iterdir()}


def _python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", TELL + code + "\nimport time;time.sleep(100)"]


def test_a_worker_has_its_own_session_and_group(nursery: Nursery) -> None:
    """New session, so no terminal's Ctrl-C reaches it and its group can be signalled whole."""
    one = nursery.start(["sleep", "100"])

    stat = ids.read_stat(one.pid)

    assert (stat.session, stat.pgrp, stat.ppid) == (one.pid, one.pid, os.getpid())


def test_no_descriptor_leaks_into_a_worker(nursery: Nursery, tmp_path: Path) -> None:
    """Standard streams, the lock and what was passed; nothing else, though the owner has inheritable ones."""
    leaky = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(leaky, True)
    try:
        one = nursery.start(_python("say('ready')"))
        assert one.line() == "ready", "its loader has closed the libraries that it read"
        targets = {int(link.name): str(link.readlink()) for link in Path(f"/proc/{one.pid}/fd").iterdir()}
    finally:
        os.close(leaky)

    extra = sorted(target for fd, target in targets.items() if fd > 2)
    assert len(extra) == 2, targets
    assert any(target.startswith("pipe:") for target in extra)
    assert str(one.tree.lock_path) in extra


@pytest.mark.parametrize("birth", [Birth(), Birth(nice=1)], ids=["plain", "with something to do first"])
@pytest.mark.parametrize("given", [{"ONLY": "this"}, {"ONLY": "this", "LC_CTYPE": "C"}], ids=["", "with a locale"])
def test_the_environment_is_exactly_what_was_given(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch, birth: Birth, given: dict[str, str]
) -> None:
    """The owner's own environment, with whatever keys it holds, is not passed on; nor is what a launcher adds."""
    monkeypatch.setenv("OWNERS_API_KEY", "hunter2")

    one = nursery.start(["sleep", "100"], env=given, birth=birth)

    while not ids.read_proc(one.pid, "cmdline").startswith(b"sleep"):
        os.sched_yield()  # a start waits for no exec, and until then the memory that is shown is the owner's
    environ = ids.read_proc(one.pid, "environ")
    found = dict(pair.decode().split("=", 1) for pair in environ.split(b"\0") if pair)
    assert set(found) == {"EVERDECK_COOKIE", "PATH", "SAY", *given}
    assert {name: found[name] for name in given} == given


def test_directory_and_umask(nursery: Nursery, tmp_path: Path) -> None:
    """The worker works where it was told to, and its files have the rights it was told."""
    place = tmp_path / "place"
    place.mkdir()

    one = nursery.start(
        _python("open('f','w').close();say(os.getcwd(), oct(os.stat('f').st_mode&0o777))"),
        cwd=place,
        birth=Birth(umask=0o077),
    )

    assert one.line() == f"{place} 0o600"


@pytest.mark.parametrize(
    ("program", "number"), [("/no/such/program", errno.ENOENT), ("/etc/passwd", errno.EACCES), ("/etc", errno.EACCES)]
)
def test_a_program_that_cannot_be_executed_is_named(nursery: Nursery, program: str, number: int) -> None:
    """The error says which program and which errno; no process and no descriptor stays."""
    before, children = _own_fds(), own_children()

    with pytest.raises(SpawnFailed) as caught:
        nursery.start([program])

    assert program in str(caught.value)
    assert caught.value.errno == number
    assert _own_fds() == before
    assert own_children() == children


def test_a_missing_directory_is_named(nursery: Nursery) -> None:
    """The working directory is the culprit, not the program."""
    with pytest.raises(SpawnFailed, match="working directory /no/such/place"):
        nursery.start(["sleep", "1"], cwd="/no/such/place")


def test_limits_hold_before_the_program_runs(nursery: Nursery) -> None:
    """Open files, nice and oom_score_adj are what the program itself sees from its first instruction."""
    code = (
        "import resource;say(resource.getrlimit(resource.RLIMIT_NOFILE), os.nice(0),"
        "open('/proc/self/oom_score_adj').read().strip(),"
        "ascii(sorted(os.listdir('/proc/self/fd'))), os.getsid(0)==os.getpid())"
    )

    one = nursery.start(_python(code), birth=Birth(open_files=64, nice=5, oom_score_adj=500))

    words = one.line()
    assert words.startswith("(64, 64) 5 500 "), words
    assert words.endswith("True")
    fds = re.findall(r"'(\d+)'", words)
    assert len(fds) == 3 + 2 + 1, "streams, lock, pipe, and the listing's own: the launcher's report pipe is closed"


def test_a_refused_limit_is_named_and_leaves_nothing(nursery: Nursery) -> None:
    """The launcher reports which step the kernel refused."""
    children = own_children()
    with pytest.raises(SpawnFailed, match=r"limits\.open_files"):
        nursery.start(["sleep", "1"], birth=Birth(open_files=2**40))
    with pytest.raises(SpawnFailed, match=r"no/such.*No such file"):
        nursery.start(["/no/such"], birth=Birth(nice=1))
    assert own_children() == children


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change a worker's account")
def test_a_worker_runs_as_another_user(nursery: Nursery, tmp_path: Path) -> None:
    """User, group and supplementary groups are the account's, and root is not kept."""
    nobody = pwd.getpwnam("nobody")

    one = nursery.start(
        ["bash", "-c", "echo $(id -u) $(id -g) $(id -G) >&$SAY; exec sleep 100"],
        cwd="/",
        birth=Birth(uid=nobody.pw_uid, gid=nobody.pw_gid, groups=(nobody.pw_gid,)),
    )

    assert one.line() == f"{nobody.pw_uid} {nobody.pw_gid} {nobody.pw_gid}"


def test_a_hosts_blocked_and_ignored_signals_are_not_inherited(nursery: Nursery) -> None:
    """A worker of a host that blocks SIGTERM in this thread and ignores SIGINT can still be asked to leave."""
    code = (
        "import signal;say(sorted(signal.pthread_sigmask(signal.SIG_BLOCK,())),"
        "signal.getsignal(signal.SIGHUP)==signal.SIG_DFL)"
    )
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        one = nursery.start(_python(code))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGHUP, old)

    assert one.line() == "[] True"


def test_a_spawn_is_one_vfork_and_no_polling(tmp_path: Path) -> None:
    """What the kernel sees of one start: a vfork, an exec, one look at stat; no sleep, no loop."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    script = tmp_path / "one.py"
    script.write_text(
        "import os\nfrom everdeck.kernel import spawn\nnull=os.open('/dev/null',os.O_RDWR|os.O_CLOEXEC)\n"
        "def go(): spawn.identify(spawn.spawn(['true'],env={'PATH':'/bin'},cwd='/',"
        "stdin_fd=null,stdout_fd=null,stderr_fd=null))\n"
        "go()\nos.wait()\nos.write(null,b'BEGIN')\n"
        "go()\nos.write(null,b'END')\nos.wait()\n"
    )
    out = tmp_path / "trace"
    traced = subprocess.run([strace, "-o", out, sys.executable, script], check=False, capture_output=True, timeout=60)
    if traced.returncode != 0:
        pytest.skip(f"strace does not work here: {traced.stderr[-200:]!r}")
    text = out.read_text()
    between = text[text.index(', "BEGIN"') : text.index(', "END"')]
    calls = re.findall(r"^(\w+)\(", between, re.MULTILINE)

    assert sum(call in {"vfork", "clone", "clone3"} for call in calls) == 1
    assert "pidfd_open" in calls or "CLONE_PIDFD" in between
    assert not {"nanosleep", "clock_nanosleep", "select", "epoll_wait", "wait4"} & set(calls), calls
    assert len(calls) < 40, calls


def test_a_thousand_starts_and_stops_leak_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """No descriptor, no zombie, no thread is left after a thousand lives (two hundred by the slower way)."""
    lives = 1000 if "natively" in request.node.name else 200
    # An empty cgroup proves the end at once; without one every stop is a pass over /proc.
    cgroup = request.getfixturevalue("cgroup_dir") if containment.cgroup_home() is not None else None
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    threads, children = threading.active_count(), own_children()
    before = len(_own_fds())
    lock_path = tmp_path / "lock"
    for _ in range(lives):
        lock_fd = flock.take(lock_path)
        assert lock_fd is not None
        cookie = new_cookie()
        spawned = spawn.spawn(
            ["sleep", "100"],
            env={"EVERDECK_COOKIE": cookie, "PATH": os.environ["PATH"]},
            cwd="/",
            stdin_fd=null,
            stdout_fd=null,
            stderr_fd=null,
            keep_fds=[lock_fd],
        )
        os.close(lock_fd)
        tree = Tree("w", cookie, lock_path, spawn.identify(spawned), cgroup)
        with escalation.Escalation([escalation.Subject(tree, spawned.pidfd)]) as one:
            assert one.run()["w"].gone
        assert exits.reap_child(spawned.pidfd) is not None
        os.close(spawned.pidfd)
    os.close(null)

    assert len(_own_fds()) == before - 1
    assert threading.active_count() == threads
    assert own_children() == children, "no zombie is left"


def test_a_worker_is_born_in_a_cgroup_whose_last_one_was_killed(nursery: Nursery, cgroup_dir: Path) -> None:
    """The kernel remembers a kill for as long as the directory exists, and would end the next one at its birth."""
    cgroup = cgroup_dir / "w"
    for _ in range(3):
        assert containment.make_fresh_cgroup(cgroup)
        one = nursery.start(_python("say('ready')"), birth=Birth(cgroup=str(cgroup), cgroup_required=True))
        assert one.line() == "ready"
        assert containment.is_inside(cgroup, one.pid)
        containment.kill_cgroup(cgroup)
        assert select.select([one.pidfd], [], [], 30)[0]
        exits.reap_child(one.pidfd)
        assert not containment.is_populated(cgroup)


def test_a_worker_keeps_the_limit_on_open_files_that_its_daemon_was_started_with(tmp_path: Path) -> None:
    """The daemon raises its own soft limit to the hard one; a worker finds the old one, and may raise it itself."""
    script = (
        "import os, resource, sys\n"
        "from pathlib import Path\n"
        "from everdeck.kernel import spawn\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))\n"
        "spawn.raise_open_files()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1000, 1000)\n"
        "held = [os.open('/dev/null', os.O_RDONLY) for _ in range(int(sys.argv[1]))]\n"
        "out = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT, 0o600)\n"
        "null = os.open('/dev/null', os.O_RDWR)\n"
        "child = spawn.spawn(['sh', '-c', 'ulimit -Sn; ulimit -Hn'], env={'PATH': os.environ['PATH']}, cwd='/',\n"
        "                    stdin_fd=null, stdout_fd=out, stderr_fd=out)\n"
        "os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)\n"
        "print(Path(sys.argv[2]).read_text().split())\n"
    )
    for natively, held in (("1", 0), ("0", 0), ("0", 400)):
        out = tmp_path / f"{natively}-{held}"
        done = subprocess.run(
            [sys.executable, "-c", script, str(held), out],
            env={**os.environ, "EVERDECK_NATIVE": natively},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == "['300', '1000']", (natively, held, done.stdout, done.stderr)


def test_a_birth_leaves_the_descriptors_of_its_parent_alone(tmp_path: Path) -> None:
    """It shares our table for a moment where that is large: nothing of ours is closed, moved or made inheritable."""
    heard_fd, say_fd = os.pipe()
    many = [fcntl.fcntl(heard_fd, fcntl.F_DUPFD_CLOEXEC, 1000) for _ in range(3)]
    lock_fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    null_fd = os.open(os.devnull, os.O_RDWR)
    ours = {fd: fcntl.fcntl(int(fd), fcntl.F_GETFD) for fd in _own_fds() if Path(f"/proc/self/fd/{fd}").exists()}
    start = spawn.Start(
        ["sh", "-c", 'for fd in /proc/$$/fd/*; do [ ! -e "$fd" ] || echo "$fd"; done'],
        env={"PATH": os.environ["PATH"]},
        cwd="/",
        stdio=(null_fd, say_fd, null_fd),
        keep_fds=[lock_fd],
        birth=Birth(),
    )
    try:
        start.call()
        child = start.child()
        os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
        os.close(child.pidfd)
        names = {Path(word).name for word in os.read(heard_fd, 4096).decode().split()}
        assert names == {"0", "1", "2", str(lock_fd)}
        assert {fd: fcntl.fcntl(int(fd), fcntl.F_GETFD) for fd in ours} == ours
        assert start.is_quick, "nothing of it needed the interpreter"
    finally:
        for fd in (heard_fd, say_fd, lock_fd, null_fd, *many):
            os.close(fd)
