"""Is the next image of the daemon fit to take over? What ``everdeck up`` was asked for, and the check before a reload.

A reload that cannot succeed does not begin: before the daemon gives its place to the next image (execve(2)), that is
started beside it as it will be started, up to the point where it would own the deck. Loading all of the code is most
of that, and is left out where it is the code that runs: then it was loaded before, by the very process that asks.
"""

import asyncio
import contextlib
import gc
import ipaddress
import os
import ssl
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

from everdeck import __version__
from everdeck.access import LocalPeople
from everdeck.clock import Clock
from everdeck.config import Config
from everdeck.errors import DeckError, StateDirRefused
from everdeck.kernel.identity import boottime
from everdeck.registry import check_writable, read_only
from everdeck.server import TYPED_IN_ENV
from everdeck.server.tokens import read_token
from everdeck.statedir import StateDir

DEFAULT_LISTEN: Final = "127.0.0.1:8787"
PREFLIGHT_SECONDS: Final = 60.0
SAME_CODE_ENV: Final = "EVERDECK_SAME_CODE"
"""Set for a check whose code is that of the daemon that asks for it."""
_STARTED: Final = Clock().wall(), boottime()
_BEFORE_SECONDS: Final = 5.0  # some of the code was loaded before this module was
_STEPPED_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """What ``everdeck up`` was asked for."""

    state_dir: Path
    elsewhere: str | None = None
    """The deck that is served, if it is not the directory: ``kubernetes:NAMESPACE``; the directory is then our own."""
    config: Config | None = None
    listen: str | None = DEFAULT_LISTEN
    listen_was_asked_for: bool = False
    insecure: bool = False
    log_format: str = "text"
    log_file: Path | None = None
    hosts: tuple[str, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    public_url: str | None = None
    access_log: str | None = None
    people: LocalPeople = field(default_factory=LocalPeople)
    sample_seconds: float | None = None
    ready: Callable[[str], None] = field(default=lambda _: None)


class ListenRefused(DeckError):
    """The page may not be served there: the address is reachable by others and nothing encrypts the token."""


def check(options: DaemonOptions, out: TextIO) -> int:
    """Everything that :func:`run` needs, tried for real without owning the deck; raises what is in the way."""
    if options.listen is not None:
        listen_address(options)
        tls_of(options)
        with contextlib.suppress(FileNotFoundError):
            read_token(StateDir(options.state_dir).token)
    if not code_is_known():
        from everdeck.server.app import create_litestar  # noqa: PLC0415 - half a second

        create_litestar(None)
    places = StateDir(options.state_dir)
    found = 0
    if places.registry.exists():
        check_writable(places.registry)
        _check_room(places.path)
        with contextlib.closing(read_only(places.registry)) as registry:
            found = len(registry.records())
    print(f"fit: everdeck {__version__}, {found} workers", file=out)
    gc.freeze()  # the end is near: to look through everything for garbage first would take a tenth of a second
    return 0


def listen_address(options: DaemonOptions) -> tuple[str, int]:
    """Where the page is served; refuses an address that others reach when nothing protects the token on its way."""
    host, port = _split(options.listen or DEFAULT_LISTEN)
    tls = options.tls_cert is not None
    if not _is_loopback(host) and not tls and not options.insecure:
        raise ListenRefused(
            f"{host} can be reached by others and the token would travel unencrypted; give --tls-cert and --tls-key, "
            f"listen on 127.0.0.1 behind a proxy that speaks TLS, or insist with --insecure"
        )
    return host, port


def _split(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:  # noqa: PLR2004 - ports are 16 bits
        raise ListenRefused(f"--listen {listen!r}: accepted is HOST:PORT, such as {DEFAULT_LISTEN}")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def tls_of(options: DaemonOptions) -> "ssl.SSLContext | None":
    """How the page is encrypted, if it is."""
    if options.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
        if options.tls_client_ca is not None:
            context.load_verify_locations(options.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ListenRefused(f"the TLS certificate or key cannot be used: {error}") from error
    return context


def _check_room(state_dir: Path) -> None:
    """Make a file in the directory, with something in it, as a start does."""
    fresh = state_dir / f".check.{os.getpid()}"
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, b"x" * 4096)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            fresh.unlink()
    except OSError as error:
        raise StateDirRefused(f"{state_dir}: {error.strerror}") from error


def code_is_known() -> bool:
    """Does whoever asks for this check run the same code?"""
    return SAME_CODE_ENV in os.environ


# --- replacing the program --------------------------------------------------------------------------------------


def next_image() -> list[str]:
    """The same command line, by its own path; and nothing is imported from where it was typed."""
    script = os.path.abspath(sys.argv[0])  # noqa: PTH100 - resolve() would leave a virtual environment
    words = [script if word == sys.argv[0] else word for word in sys.orig_argv[1:]]
    return [sys.executable, *([] if sys.flags.safe_path else ["-P"]), *words]


async def preflight() -> str | None:
    """Start the next image as it will be started, up to the point where it would own the deck. None: it is fit."""
    known = {SAME_CODE_ENV: "1"} if is_same_code() else {}
    try:
        async with asyncio.timeout(PREFLIGHT_SECONDS):
            process = await asyncio.create_subprocess_exec(
                *next_image(),
                "--check",
                cwd="/",
                env={**os.environ, TYPED_IN_ENV: str(Path.cwd()), **known},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await process.communicate()
    except (OSError, TimeoutError) as error:
        return f"it could not be tried out: {error or 'it took too long'}"
    if process.returncode == 0:
        return None
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with exit code {process.returncode}"


def is_same_code() -> bool:
    """Is all the code that this process was made of still what it was?

    A change of a file, by whatever means, is a change of its inode (st_ctime, which nobody can set). A clock that was
    stepped since would say nothing, so then the answer is no.
    """
    wall, boot = _STARTED
    if abs((Clock().wall() - wall) - (boottime() - boot)) > _STEPPED_SECONDS:
        return False
    latest = int((wall - _BEFORE_SECONDS) * 1e9)
    try:
        return all(os.stat(path).st_ctime_ns < latest for path in _made_of())  # noqa: PTH116 - a thousand of them
    except OSError:
        return False


def _made_of() -> Iterator[str]:
    yield from {sys.executable, os.path.realpath(sys.executable)}
    # A directory tells of what came or went in it: a module that hides another, a .pth file.
    yield from (place for place in sys.path if os.path.exists(place))  # noqa: PTH110 - as above
    yield from {file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    for folder, inner, names in os.walk(Path(__file__).parent.parent):
        inner[:] = [name for name in inner if name != "__pycache__"]
        yield folder
        yield from (os.path.join(folder, name) for name in names)  # noqa: PTH118 - as above
