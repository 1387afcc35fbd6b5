"""Prosody on loopback, for one test: own directories, own port, an ordinary account."""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import pytest

from support.sat_mail import ACCOUNT, free_port

PROSODY = shutil.which("prosody") or "/usr/bin/prosody"
needs_prosody = pytest.mark.skipif(
    not (Path(PROSODY).exists() and os.geteuid() == 0), reason="needs root and Prosody (make setup installs it)"
)


class Prosody:
    """An XMPP server with the users ``bob``, ``alice`` and ``carol``, and a message archive."""

    password = "for-a-test"

    def __init__(self) -> None:
        self.port = free_port()
        self.home = Path(tempfile.mkdtemp(prefix="everdeck-xmpp-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        account = pwd.getpwnam(ACCOUNT)
        self.home.chmod(0o755)
        accounts = self.home / "data" / "localhost" / "accounts"
        accounts.mkdir(parents=True)
        for user in ("bob", "alice", "carol"):
            (accounts / f"{user}.dat").write_text(f'return {{ ["password"] = "{self.password}"; }};\n')
        (self.home / "prosody.cfg.lua").write_text(
            f"""
daemonize = false
pidfile = "{self.home}/prosody.pid"
data_path = "{self.home}/data"
interfaces = {{ "127.0.0.1" }}
c2s_ports = {{ {self.port} }}
s2s_ports = {{}}
http_ports = {{}}
https_ports = {{}}
modules_enabled = {{ "roster", "saslauth", "disco", "ping", "mam" }}
modules_disabled = {{ "s2s", "tls", "offline" }}
authentication = "internal_plain"
c2s_require_encryption = false
allow_unencrypted_plain_auth = true
default_archive_policy = true
archive_expires_after = "never"
log = {{ info = "*console" }}
VirtualHost "localhost"
"""
        )
        for path in (self.home, *self.home.rglob("*")):
            os.chown(path, account.pw_uid, account.pw_gid)
        with (self.home / "prosody.log").open("ab") as log:
            self._process = subprocess.Popen(
                [PROSODY, "--config", str(self.home / "prosody.cfg.lua"), "-F"],
                stdout=log,
                stderr=log,
                user=account.pw_uid,
                group=account.pw_gid,
                extra_groups=[],
                start_new_session=True,
            )
        deadline = time.monotonic() + 30
        while True:
            assert self._process.poll() is None, (self.home / "prosody.log").read_text()[-2000:]
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5):
                return self
            assert time.monotonic() < deadline, "nobody answers"
            time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.home, ignore_errors=True)
