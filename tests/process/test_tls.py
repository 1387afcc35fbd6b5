"""TLS as people have it: a proxy in front, certificates that are renewed, clients with certificates, an access log."""

import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.cli_daemon import PATIENCE_SECONDS, Person, free_port
from support.waiting import until

PROXY = """
daemon off; pid {place}/nginx.pid; error_log {place}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
  uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
  server {{
    listen 127.0.0.1:{port} ssl;
    ssl_certificate {place}/cert.pem; ssl_certificate_key {place}/key.pem;
    location / {{
      proxy_pass http://127.0.0.1:{behind};
      proxy_set_header Host $http_host; proxy_set_header X-Forwarded-For $remote_addr;
    }}
  }}
}}
"""


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    """Somebody whose daemon is gone after the test."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make certificates")
    person = Person(tmp_path / "state")
    try:
        yield person
    finally:
        person.leaves()


def certificate(place: Path, name: str = "", common: str = "localhost") -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    cert, key = place / f"{name}cert.pem", place / f"{name}key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -addext subjectAltName=DNS:localhost"
    command = ["openssl", *words.split(), "-subj", f"/CN={common}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_a_login_through_a_tls_proxy_is_one_at_public_url(tmp_path: Path, person: Person) -> None:
    """The proxy's name and origin are ours, HSTS is said, and every request is a line of the access log."""
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if nginx is None:
        pytest.skip("needs nginx as the proxy (apt-get install nginx-light)")
    cert, _ = certificate(tmp_path)
    port, behind = free_port(), free_port()
    public = f"https://localhost:{port}"
    config = tmp_path / "everdeck.toml"
    config.write_text(f'[server]\npublic_url = "{public}/"\naccess_log = "access.log"\n')
    shown = person.types("up", str(config), "--detach", "--listen", f"127.0.0.1:{behind}").stdout
    assert f"{public}/" in shown
    (tmp_path / "nginx.conf").write_text(PROXY.format(place=tmp_path, port=port, behind=behind))
    proxy = subprocess.Popen([nginx, "-e", tmp_path / "error.log", "-c", tmp_path / "nginx.conf"])
    try:
        trusted = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=public, verify=trusted, timeout=PATIENCE_SECONDS) as browser:
            until(lambda: _answers(browser))
            token = (person.state / "token").read_text().strip()
            login = browser.post("/api/v1/login", json={"token": token}, headers={"Origin": public})
            assert login.status_code == 200, login.text
            assert "max-age=" in login.headers["strict-transport-security"]
            headers = {"Authorization": f"Bearer {login.json()['session']}", "Origin": public}
            assert browser.get("/api/v1/workers?q=hidden", headers=headers).status_code == 200
            strange = browser.get("/api/v1/workers", headers=headers | {"Origin": "https://evil.example"})
            assert strange.status_code == 403
    finally:
        proxy.terminate()
        proxy.wait(PATIENCE_SECONDS)
    # A line is written when its answer has ended, which its reader may know first.
    lines = until(lambda: _lines(tmp_path / "access.log", 3))
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("POST", "/api/v1/login", 200),
        ("GET", "/api/v1/workers", 200),
        ("GET", "/api/v1/workers", 403),
    ]
    known = next(line for line in lines if line["path"] == "/api/v1/workers")
    assert known["token"] == "deck"
    assert "127.0.0.1" in known["address"]
    assert known["milliseconds"] >= 0
    assert "hidden" not in (tmp_path / "access.log").read_text()
    assert token not in (tmp_path / "access.log").read_text()


def test_a_renewed_certificate_is_read_at_reload(tmp_path: Path, person: Person) -> None:
    """The same process and address, the new certificate."""
    cert, key = certificate(tmp_path)
    port = free_port()
    words = ("--listen", f"127.0.0.1:{port}", "--tls-cert", str(cert), "--tls-key", str(key))
    person.types("up", "--detach", *words)
    owner, before = person.owner(), ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
    assert before.strip() == cert.read_text().strip()
    certificate(tmp_path)
    assert ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE_SECONDS) == before
    person.types("reload")
    now = until(lambda: _other(before, ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE_SECONDS)))
    assert now.strip() == cert.read_text().strip()
    assert person.owner() == owner


def test_a_reload_over_tls_answers_whoever_asked_and_says_goodbye_to_the_others(tmp_path: Path, person: Person) -> None:
    """Fresh connections all the time, through two reloads: none is lost. An idle one ends as TLS says it should."""
    cert, key = certificate(tmp_path)
    port = free_port()
    person.types("up", "--detach", "--listen", f"127.0.0.1:{port}", "--tls-cert", str(cert), "--tls-key", str(key))
    trusted = ssl.create_default_context(cafile=str(cert))
    over, failures, answers = threading.Event(), [], []

    def connected() -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
        return trusted.wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False)

    def ask(connection: ssl.SSLSocket) -> None:
        connection.sendall(f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(4096) or pytest.fail(f"cut after {answer!r}")
        answers.append(answer.startswith(b"HTTP/1.1 200"))

    def ask_again_and_again() -> None:
        while not over.is_set():
            try:
                with connected() as connection:
                    ask(connection)
            except OSError as error:
                failures.append(repr(error))

    threads = [threading.Thread(target=ask_again_and_again) for _ in range(3)]
    with connected() as idle:
        ask(idle)
        for thread in threads:
            thread.start()
        try:
            person.types("reload")
            assert idle.recv(1) == b"", "a goodbye, not a reset"
            person.types("reload")
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert failures == []
    assert len(answers) > 3
    assert all(answers)


def test_a_client_without_a_certificate_gets_no_further_than_the_handshake(tmp_path: Path, person: Person) -> None:
    """With ``tls_client_ca`` a token alone opens nothing; a certificate alone does not either."""
    cert, key = certificate(tmp_path)
    mine, my_key = certificate(tmp_path, "client-", "ci")
    other, other_key = certificate(tmp_path, "other-", "ci")
    port = free_port()
    config = tmp_path / "everdeck.toml"
    config.write_text(
        f'[server]\nlisten = "127.0.0.1:{port}"\nhosts = ["localhost"]\n'
        f'tls_cert = "{cert}"\ntls_key = "{key}"\ntls_client_ca = "{mine}"\n'
    )
    person.types("up", str(config), "--detach")
    headers = {"Authorization": f"Bearer {(person.state / 'token').read_text().strip()}"}
    url = f"https://localhost:{port}/api/v1/workers"

    def context(*pair: Path) -> ssl.SSLContext:
        trusted = ssl.create_default_context(cafile=str(cert))
        if pair:
            trusted.load_cert_chain(*pair)
        return trusted

    for refused in (context(), context(other, other_key)):
        with pytest.raises(httpx.TransportError):
            httpx.get(url, headers=headers, verify=refused, timeout=PATIENCE_SECONDS)
    welcome = context(mine, my_key)
    assert httpx.get(url, headers=headers, verify=welcome, timeout=PATIENCE_SECONDS).status_code == 200
    assert httpx.get(url, verify=welcome, timeout=PATIENCE_SECONDS).status_code == 401


def _lines(log: Path, count: int) -> list[dict[str, Any]] | None:
    lines = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    asked = [line for line in lines if line["path"] != "/healthz"]
    return asked if len(asked) >= count else None


def _answers(browser: httpx.Client) -> bool:
    try:
        return browser.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def _other(before: str, now: str) -> str | None:
    return None if now == before else now
