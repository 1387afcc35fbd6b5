"""JupyterHub with Everdeck's spawner, used over HTTP as a browser does: real hub, real proxy, real servers."""

import contextlib
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from everdeck.integrations.jupyterhub_names import server_of, worker_of
from everdeck.kernel import sandbox
from support import hostile_accounts, jupyter_light
from support.cli_daemon import Person, free_port, pidfd_of
from support.jupyter_hub import PATIENCE_SECONDS, ROOT, Browser, Hub, proxy_program, running
from support.repo_examples import examples_of
from support.waiting import until

NS_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
TRIALS = int(os.environ.get("EVERDECK_HUB_TRIALS", "2"))
POINTS = ["start.spawned", "jupyterhub.listening", "jupyterhub.begin", "start.intent-recorded", "jupyterhub.started"]
LEAVE_SETSID = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
LIVES_AT_HOME = """
import grp, os, pwd
me = pwd.getpwuid(os.getuid())
groups = grp.getgrnam("games").gr_gid in os.getgroups()
(os.getcwd(), os.environ["HOME"], os.environ["USER"], groups) == (me.pw_dir, me.pw_dir, me.pw_name, True)
"""
PERSON = f"evdk-{os.getpid()}-alice"
HOW_TO = [
    example.text
    for example in examples_of(ROOT / "docs/how-to/jupyterhub.md")
    if example.file == "jupyterhub_config.py" and "kubernetes:" not in example.text  # which needs a cluster
]
LIGHT = f"c.Spawner.cmd = [{sys.executable!r}, {jupyter_light.__file__!r}]\n"
HOOK = """
import asyncio
import pathlib
from everdeck import AsyncDeck, crashpoints
def hook(spawner):
    armed = pathlib.Path("crash-at")
    if armed.exists():
        crashpoints._name = armed.read_text()
        armed.unlink()
    if spawner.user.name == {person!r}:
        spawner.run_as, spawner.cmd = "account", ["jupyterhub-singleuser"]
    if spawner.user.name == "faraway":
        spawner.deck, spawner.deck_token, spawner.run_as = {url!r}, {token!r}, "hub"
    if spawner.user.name == "small":
        spawner.mem_limit, spawner.cpu_limit = "300M", 0.5
    if spawner.user.name == "sealed":
        spawner.internal_ssl = True
    if spawner.user.name == "tardy":
        spawner.start_timeout, AsyncDeck.start = 1, late
start = AsyncDeck.start
async def late(*words, **more):
    AsyncDeck.start = start
    await asyncio.sleep(2)
    return await start(*words, **more)
c.Spawner.pre_spawn_hook = hook
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
pytestmark = pytest.mark.timeout(400)


@contextlib.contextmanager
def account(name: str) -> Iterator[None]:
    """A person of this machine, with a home and a group besides."""
    subprocess.run(["useradd", "--create-home", "--user-group", "--groups", "games", name], check=True)
    try:
        yield
    finally:
        subprocess.run(["userdel", "--remove", name], check=False, capture_output=True)


@contextlib.contextmanager
def hub_without_root(directory: Path, **options: Path) -> Iterator[tuple[Hub, str]]:
    """A hub of an ordinary account, and one of its users."""
    with contextlib.ExitStack() as stack:
        owner = None
        if os.geteuid() == 0:
            owner = stack.enter_context(hostile_accounts.made("hub"))
            os.chown(directory, owner.uid, owner.gid)
        # A kernel in a strict sandbox is a kernel all the same.
        strict = "" if sandbox.why_not_strict() else 'c.EverdeckSpawner.sandbox = "strict"\n'
        more = HOW_TO[0] + strict
        yield stack.enter_context(running(Hub(directory, more, account=owner, **options))), "alice"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every account can pass through."""
    proxy_program()
    with hostile_accounts.open_place() as directory:
        yield directory


def test_a_killed_hub_finds_the_same_server_and_kernel(place: Path) -> None:
    """Log in, spawn, 6 × 7 in a kernel; kill -9 the hub and start it: same pid, same kernel, the variable is set."""
    with hub_without_root(place) as (hub, user):
        nothing_is_lost(hub, user)


@pytest.mark.skipif(not os.environ.get("EVERDECK_OLD_VERSIONS"), reason="slow: set EVERDECK_OLD_VERSIONS=1")
def test_the_oldest_jupyterhub_loses_nothing_either(place: Path) -> None:
    """The first version that we claim, in an environment of its own."""
    python = place / "old/bin/python"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(place / "old")], check=True)
    what = ["-e", f"{ROOT}[remote]", "jupyterhub==4.0.0", "jupyterlab"]
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", str(python), *what], check=True)
    with hub_without_root(place, scripts=python.parent) as (hub, user):
        nothing_is_lost(hub, user)


def nothing_is_lost(hub: Hub, user: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """The whole story, over HTTP; and what happens while there is no hub."""
    deck = Person(hub.state)
    with Browser(hub, user) as browser:
        assert "spawn-pending" in str(browser.logs_in().url)
        told = browser.progress()
        assert any(re.search(r"runs as pid \d+", event["message"]) for event in told), told
        browser.gets_in()
        kernel = browser.opens_kernel()
        assert browser.computes(kernel, "answer = 6 * 7\nanswer") == "42"
        escaped = int(browser.computes(kernel, LEAVE_SETSID))
        assert browser.computes(kernel, "import getpass; getpass.getuser()") == repr(user)
        if user == PERSON:
            assert browser.computes(kernel, LIVES_AT_HOME) == "True"
        before = deck.worker(user)
        token = re.search(r"'JUPYTERHUB_API_TOKEN': '(\w+)'", browser.computes(kernel, "import os; os.environ"))

        hub.kill()
        assert deck.worker(user)["pid"] == before["pid"]
        meanwhile()
        hub.start()

        after = deck.worker(user)
        assert (after["pid"], after["adopted"], after["labels"]["user"]) == (before["pid"], True, user)
        assert browser.computes(kernel, "answer") == "42"
        assert "Connecting to kernel" in deck.types("logs", user, "-n", "1000").stdout, "what it said before is there"
        assert token is not None
        assert token[1].encode() not in (hub.state / "deck.db").read_bytes()
        assert token[1] not in deck.types("inspect", user, "--json").stdout
        with pidfd_of(escaped) as escapee:
            hub.ask("DELETE", f"users/{user}/server", expect=204)
            assert select.select([escapee], [], [], PATIENCE_SECONDS)[0], "what called setsid ends with its server"
        assert deck.worker(user)["state"] == "stopped"


# --- the spawner, with a server that starts in a moment ---------------------------------------------------------


def alone(hub: Hub, user: str) -> dict[str, object]:
    """The one server of a user, as it tells itself through the proxy."""
    facts: dict[str, object] = httpx.get(f"{hub.url}/user/{user}/", follow_redirects=True).json()
    pids = [
        int(entry.name)
        for entry in os.scandir("/proc")
        if entry.name.isdigit() and is_server_of(Path(entry.path), hub, user)
    ]
    assert pids == [facts["pid"]]
    return facts


def is_server_of(process: Path, hub: Hub, user: str) -> bool:
    """Is this process a server of the user?"""
    with contextlib.suppress(OSError):
        words, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        return b"jupyter_light" in words and f"EVERDECK_DIR={hub.state}/workers/{user}\0".encode() in environment
    return False


def spawned(hub: Hub, user: str, server: str = "") -> None:
    """Ask for a server by the API, and wait until the hub says that it is ready."""
    hub.ask("POST", f"users/{user}/servers/{server}" if server else f"users/{user}/server")
    until(lambda: hub.ask("GET", f"users/{user}")["servers"].get(server, {}).get("ready"), "the server is ready")


@pytest.fixture(scope="module")
def light() -> Iterator[Hub]:
    """A hub whose servers start in a moment; as root, with a uid of its own for each."""
    proxy_program()
    run_as = "auto" if os.geteuid() == 0 else "hub"
    with hostile_accounts.open_place() as directory:
        faraway = Person(directory / "faraway")
        address = f"127.0.0.1:{free_port()}"
        config = "".join(HOW_TO[1:]).replace("/var/lib/everdeck", f"{directory}/.everdeck") + LIGHT
        config += f"c.EverdeckSpawner.run_as = {run_as!r}\nc.Spawner.environment = {{'PASSWORD': 'hush-hush'}}\n"
        faraway.up("--listen", address)
        token = (faraway.state / "token").read_text().strip()
        hook = HOOK.format(url=f"http://{address}", token=token, person=PERSON)
        with contextlib.ExitStack() as stack:
            stack.callback(faraway.leaves)
            if os.geteuid() == 0:
                stack.enter_context(account(PERSON))
            yield stack.enter_context(running(Hub(directory, config + hook)))


def test_named_servers_secrets_and_a_uid_of_ones_own(light: Hub) -> None:
    """Each server is a worker with labels; what the configuration puts into the environment is a secret."""
    deck = Person(light.state)
    spawned(light, "alice")
    spawned(light, "alice", "gpu")

    facts = alone(light, "alice")
    env = facts["env"]
    assert isinstance(env, dict)
    assert env["PASSWORD"] == "hush-hush"
    assert facts["cwd"] == env["HOME"] == str(light.state / "workers/alice/data")
    named = httpx.get(f"{light.url}/user/alice/gpu/").json()
    if os.geteuid() == 0:
        assert facts["uid"] >= 1_900_000_000
        assert named["uid"] != facts["uid"]
    assert deck.worker("alice:gpu")["labels"] == {"app": "jupyterhub", "server": "gpu", "user": "alice"}
    assert "hush-hush" not in deck.types("inspect", "alice", "--json").stdout
    assert b"hush-hush" not in b"".join(path.read_bytes() for path in light.state.glob("deck.db*"))
    started = [event for event in deck.types("events", "--json").stdout.splitlines() if '"started"' in event]
    assert json.loads(started[0])["detail"]["by"]["token"] == "jupyterhub:alice"
    light.ask("DELETE", "users/alice/servers/gpu", json={"remove": True})
    until(lambda: "alice:gpu" not in {one["name"] for one in deck.seen()["workers"]}, "a deleted server is removed")


def test_a_server_runs_in_a_daemons_deck(light: Hub) -> None:
    """The same verbs behind a URL and a token; the hub's own deck knows nothing of it."""
    light.ask("POST", "users/faraway")
    spawned(light, "faraway")
    far = Person(light.directory / "faraway")
    assert httpx.get(f"{light.url}/user/faraway/").json()["pid"] == far.worker("faraway")["pid"]
    assert "faraway" not in {one["name"] for one in Person(light.state).seen()["workers"]}
    far.kills(far.worker("faraway")["pid"])
    until(lambda: light.ask("GET", "users/faraway")["server"] is None, "the hub heard of the end from afar")


def test_limits_hold_or_are_refused(light: Hub) -> None:
    """``mem_limit`` and ``cpu_limit`` are the worker's limits; a machine that cannot hold them says which."""
    light.ask("POST", "users/small")
    answer = light.ask("POST", "users/small/server")
    if answer is not None and "message" in answer:
        assert re.search(r"limits\.(memory_bytes|cpu_percent)", answer["message"])
    else:
        limits = json.loads(Person(light.state).types("inspect", "small", "--json").stdout)["spec"]["limits"]
        assert (limits["memory_bytes"], limits["cpu_percent"]) == (300 * 1024**2, 50)


def test_an_end_is_heard_at_once_and_not_polled_for(light: Hub) -> None:
    """The hub knows that the server is gone though its poll interval is 0; the log has its last words."""
    spawned(light, "alice")
    with contextlib.suppress(httpx.HTTPError):
        httpx.get(f"{light.url}/user/alice/?exit=7")
    until(lambda: light.ask("GET", "users/alice")["server"] is None, "the hub heard of the end")
    assert "told to end with 7" in Person(light.state).types("logs", "alice").stdout
    assert "exit code: 7" in light.log()


def test_a_server_that_cannot_start_tells_why_at_once(light: Hub) -> None:
    """Its last words are on the page; a worker that is nobody's server is left alone."""
    light.ask("POST", "users/unlucky")
    refused = light.ask("POST", "users/unlucky/server")
    assert "no luck today" in refused["message"]

    if os.geteuid() == 0:
        light.ask("POST", "users/sealed")
        refused = light.ask("POST", "users/sealed/server")
        assert "certificates" in refused["message"]

    Person(light.state).types("start", worker_of("zoë"), "--", "sleep", "1000")
    light.ask("POST", "users/zoë")
    refused = light.ask("POST", "users/zoë/server")
    assert "not a server of this user" in refused["message"]
    assert Person(light.state).worker("zo+C3+AB")["state"] == "running"


def test_a_start_that_takes_too_long_leaves_no_server_behind(light: Hub) -> None:
    """The hub gives up before the deck has begun: the server is started all the same, and then stopped."""
    light.ask("POST", "users/tardy")
    light.ask("POST", "users/tardy/server")
    until(lambda: light.ask("GET", "users/tardy")["pending"] is None, "the hub gave up")
    assert light.ask("GET", "users/tardy")["server"] is None
    assert Person(light.state).worker("tardy")["state"] == "stopped"


@pytest.mark.timeout(200 + 100 * TRIALS)
def test_a_hub_killed_in_the_middle_of_a_spawn_has_one_server_and_lets_its_user_in(light: Hub) -> None:
    """At chosen places, then anywhere: afterwards exactly one server, and the user reaches it."""
    chance = random.Random(20)
    for trial in range(TRIALS):
        with contextlib.suppress(httpx.HTTPError):
            light.ask("DELETE", "users/bob/server")
        if trial < len(POINTS):
            (light.directory / "crash-at").write_text(POINTS[trial])
            with contextlib.suppress(httpx.HTTPError):
                light.ask("POST", "users/bob/server")
            assert light.ended() == -signal.SIGKILL
        else:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(
                    f"{light.url}/hub/api/users/bob/server",
                    headers={"authorization": f"token {light.token}"},
                    timeout=chance.uniform(0.01, 1),
                )
            light.kill()
        light.start()
        spawned(light, "bob")
        alone(light, "bob")


@needs_root
@pytest.mark.skipif(not os.access(NS_LAST_PID, os.W_OK), reason="needs a writable ns_last_pid")
def test_accounts_keep_their_kernels_and_a_stranger_with_the_pid_of_a_server_is_never_signalled(light: Hub) -> None:
    """A real account's kernel outlives the hub. Meanwhile a server dies and somebody else gets its pid: no stop reaches
    him.
    """
    spawned(light, "alice")
    pid = Person(light.state).worker("alice")["pid"]
    strangers: list[subprocess.Popen[bytes]] = []

    def another_gets_the_pid() -> None:
        Person(light.state).kills(pid)
        strangers.append(taking(pid))

    try:
        nothing_is_lost(light, PERSON, another_gets_the_pid)
        assert light.ask("GET", "users/alice")["server"] is None
        light.ask("DELETE", "users/alice/server")
        spawned(light, "alice")
        assert alone(light, "alice")["pid"] != pid
        assert [stranger.poll() for stranger in strangers] == [None]
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_a_polite_restart_keeps_the_servers(light: Hub) -> None:
    """The configuration of the how-to: a hub that is asked to leave leaves them running, and the next one has them."""
    assert len(HOW_TO) == 2
    spawned(light, "alice")
    light.stop_politely()
    server = Person(light.state).worker("alice")
    assert server["state"] == "running"
    assert is_server_of(Path(f"/proc/{server['pid']}"), light, "alice")
    light.start()
    assert alone(light, "alice")["pid"] == server["pid"]


def taking(pid: int) -> "subprocess.Popen[bytes]":
    """A stranger with this pid; others fork on this machine too, so it may take some attempts."""

    def attempt() -> "subprocess.Popen[bytes] | None":
        if Path(f"/proc/{pid}").exists():
            return None
        NS_LAST_PID.write_text(str(pid - 1))
        candidate = subprocess.Popen(["sleep", "1000"])
        if candidate.pid == pid:
            return candidate
        candidate.kill()
        candidate.wait()
        return None

    stranger: subprocess.Popen[bytes] = until(attempt, f"pid {pid} is taken")
    return stranger


@pytest.mark.parametrize(
    ("user", "server", "worker"),
    [
        ("alice", "", "alice"),
        ("alice", "gpu", "alice:gpu"),
        ("zoë", "a b", "zo+C3+AB:a+20b"),
        ("a+b@c.d", ":", "a+2Bb@c.d:+3A"),
        ("..", "", "+2E+2E"),
    ],
)
def test_a_worker_tells_whose_server_it_is(user: str, server: str, worker: str) -> None:
    """By its name, both ways."""
    assert worker_of(user, server) == worker
    assert server_of(worker) == (user, server)


def test_a_name_that_is_too_long_keeps_its_beginning_and_its_hash() -> None:
    """Two long names stay two."""
    one, two = worker_of("x" * 300), worker_of("x" * 301)
    assert len({one, two}) == 2
    assert len(one) == 128
    assert server_of(one) is None
