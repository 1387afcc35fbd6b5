"""A daemon that serves TCP, as scripts and attackers on the network see it: an address and a token."""

import contextlib
import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from resource import RLIMIT_NOFILE, setrlimit
from typing import Any

import httpx

from support.cli_daemon import PATIENCE_SECONDS, Person, free_port


@dataclass
class Served:
    """One daemon on loopback."""

    person: Person
    port: int
    scheme: str = "http"

    @property
    def base(self) -> str:
        """Where it is served."""
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def token(self) -> str:
        """The deck's own token, of role admin."""
        return (self.person.state / "token").read_text().strip()

    def client(self, token: str | None = None, **options: Any) -> httpx.Client:
        """A client with a token in its header: the deck's own unless another is given; "" is a stranger."""
        given = self.token if token is None else token
        headers = {"Authorization": f"Bearer {given}"} if given else {}
        return httpx.Client(base_url=self.base, headers=headers, timeout=PATIENCE_SECONDS, **options)

    def socket(self) -> socket.socket:
        """A bare connection."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS)
        if self.scheme == "https":
            return ssl._create_unverified_context().wrap_socket(connection)  # noqa: S323 - our own, on loopback
        return connection

    def ask(self, path: str, accept: str = "application/json") -> bytes:
        """The head of a GET with the deck's token."""
        lines = (
            f"GET {path} HTTP/1.1",
            f"Host: 127.0.0.1:{self.port}",
            f"Authorization: Bearer {self.token}",
            f"Accept: {accept}",
        )
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@contextlib.contextmanager
def served_at(
    state: Path, *words: str, config: Path | None = None, limit_descriptors: int | None = None, **env: str
) -> Iterator[Served]:
    """A daemon that is up, and gone afterwards with all its workers."""
    person = Person(state, **env)
    port = free_port()
    file = () if config is None else (str(config),)
    try:
        limits = (limit_descriptors, limit_descriptors)
        options = {} if limit_descriptors is None else {"preexec_fn": lambda: setrlimit(RLIMIT_NOFILE, limits)}
        person.types("up", *file, "--detach", "--listen", f"127.0.0.1:{port}", *words, **options)
        scheme = "https" if "--tls-cert" in words else "http"
        yield Served(person, port, scheme)
    finally:
        person.leaves()


def events_of(stream: socket.socket) -> Iterator[dict[str, Any]]:
    """Each event of a raw SSE answer as it arrives, whatever the chunks."""
    pending = b""
    while block := stream.recv(65536):
        pending += block
        *lines, pending = pending.split(b"\n")
        for line in lines:
            if line.startswith(b"data: {") and b'"kind"' in line:
                yield json.loads(line[6:])
