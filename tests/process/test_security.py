"""Who gets in, and what never gets out."""

import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from everdeck.errors import StateDirRefused
from everdeck.server.auth import GUESS_WINDOW_SECONDS, GUESSES, SESSION_SECONDS, GuessLimit, Keys, token_of
from support.cli_daemon import PATIENCE_SECONDS, Person, free_port
from support.waiting import until

SLEEPER = ("--", "sleep", "1000")


class Served:
    """A daemon on TCP, with the link that was shown once."""

    def __init__(self, person: Person, base: str, link: str, token: str) -> None:
        self.person, self.base, self.link, self.token = person, base, link, token


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One daemon for the file."""
    person = Person(tmp_path_factory.mktemp("security") / "state")
    try:
        shown = person.types("up", "--detach", "--listen", f"127.0.0.1:{free_port()}").stdout
        link = re.search(r"http://\S+/login\?token=\S+", shown)
        assert link is not None, shown
        base = link.group(0).partition("login?")[0]
        person.types("start", "alice", *SLEEPER)
        yield Served(person, base, link.group(0), link.group(0).partition("token=")[2])
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
    for name in ("deck.sock", "token", "daemon.log", "deck.db", "deck.lock"):
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
        "s.connect(f'/proc/self/fd/{folder}/deck.sock')\n"
        "try:\n"
        "    s.sendall(b'GET /api/v1/workers HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); got = s.recv(100)\n"
        "except OSError: got = b''\n"
        "print(repr(got))\n"
    )
    try:
        (state / "deck.sock").chmod(0o666)
        state.chmod(0o755)
        done = subprocess.run([sys.executable, "-c", script, state], capture_output=True, text=True, check=True)
    finally:
        state.chmod(0o700)
        (state / "deck.sock").chmod(0o600)
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


def test_the_link_logs_in_and_cookies_are_strict(served: Served, browser: httpx.Client) -> None:
    """HttpOnly and SameSite=Strict; no cookie holds the token; a change needs the CSRF value."""
    answer = browser.get(served.link)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookies = answer.headers.get_list("set-cookie")
    session = next(cookie for cookie in cookies if cookie.startswith("everdeck_session="))
    csrf = next(cookie for cookie in cookies if cookie.startswith("everdeck_csrf="))
    assert "HttpOnly" in session
    assert "SameSite=Strict" in session
    assert "SameSite=Strict" in csrf
    assert "HttpOnly" not in csrf
    assert served.token not in "".join(cookies)
    assert browser.get("/api/v1/workers").status_code == 200
    assert browser.post("/api/v1/workers/alice/reset").status_code == 403
    assert browser.post("/api/v1/workers/alice/reset", headers={"X-Everdeck-CSRF": "guess"}).status_code == 403
    value = browser.cookies["everdeck_csrf"]
    assert browser.post("/api/v1/workers/alice/reset", headers={"X-Everdeck-CSRF": value}).status_code == 200
    browser.cookies.set("everdeck_session", browser.cookies["everdeck_session"][:-2] + "xx")
    browser.cookies.clear()
    assert browser.get("/api/v1/workers", headers={"Cookie": "everdeck_session=1.x.y"}).status_code == 401


def test_a_form_logs_in_and_out(served: Served, browser: httpx.Client) -> None:
    """The page's own login; logging out forgets the cookies."""
    assert browser.post("/api/v1/login", json={"token": "wrong"}).status_code == 401
    assert browser.post("/api/v1/login", json={"token": served.token}).status_code == 204
    assert browser.get("/api/v1/workers").status_code == 200
    value = browser.cookies["everdeck_csrf"]
    assert browser.post("/api/v1/logout", headers={"X-Everdeck-CSRF": value}).status_code == 204
    assert browser.get("/api/v1/workers").status_code == 401


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


def test_guessing_at_the_login_is_slowed_down(served: Served, browser: httpx.Client) -> None:
    """After a few wrong tokens even the right one must wait; sessions and bearer tokens are not locked out."""
    with httpx.Client(base_url=served.base, timeout=PATIENCE_SECONDS) as friend:
        friend.get(served.link)
        statuses = [browser.post("/api/v1/login", json={"token": f"guess{n}"}).status_code for n in range(GUESSES + 2)]
        assert statuses[-1] == 429
        refused = browser.get(served.link)
        assert refused.status_code == 429
        assert 0 < int(refused.headers["retry-after"]) <= GUESS_WINDOW_SECONDS + 1
        assert friend.get("/api/v1/workers").status_code == 200
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
    """--insecure listens anywhere; with a certificate the page is https and cookies are Secure."""
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
        link = re.search(r"https://\S+/login\?token=\S+", shown)
        assert link is not None, shown
        answer = httpx.get(link.group(0), verify=_trusting(cert))
        assert answer.status_code == 303
        assert all("Secure" in cookie for cookie in answer.headers.get_list("set-cookie"))
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


def test_sessions_are_sealed_and_end() -> None:
    """Not another token's, not changed, not in the future and not too old."""
    keys, others = Keys("a" * 40), Keys("b" * 40)
    session = keys.session(1000.0)
    assert keys.is_session(session, 1000.0 + SESSION_SECONDS)
    assert not keys.is_session(session, 1001.0 + SESSION_SECONDS)
    assert not keys.is_session(session, 900.0)
    assert not others.is_session(session, 1000.0)
    assert not keys.is_session(session.replace("1000", "2000", 1), 2000.0)
    assert not keys.is_session("", 0.0)
    assert keys.is_csrf(keys.csrf(session), session)
    assert not keys.is_csrf(keys.csrf(session), keys.session(1000.0))


def test_guesses_are_counted_per_address_and_forgotten() -> None:
    """One address's guesses do not lock out another, and a minute later all is well."""
    limit = GuessLimit()
    for _ in range(GUESSES):
        assert limit.seconds_to_wait("a", 0.0) == 0.0
        limit.failed("a", 0.0)
    assert limit.seconds_to_wait("a", 1.0) > 0
    assert limit.seconds_to_wait("b", 1.0) == 0.0
    assert limit.seconds_to_wait("a", GUESS_WINDOW_SECONDS) == 0.0


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
