"""Who gets in, and what never gets out."""

import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from everdeck.access import Role
from everdeck.errors import SpecError, StateDirRefused
from everdeck.server.auth import GUESS_WINDOW_SECONDS, GUESSES, GuessLimit
from everdeck.server.tokens import MOST_SESSIONS, SESSION_LIFE, Sessions, Tokens, token_of
from support.cli_daemon import PATIENCE_SECONDS, Person, free_port
from support.waiting import until

SLEEPER = ("--", "sleep", "1000")


class Served:
    """A daemon on TCP, and its token."""

    def __init__(self, person: Person, base: str, token: str) -> None:
        self.person, self.base, self.token = person, base, token

    def session(self) -> str:
        """What a browser has after its login."""
        answer = httpx.post(f"{self.base}api/v1/login", json={"token": self.token}, timeout=PATIENCE_SECONDS)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["session"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One daemon for the file."""
    person = Person(tmp_path_factory.mktemp("security") / "state")
    try:
        shown = person.types("up", "--detach", "--listen", f"127.0.0.1:{free_port()}").stdout
        base = re.search(r"http://\S+/", shown)
        assert base is not None, shown
        person.types("start", "alice", *SLEEPER)
        yield Served(person, base.group(0), (person.state / "token").read_text().strip())
    finally:
        person.leaves()


@pytest.fixture
def browser(served: Served) -> Iterator[httpx.Client]:
    """A client that keeps cookies, not logged in."""
    with httpx.Client(base_url=served.base, timeout=PATIENCE_SECONDS) as client:
        yield client


def test_socket_and_files_are_for_the_owner_only(served: Served) -> None:
    """0700 for the directory, 0600 for the socket, the token, the log and what was applied."""
    state = served.person.state
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    for name in ("http.sock", "token", "daemon.log", "deck.db", "deck.lock"):
        assert stat.S_IMODE((state / name).stat().st_mode) == 0o600, name


def test_another_user_is_refused_even_where_files_let_him_in(served: Served) -> None:
    """SO_PEERCRED decides, not only the modes: the connection is cut before a word."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    state = served.person.state
    script = (
        "import os, socket, sys\n"
        "folder = os.open(sys.argv[1], os.O_PATH)\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(60)\n"
        "s.connect(f'/proc/self/fd/{folder}/http.sock')\n"
        "try:\n"
        "    s.sendall(b'GET /api/v1/workers HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); got = s.recv(100)\n"
        "except OSError: got = b''\n"
        "print(repr(got))\n"
    )
    try:
        (state / "http.sock").chmod(0o666)
        state.chmod(0o755)
        done = subprocess.run([sys.executable, "-c", script, state], capture_output=True, text=True, check=True)
    finally:
        state.chmod(0o700)
        (state / "http.sock").chmod(0o600)
    assert done.stdout.strip() == "b''"


def test_without_the_token_there_is_only_the_door(served: Served, browser: httpx.Client) -> None:
    """401 for everything but the page's own files, the login and the health."""
    for path in ("/api/v1/workers", "/api/v1/deck", "/api/v1/events", "/metrics", "/api/v1/workers/alice/logs"):
        refused = browser.get(path)
        assert refused.status_code == 401, path
        assert refused.headers["www-authenticate"].startswith("Bearer")
        assert refused.headers["content-type"] == "application/problem+json"
    assert browser.post("/api/v1/workers/alice/stop").status_code == 401
    assert browser.get("/healthz").json() == {"up": True, "supervised": True}
    page = browser.get("/")
    assert page.status_code == 200
    assert "'unsafe" not in page.headers["content-security-policy"]
    assert browser.get("/api/v1/nonsense").status_code == 401


@pytest.mark.parametrize(
    "given", ["", "x", "Bearer", "Bearer x", "Bearer ü", "Basic eDp4", "Bearer " + "a" * 5000, "bearer\tx"]
)
def test_wrong_tokens_are_refused(served: Served, browser: httpx.Client, given: str) -> None:
    """Fuzzed authorizations end in 401, never in an error of ours."""
    answer = browser.get("/api/v1/workers", headers={"Authorization": given.encode()})
    assert answer.status_code == 401


def test_a_bearer_token_opens_and_needs_no_csrf(served: Served, browser: httpx.Client) -> None:
    """For scripts: the token in a header."""
    headers = {"Authorization": f"Bearer {served.token}"}
    assert browser.get("/api/v1/workers", headers=headers).json()["total"] == 1
    assert browser.post("/api/v1/workers/alice/reset", headers=headers).status_code == 200


def test_a_login_sets_no_cookie_and_gives_a_session_that_holds_no_token(served: Served, browser: httpx.Client) -> None:
    """A cookie would be sent to every port of the host, so to every worker with a page."""
    answer = browser.post("/api/v1/login", json={"token": served.token})
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    told = answer.json()
    assert (told["name"], told["role"], told["labels"]) == ("deck", "admin", {})
    assert served.token not in answer.text
    headers = {"Authorization": f"Bearer {told['session']}"}
    assert browser.get("/api/v1/workers", headers=headers).status_code == 200
    assert browser.get("/api/v1/session", headers=headers).json()["role"] == "admin"
    assert browser.get("/api/v1/workers", headers={"Cookie": f"everdeck_session={told['session']}"}).status_code == 401
    page = browser.get("/login")
    assert page.status_code == 200
    assert "set-cookie" not in page.headers


def test_logging_out_ends_the_session_on_the_server(served: Served, browser: httpx.Client) -> None:
    """Whoever has copied it has nothing; the sessions of others go on."""
    assert browser.post("/api/v1/login", json={"token": "wrong"}).status_code == 401
    mine, others = ({"Authorization": f"Bearer {served.session()}"} for _ in range(2))
    assert browser.get("/api/v1/workers", headers=mine).status_code == 200
    assert browser.post("/api/v1/logout", headers=mine).status_code == 204
    assert browser.get("/api/v1/workers", headers=mine).status_code == 401
    assert browser.get("/api/v1/workers", headers=others).status_code == 200


def test_a_session_outlives_the_daemon_and_is_kept_as_a_digest(served: Served, browser: httpx.Client) -> None:
    """A reload logs nobody out; the file has neither session nor token."""
    session = served.session()
    served.person.types("reload")
    headers = {"Authorization": f"Bearer {session}"}
    assert browser.get("/api/v1/workers", headers=headers).status_code == 200
    kept = served.person.state / "sessions.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert session not in kept.read_text()
    assert served.token not in kept.read_text()


def test_a_download_needs_a_ticket_that_is_good_once(served: Served, browser: httpx.Client) -> None:
    """For that one address; a browser opens it by itself, without a header."""
    headers = {"Authorization": f"Bearer {served.session()}"}
    path = "/api/v1/workers/alice/logs/download"
    assert browser.get(path).status_code == 401

    def ticket() -> str:
        return str(browser.post("/api/v1/ticket", json={"path": path}, headers=headers).json()["ticket"])

    assert browser.get("/api/v1/workers", params={"ticket": ticket()}).status_code == 401
    one = ticket()
    assert browser.get(path, params={"ticket": one}).status_code == 200
    assert browser.get(path, params={"ticket": one}).status_code == 401
    assert browser.post("/api/v1/ticket", json={"path": "/api/v1/workers"}, headers=headers).status_code in {400, 422}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8787", "127.0.0.1.evil.example", "", "[", "localhost.evil"]
)
def test_a_strange_host_is_refused(served: Served, browser: httpx.Client, host: str) -> None:
    """DNS rebinding: a name that resolves to us is not ours."""
    headers = {"Authorization": f"Bearer {served.token}", "Host": host}
    assert browser.get("/api/v1/workers", headers=headers).status_code in {400, 403}


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1", "http://["]
)
def test_a_strange_origin_is_refused(served: Served, browser: httpx.Client, origin: str) -> None:
    """Another site's page may neither read nor act, whatever the browser sends along."""
    headers = {"Authorization": f"Bearer {served.token}", "Origin": origin}
    assert browser.get("/api/v1/workers", headers=headers).status_code == 403
    assert browser.post("/api/v1/login", json={"token": served.token}, headers={"Origin": origin}).status_code == 403
    assert (
        browser.get(
            "/api/v1/workers", headers={"Authorization": f"Bearer {served.token}", "Sec-Fetch-Site": "cross-site"}
        ).status_code
        == 403
    )


def test_our_own_origin_and_names_are_welcome(served: Served, browser: httpx.Client) -> None:
    """The page itself sends an Origin when it acts."""
    port = served.base.rstrip("/").rpartition(":")[2]
    for host in ("127.0.0.1", "localhost"):
        headers = {
            "Authorization": f"Bearer {served.token}",
            "Host": f"{host}:{port}",
            "Origin": f"http://{host}:{port}",
        }
        assert browser.get("/api/v1/workers", headers=headers).status_code == 200


def test_guessing_is_slowed_down_and_the_right_token_is_let_in(served: Served, browser: httpx.Client) -> None:
    """Wrong tokens are told to wait; somebody at the same address who knows the token is not kept out by them."""
    guesses = [browser.post("/api/v1/login", json={"token": f"guess{n}"}) for n in range(GUESSES + 2)]
    assert guesses[-1].status_code == 429
    assert 0 < int(guesses[-1].headers["retry-after"]) <= GUESS_WINDOW_SECONDS + 1
    assert browser.post("/api/v1/login", json={"token": served.token}).status_code == 200
    headers = {"Authorization": f"Bearer {served.token}"}
    assert browser.get("/api/v1/workers", headers=headers).status_code == 200


def test_the_token_is_in_no_log_no_list_and_no_answer(served: Served, browser: httpx.Client) -> None:
    """It is shown once, on the terminal that asked for it."""
    person = served.person
    assert served.token not in (person.state / "daemon.log").read_text()
    shown = subprocess.run(["ps", "axeww"], capture_output=True, text=True, check=True).stdout
    assert served.token not in shown
    headers = {"Authorization": f"Bearer {served.token}"}
    for path in ("/", "/api/v1/deck", "/metrics", "/api/v1/events?last=100", "/openapi.json", "/api/v1/templates"):
        assert served.token not in browser.get(path, headers=headers).text
    pid = person.worker("alice")["pid"]
    assert served.token.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_every_answer_has_the_headers_that_protect_it(served: Served, browser: httpx.Client) -> None:
    """A policy that loads nothing, no sniffing, no referrer, no storing of data."""
    headers = {"Authorization": f"Bearer {served.token}"}
    for path in ("/api/v1/workers", "/healthz", "/openapi.json"):
        answer = browser.get(path, headers=headers)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "server" not in answer.headers
        assert "date" in answer.headers


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:8787", "example.invalid:80"])
def test_an_address_others_reach_is_refused_without_tls(tmp_path: Path, address: str) -> None:
    """Exit code 2, before anything is made; --insecure insists."""
    person = Person(tmp_path / "state")
    refused = person.types("up", "--listen", address, expect=2)
    assert "--insecure" in refused.stderr
    assert not person.state.exists()


def test_insisting_and_tls_are_possible(tmp_path: Path) -> None:
    """--insecure listens anywhere; with a certificate the page is https."""
    if subprocess.run(["sh", "-c", "command -v openssl"], capture_output=True, check=False).returncode:
        pytest.skip("needs openssl to make a certificate")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-days",
                "2",
            ),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert),
        ],
        check=True,
        capture_output=True,
    )
    person = Person(tmp_path / "state")
    try:
        words = ("--listen", f"0.0.0.0:{free_port()}", "--tls-cert", str(cert), "--tls-key", str(key))
        shown = person.types("up", "--detach", *words).stdout
        link = re.search(r"https://\S+/", shown)
        assert link is not None, shown
        token = (person.state / "token").read_text().strip()
        answer = httpx.post(f"{link.group(0)}api/v1/login", json={"token": token}, verify=_trusting(cert))
        assert answer.status_code == 200
        # Said for localhost it would hold for every other port of this machine.
        assert "strict-transport-security" not in answer.headers
    finally:
        person.leaves()
    insisting = Person(tmp_path / "state2")
    try:
        insisting.types("up", "--detach", "--insecure", "--listen", "0.0.0.0:0")
    finally:
        insisting.leaves()


def _trusting(cert: Path) -> "object":
    import ssl

    return ssl.create_default_context(cafile=str(cert))


def test_no_http_means_no_tcp_and_no_token(tmp_path: Path) -> None:
    """Nothing listens but the Unix socket."""
    person = Person(tmp_path / "state")
    try:
        owner = person.up("--no-http")
        assert not (person.state / "token").exists()
        inodes = {
            entry.readlink().name for entry in Path(f"/proc/{owner}/fd").iterdir() if "socket" in str(entry.readlink())
        }
        listening = [
            line.split()[9]
            for line in Path(f"/proc/{owner}/net/tcp").read_text().splitlines()[1:]
            if line.split()[3] == "0A"
        ]
        assert not inodes & {f"socket:[{inode}]" for inode in listening}
    finally:
        person.leaves()


# --- the small parts --------------------------------------------------------------------------------------------


def test_a_token_is_made_once_and_refused_when_others_may_read_it(tmp_path: Path) -> None:
    """The same at the next start; a lax mode or a broken file is an error, not a new token."""
    token, fresh = token_of(tmp_path)
    assert fresh
    assert token_of(tmp_path) == (token, False)
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(StateDirRefused, match="may be read by others"):
        token_of(tmp_path)
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "token").write_text("short")
    with pytest.raises(StateDirRefused, match="holds no token"):
        token_of(tmp_path)
    (tmp_path / "token").unlink()
    (tmp_path / "token").symlink_to("/etc/hostname")
    with pytest.raises(StateDirRefused):
        token_of(tmp_path)


def test_sessions_end_by_time_by_log_out_and_with_their_token(tmp_path: Path) -> None:
    """And there are never more than so many of them."""
    now = datetime(2026, 11, 16, tzinfo=UTC)
    tokens = Tokens(tmp_path)
    sessions = Sessions(tmp_path, tokens)
    tokens.create("ci", Role.OPERATE, {}, now)
    token = tokens.list()[0]
    secret, session = sessions.begin(token, now)
    assert session.expires_at == now + SESSION_LIFE
    assert sessions.find(secret, now) == token
    assert sessions.find(secret, now + SESSION_LIFE) is None
    assert sessions.find(secret + "x", now) is None
    other, _ = sessions.begin(token, now)
    sessions.end(secret)
    assert sessions.find(secret, now) is None
    assert Sessions(tmp_path, Tokens(tmp_path)).find(other, now) == token
    tokens.revoke("ci")
    assert sessions.find(other, now) is None
    tokens.create("ci", Role.OPERATE, {}, now)
    assert sessions.find(other, now) is None
    for _ in range(MOST_SESSIONS + 5):
        sessions.begin(tokens.list()[0], now)
    assert (tmp_path / "sessions.json").read_text().count('"digest"') == MOST_SESSIONS


def test_tokens_have_a_name_a_role_labels_and_an_end(tmp_path: Path) -> None:
    """Kept as digests; a name is used once; expired and revoked ones open nothing."""
    now = datetime(2026, 11, 16, tzinfo=UTC)
    tokens = Tokens(tmp_path)
    secret = tokens.create("ci", Role.OPERATE, {"team": "a"}, now, now + timedelta(days=1))
    assert secret not in (tmp_path / "tokens.json").read_text()
    assert stat.S_IMODE((tmp_path / "tokens.json").stat().st_mode) == 0o600
    found = tokens.find(secret, now)
    assert found is not None
    assert (found.grant.name, found.grant.role, found.grant.labels) == ("ci", Role.OPERATE, {"team": "a"})
    assert tokens.find(secret, now + timedelta(days=1)) is None
    for name in ("ci", "deck", "no/name"):
        with pytest.raises(SpecError):
            tokens.create(name, Role.READ, {}, now)
    with pytest.raises(SpecError, match="a time to come"):
        tokens.create("late", Role.READ, {}, now, now)
    elsewhere = Tokens(tmp_path)
    elsewhere.revoke("ci")
    assert tokens.find(secret, now) is None
    with pytest.raises(SpecError, match="a token of this deck"):
        tokens.revoke("ci")


def test_guesses_are_counted_per_address_and_forgotten() -> None:
    """One address's guesses are not another's, and a minute later all is well."""
    limit = GuessLimit()
    for _ in range(GUESSES):
        assert limit.failed("a", 0.0) == 0.0
    assert limit.failed("a", 1.0) > 0
    assert limit.failed("b", 1.0) == 0.0
    assert limit.failed("a", 2 * GUESS_WINDOW_SECONDS) == 0.0


def test_a_silent_peer_is_let_go(served: Served) -> None:
    """Half a request holds nothing back: others are answered meanwhile."""
    port = int(served.base.rstrip("/").rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
    try:
        for connection in silent:
            connection.sendall(b"GET /api/v1/workers HTTP/1.1\r\nHo")
        until(lambda: httpx.get(f"{served.base}healthz", timeout=PATIENCE_SECONDS).status_code == 200)
    finally:
        for connection in silent:
            connection.close()
