"""Dovecot and OpenSMTPD on loopback, for one test: own directories, own ports, an ordinary account, no lasting trace.

Dovecot serves IMAP for the users of a passwd-file, each with a Maildir below the test's directory; mails are delivered
by writing into the Maildir, as an LDA does. With ``tls`` it has a certificate; with ``tokens`` it takes XOAUTH2 and
asks there whether a token is good; with ``relay`` it takes mails by SMTP too (submission), with the same accounts, and
hands them to that port. OpenSMTPD takes mails by SMTP and hands each to a program that keeps it in a file. It insists
on being root, so it is root in a user namespace of the ordinary account, and nobody outside (where such a namespace is
forbidden it is root); its own TLS does not work with Debian's OpenSSL 3 (the key is in another process of it). Both run
in the foreground as children of the test.
"""

import contextlib
import functools
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from email.message import EmailMessage
from email.utils import formatdate
from pathlib import Path
from typing import Any, Self

import pytest

ACCOUNT = "nobody"
INNER = 300_000  # where the accounts of a user namespace lie outside
SUBMISSION = Path("/usr/lib/dovecot/submission")
DOVECOT = shutil.which("dovecot") or "/usr/sbin/dovecot"
SMTPD = shutil.which("smtpd") or "/usr/sbin/smtpd"
needs_dovecot = pytest.mark.skipif(
    not (Path(DOVECOT).exists() and os.geteuid() == 0), reason="needs root and Dovecot (make setup installs it)"
)
needs_smtpd = pytest.mark.skipif(
    not (Path(SMTPD).exists() and os.geteuid() == 0), reason="needs root and OpenSMTPD (make setup installs it)"
)


@functools.cache
def has_user_namespaces() -> bool:
    """Whether an ordinary account may have one; without, OpenSMTPD is root after all."""
    account = pwd.getpwnam(ACCOUNT)
    probe = ["unshare", "--user", "--mount", "true"]
    done = subprocess.run(probe, check=False, user=account.pw_uid, group=account.pw_gid, extra_groups=[])
    return done.returncode == 0


def certificate(place: Path) -> tuple[Path, Path]:
    """A certificate of localhost that signs itself, and its key."""
    cert, key = place / "cert.pem", place / "key.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    words = f"req -x509 -newkey rsa:2048 -nodes -days 2 -addext {names} -subj /CN=localhost"
    subprocess.run(["openssl", *words.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until somebody greets there."""
    deadline = time.monotonic() + 30
    while True:
        assert process.poll() is None, f"the server ended: {log.read_text()[-2000:]}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as probe:
            if probe.recv(64):
                return
        assert time.monotonic() < deadline, f"nobody answers on {port}: {log.read_text()[-2000:]}"
        time.sleep(0.02)


class Dovecot:
    """An IMAP server with one user, ``bob``."""

    user = "bob@example.org"

    def __init__(self, *, tls: bool = False, tokens: str | None = None, relay: int | None = None) -> None:
        self.password = secrets.token_hex(8)
        self.port = free_port()
        self.tls_port = free_port()
        self.submission_port = free_port()
        self.submissions_port = free_port()
        self.home = Path(tempfile.mkdtemp(prefix="everdeck-imap-"))
        self._tls = tls
        self._tokens = tokens
        self._relay = relay
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def maildir(self) -> Path:
        """Where the user's mails are."""
        return self.home / "mail" / self.user

    def __enter__(self) -> Self:
        account = pwd.getpwnam(ACCOUNT)
        self.home.chmod(0o755)
        (self.home / "mail").mkdir()
        (self.home / "run").mkdir()
        (self.home / "passwd").write_text(f"{self.user}:{{PLAIN}}{self.password}::::::\n")
        (self.home / "dovecot.conf").write_text(self._config())
        (self.home / "dovecot.log").touch()
        if self._tls:
            certificate(self.home)
        if self._tokens is not None:
            (self.home / "oauth2.conf").write_text(
                f"introspection_mode = post\nintrospection_url = {self._tokens}\n"
                "username_attribute = email\nactive_attribute = active\nactive_value = true\n"
            )
        for path in (self.home, *self.home.rglob("*")):
            os.chown(path, account.pw_uid, account.pw_gid)
        self.start()
        return self

    def start(self) -> None:
        """Run it."""
        account = pwd.getpwnam(ACCOUNT)
        with (self.home / "dovecot.log").open("ab") as log:
            self._process = subprocess.Popen(
                [DOVECOT, "-F", "-c", str(self.home / "dovecot.conf")],
                stdout=log,
                stderr=log,
                user=account.pw_uid,
                group=account.pw_gid,
                extra_groups=[],
                start_new_session=True,
            )
        answers(self.port, self._process, self.home / "dovecot.log")

    def stop(self) -> None:
        """End it with every connection; the mails stay."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGTERM)  # the master alone leaves sessions behind that go on
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def set_password(self, password: str) -> None:
        """From now on only this one is accepted."""
        (self.home / "passwd").write_text(f"{self.user}:{{PLAIN}}{password}::::::\n")

    def deliver(self, mail: bytes, folder: str = "") -> None:
        """Put a mail into the mailbox, whole or not at all."""
        place = self.make_folder(folder)
        name = f"{time.time_ns()}.{secrets.token_hex(4)}.test"
        file = place / "tmp" / name
        file.write_bytes(mail)
        account = pwd.getpwnam(ACCOUNT)
        os.chown(file, account.pw_uid, account.pw_gid)
        file.rename(place / "new" / name)

    def make_folder(self, folder: str = "") -> Path:
        """The place of a folder; the inbox without a name."""
        account = pwd.getpwnam(ACCOUNT)
        home = self._place(folder)
        for place in (self.maildir, home, *(home / part for part in ("tmp", "new", "cur"))):
            if not place.exists():
                place.mkdir(parents=True)
                os.chown(place, account.pw_uid, account.pw_gid)
        return home

    def _place(self, folder: str) -> Path:
        return self.maildir / f".{folder}" if folder else self.maildir

    @property
    def cert(self) -> Path:
        """The certificate, for SSL_CERT_FILE."""
        return self.home / "cert.pem"

    def mails(self, folder: str = "") -> list[Path]:
        """The files of a folder, flags in their names."""
        place = self._place(folder)
        return sorted(file for part in ("new", "cur") for file in (place / part).glob("*"))

    def new_uidvalidity(self) -> None:
        """Forget every UID: what a restored backup or a moved mailbox looks like."""
        self.stop()
        for name in ("dovecot-uidlist", "dovecot.index", "dovecot.index.log", "dovecot.index.cache"):
            (self.maildir / name).unlink(missing_ok=True)
        (self.maildir / "dovecot-uidvalidity").unlink(missing_ok=True)
        for file in self.maildir.glob("dovecot-uidvalidity.*"):
            file.unlink()
        self.start()

    def _config(self) -> str:
        account = pwd.getpwnam(ACCOUNT)
        group = "nogroup"
        oauth = f"""
passdb {{
  driver = oauth2
  mechanisms = xoauth2
  args = {self.home}/oauth2.conf
}}
"""
        submission = f"""
protocols = imap submission
hostname = localhost
submission_relay_host = 127.0.0.1
submission_relay_port = {self._relay}
service submission-login {{
  chroot =
  inet_listener submission {{
    port = {self.submission_port}
  }}
  inet_listener submissions {{
    port = {self.submissions_port if self._tls else 0}
    ssl = yes
  }}
}}
"""
        tls = f"ssl = yes\nssl_cert = <{self.home}/cert.pem\nssl_key = <{self.home}/key.pem"
        return f"""
protocols = imap
listen = 127.0.0.1
base_dir = {self.home}/run
state_dir = {self.home}/run
log_path = {self.home}/dovecot.log
default_internal_user = {ACCOUNT}
default_internal_group = {group}
default_login_user = {ACCOUNT}
first_valid_uid = 1
disable_plaintext_auth = no
{tls if self._tls else "ssl = no"}
mail_location = maildir:{self.home}/mail/%u
auth_mechanisms = plain login{" xoauth2" if self._tokens else ""}
auth_failure_delay = 0
mail_max_userip_connections = 50
service anvil {{
  chroot =
}}
service imap-login {{
  chroot =
  inet_listener imap {{
    port = {self.port}
  }}
  inet_listener imaps {{
    port = {self.tls_port if self._tls else 0}
    ssl = yes
  }}
}}
service stats {{
  chroot =
}}
{submission if self._relay else ""}
{oauth if self._tokens else ""}
passdb {{
  driver = passwd-file
  args = {self.home}/passwd
}}
userdb {{
  driver = static
  args = uid={account.pw_uid} gid={account.pw_gid} home={self.home}/mail/%u
}}
"""


class Smtpd:
    """An SMTP server that keeps what it takes in one file per mail."""

    def __init__(self) -> None:
        self.port = free_port()
        self.home = Path(tempfile.mkdtemp(prefix="everdeck-smtp-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.home.chmod(0o755)
        (self.home / "in").mkdir()
        keep = self.home / "keep"
        place = self.home / "in"
        keep.write_text(f"#!/bin/sh\nname=$(date +%s%N)-$$\ncat > {place}/.$name && mv {place}/.$name {place}/$name\n")
        keep.chmod(0o755)
        (self.home / "virtual").write_text(f"@example.org {ACCOUNT}\n")
        (self.home / "smtpd.conf").write_text(
            f'table accounts "file:{self.home}/virtual"\n'
            f"listen on 127.0.0.1 port {self.port} hostname mail.example.org\n"
            f'action "keep" mda "{keep}" virtual <accounts>\n'
            f'match from any for domain "example.org" action "keep"\n'
        )
        for name in ("spool", "spool/smtpd", "run"):
            (self.home / name).mkdir()
            (self.home / name).chmod(0o711)
        account = pwd.getpwnam(ACCOUNT)
        for path in (*self.home.iterdir(), self.home / "spool/smtpd"):
            os.chown(path, account.pw_uid, account.pw_gid)
        if not has_user_namespaces():
            for name in ("spool", "spool/smtpd", "run", "smtpd.conf"):
                os.chown(self.home / name, 0, 0)
        else:
            os.chown(place, INNER + account.pw_uid, INNER + account.pw_gid)
        self.start()
        return self

    def start(self) -> None:
        """Run it, in a mount namespace of its own: the places of its spool and its socket are fixed."""
        mounts = f"mount --bind {self.home}/spool /var/spool && mount --bind {self.home}/run /run"
        run = f"{mounts} && exec {SMTPD} -d -f {self.home}/smtpd.conf"
        account = pwd.getpwnam(ACCOUNT)
        ordinary = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        is_mapped = has_user_namespaces()
        with (self.home / "smtpd.log").open("ab") as log:
            # Whoever is root in a user namespace has the rights of it from the next exec on.
            begin = ("--propagation", "private", "sh", "-c", 'read _ && exec sh -c "$0" </dev/null', run)
            self._process = subprocess.Popen(
                ["unshare", *(["--user"] if is_mapped else []), "--mount", *begin],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **(ordinary if is_mapped else {}),
            )
        if is_mapped:
            self._map(self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.close()
        answers(self.port, self._process, self.home / "smtpd.log")

    def _map(self, process: "subprocess.Popen[bytes]") -> None:
        """Who is who in the namespace: its root is our account, and the server's own accounts are nobody's here."""
        place = Path(f"/proc/{process.pid}")
        ours = (place.parent / "self/ns/user").readlink()
        deadline = time.monotonic() + 30
        while process.poll() is None and (place / "ns/user").readlink() == ours:
            assert time.monotonic() < deadline, "no user namespace"
            time.sleep(0.005)
        accounts = [pwd.getpwnam(name) for name in ("opensmtpd", "opensmtpq", ACCOUNT)]
        root = accounts[-1]
        uids = {0: root.pw_uid} | {one.pw_uid: INNER + one.pw_uid for one in accounts}
        gids = {0: root.pw_gid} | {one.pw_gid: INNER + one.pw_gid for one in accounts}
        for name, numbers in (("uid_map", uids), ("gid_map", gids)):
            (place / name).write_text("".join(f"{inside} {outside} 1\n" for inside, outside in numbers.items()))

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def taken(self) -> list[bytes]:
        """Every mail that was delivered, in order."""
        return [file.read_bytes() for file in sorted((self.home / "in").glob("[0-9]*"))]


def a_mail(text: str, *, subject: str = "hello", sender: str = "alice@example.org", **headers: str) -> bytes:
    """A plain mail; each has its own Message-ID unless one is given (``message_id=...``)."""
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = sender, Dovecot.user, subject
    mail["Date"] = formatdate()
    mail["Message-ID"] = headers.pop("message_id", f"<{secrets.token_hex(8)}@example.org>")
    for name, value in headers.items():
        mail[name.replace("_", "-")] = value
    mail.set_content(text)
    return mail.as_bytes()


@contextlib.contextmanager
def flaky(port: int) -> Iterator["Flaky"]:
    """A way to a server that can be cut in the middle."""
    proxy = Flaky(port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()


class Flaky:
    """Forwards to a port of loopback; after ``cut_after`` bytes from the server both ends are reset."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.cut_after: int | None = None
        self.cut_client_after: int | None = None
        self.cuts = 0
        self._closed = False

    def start(self) -> None:
        """Forward in threads."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Forward no more."""
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                continue
            for source, sink, own in ((near, far, "cut_client_after"), (far, near, "cut_after")):
                threading.Thread(target=self._pump, args=(source, sink, own), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, own: str) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                passed += len(data)
                limit = getattr(self, own)
                if limit is not None and passed > limit:
                    setattr(self, own, None)
                    self.cuts += 1
                    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # SO_LINGER of 0 s: a reset instead of an end
                    for end in (source, sink):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class SmtpFaults:
    """A way to an SMTP server that answers some commands itself: ``faults = [("RCPT", "450 4.2.1 try later")]``.

    Each fault is used once, in order, by the first command that it is about. ``DATA-END`` is the answer to the mail
    itself, which then is not handed on; ``LOST-END`` hands it on and cuts the connection instead of the answer.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.faults: list[tuple[str, str]] = []
        self.seen: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _fault(self, command: str) -> str | None:
        for fault in self.faults:
            if command.upper().startswith(fault[0]):
                self.faults.remove(fault)
                return fault[1]
        return None

    def _serve(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError), near, socket.create_connection(("127.0.0.1", self._to)) as far:
            reader, answers = near.makefile("rb"), far.makefile("rb")
            near.sendall(_answer_of(answers))
            while line := reader.readline():
                self.seen.append(line.decode("ascii", "replace").strip())
                said = self._fault(line.decode("ascii", "replace"))
                if said is not None:
                    near.sendall(f"{said}\r\n".encode())
                    if said.startswith("421"):
                        return
                    continue
                far.sendall(line)
                answer = _answer_of(answers)
                near.sendall(answer)
                if (
                    line.upper().startswith(b"DATA")
                    and answer.startswith(b"354")
                    and not self._data(near, reader, far, answers)
                ):
                    return

    def _data(self, near: socket.socket, reader: Any, far: socket.socket, answers: Any) -> bool:
        mail = b""
        while not mail.endswith(b"\r\n.\r\n"):
            mail += reader.readline()
        said = self._fault("DATA-END")
        if said is not None:
            near.sendall(f"{said}\r\n".encode())
            return False
        far.sendall(mail)
        answer = _answer_of(answers)
        if self._fault("LOST-END") is not None:
            return False
        near.sendall(answer)
        return True


def _answer_of(answers: Any) -> bytes:
    found = b""
    while line := answers.readline():
        found += line
        if line[3:4] != b"-":
            return found
    return found
