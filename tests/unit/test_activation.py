"""Sockets that systemd lends: taken by whom they are meant for, once, and kept from workers."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid()) if sys.argv[1] == "me" else "1"
from everdeck.server import activation
lent = activation.taken()
inherited = [os.get_inheritable(fd) for fd in lent.values()]
print(sorted(lent.items()), inherited, "LISTEN_FDS" in os.environ, activation.taken())
"""


@pytest.mark.parametrize("whom", ["me", "another"])
def test_lent_sockets_are_taken_once(tmp_path: Path, whom: str) -> None:
    """A Unix and a TCP listener; a socket that nobody listens on is not served."""
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp, socket.socket() as idle:
        unix.bind(str(tmp_path / "http.sock"))
        unix.listen()
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        fds = [idle.fileno(), unix.fileno(), tcp.fileno()]

        def arrange() -> None:
            for place, fd in enumerate([os.dup(fd) for fd in fds], 3):
                os.dup2(fd, place)

        said = subprocess.run(
            [sys.executable, "-c", _PROGRAM, whom],
            env={**os.environ, "LISTEN_FDS": "3"},
            preexec_fn=arrange,
            close_fds=False,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    expected = "[('tcp', 5), ('unix', 4)] [False, False] False {}" if whom == "me" else "[] [] False {}"
    assert said.strip() == expected
