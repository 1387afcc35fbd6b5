"""An IMAP server as Gmail is: X-GM-MSGID for every mail, and IDLE that tells at once.

No server that Debian has gives out X-GM-MSGID, and Dovecot tells of a new mail half a second late by a constant of its
own (NOTIFY_DELAY_MSECS in index-mailbox-check.c). So this is ``hoodiecrow-imap`` from npm, put beside the virtual
environment at first use.
"""

import fcntl
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Self

import pytest

from support.waiting import eventually

PACKAGE = "hoodiecrow-imap@2.1.0"
PLACE = Path(sys.prefix) / "share" / "everdeck-tests"
DRIVER = Path(__file__).with_suffix(".js")


def modules() -> Path:
    """Where the package is; skips the test if it cannot be had."""
    if shutil.which("node") is None:
        pytest.skip("needs node for an IMAP server with X-GM-MSGID (make setup installs it)")
    PLACE.mkdir(parents=True, exist_ok=True)
    found = PLACE / "node_modules"
    with (PLACE / ".lock").open("w") as lock:  # tests run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (found / "hoodiecrow-imap" / "package.json").exists():
            _install()
    return found


def _install() -> None:
    if shutil.which("npm") is None:
        pytest.skip(f"needs npm to install {PACKAGE}, an IMAP server with X-GM-MSGID")
    words = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--omit=optional", "--prefix", PLACE, PACKAGE]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr[-200:]}")


class GmailLike:
    """One account, ``testuser``; the server knows no other."""

    user, password = "testuser", "testpass"

    def __init__(self, *, idle: bool = True) -> None:
        self._modules = modules()
        self._idle = idle
        self._validity = 1
        self._mails: list[dict[str, str]] = []
        self._process: subprocess.Popen[str] | None = None
        self._idles = self._idles_before = 0
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Run it with the mails that it has."""
        messages = [{"raw": mail["raw"], "X-GM-MSGID": mail["id"]} for mail in self._mails]
        storage = {"INBOX": {"uidvalidity": self._validity, "messages": messages}}
        self._process = subprocess.Popen(
            [
                "node",
                "--no-deprecation",
                DRIVER,
                self._modules,
                str(self.port),
                json.dumps(storage),
                *(["IDLE"] if self._idle else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self._hearing = threading.Thread(target=self._hear, args=(self._process.stdout,))
        self._hearing.start()

    def _hear(self, lines: IO[str]) -> None:
        for _ in lines:
            self._idles += 1

    def stop(self) -> None:
        """End it with every connection."""
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.kill()
            self._process.wait()
            self._hearing.join()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None

    def deliver(self, mail: bytes, gm_id: int) -> None:
        """Put a mail into the folder."""
        told = {"raw": mail.decode().replace("\r\n", "\n").replace("\n", "\r\n"), "id": str(gm_id)}
        self._mails.append(told)
        self._idles_before = self._idles
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()

    async def idling(self) -> None:
        """Wait until somebody waits for news again since the last delivery."""
        await eventually(lambda: self._idles > self._idles_before, "it waits for news")

    def new_uidvalidity(self) -> None:
        """Forget every UID: the server is away for a moment and comes back, on the same port, with others."""
        self.stop()
        self._validity += 1
        self.start()
