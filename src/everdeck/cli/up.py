"""``everdeck up``: be the daemon, here or in the background."""

import gc
import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Final

from everdeck.cli import CLUSTER, DEFAULT_STATE, DONE, FAILED, USED_WRONGLY, home_of

READY_FD_ENV: Final = "EVERDECK_READY_FD"
DAEMON_LOG: Final = "daemon.log"


def up_options(parser: ArgumentParser) -> None:
    """Options of up."""
    parser.add_argument(
        "places",
        metavar="FILE",
        nargs="*",
        help="configuration to apply (default: ./everdeck.toml if there); kubernetes:NAMESPACE serves that deck",
    )
    parser.set_defaults(file=None)
    parser.add_argument("--detach", action="store_true", help="go to the background once everything is up")
    parser.add_argument("--listen", metavar="HOST:PORT", help="where the page is served (default 127.0.0.1:8787)")
    parser.add_argument("--check", action="store_true", help="try everything that is needed to start, and exit")
    parser.add_argument("--no-http", action="store_true", help="the Unix socket only, no page")
    parser.add_argument("--insecure", action="store_true", help="allow an address others reach, without TLS")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate chain (PEM)")
    parser.add_argument("--tls-key", metavar="FILE", help="private key (PEM)")
    parser.add_argument(
        "--host", action="append", default=[], metavar="NAME", help="a further name the page is called by"
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="for people, or for machines")
    parser.add_argument("--log-file", metavar="FILE", help="log there, at most 10 MB, instead of to standard error")
    parser.add_argument(
        "--sample-seconds", type=float, metavar="S", help="sample cpu and memory also when nobody looks"
    )
    parser.epilog = (
        "examples:\n"
        "  everdeck up                         (in the foreground, Ctrl-C to leave)\n"
        "  everdeck up everdeck.toml --detach\n"
        "  everdeck up --no-http --log-format json\n"
        "  everdeck up kubernetes:bots         (API and page over a namespace of a cluster)\n\n"
        "Leaving (SIGTERM, Ctrl-C) stops bound workers; adoptable ones keep running and the next\n"
        "`everdeck up` takes them over. `everdeck stop --all` before it stops everything."
    )


def up(options: Namespace) -> int:
    """Own the deck: recover what an earlier owner left, apply the file, supervise, serve the socket and the page.

    The token for the page is made at the first start and shown once, as a link to log in with.
    """
    if (misused := _misuse(options)) is not None:
        print(f"everdeck up: {misused}", file=sys.stderr)
        return USED_WRONGLY
    _sort_out(options)
    if options.detach and not options.check:
        return _detach(options)
    # Nearly everything that a start makes stays: looking for garbage in it meanwhile took a fifth of the time with
    # five thousand workers. The daemon looks once when it is up, and from then on as usual.
    gc.disable()
    try:
        from everdeck.server import TYPED_IN_ENV, fitness

        act = fitness.check
        if not options.check or not fitness.code_is_known():
            from everdeck.server import daemon

            act = fitness.check if options.check else daemon.run
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "everdeck":
            raise
        print(f"everdeck: {error.name} is not installed; pip install 'everdeck[server]'", file=sys.stderr)
        return FAILED
    if (typed_in := os.environ.pop(TYPED_IN_ENV, None)) is not None:
        os.chdir(typed_in)
    settings = _settings(options)
    ready_fd = os.environ.pop(READY_FD_ENV, None)
    elsewhere = options.where if options.where.startswith(CLUSTER) else None
    chosen = fitness.DaemonOptions(state_dir=options.state, elsewhere=elsewhere, ready=_ready(ready_fd), **settings)
    try:
        return act(chosen, sys.stdout)
    except fitness.ListenRefused as error:
        print(f"everdeck: {error}", file=sys.stderr)
        return USED_WRONGLY


def _misuse(options: Namespace) -> str | None:
    """What is wrong with what was typed."""
    if options.sample_seconds is not None and options.sample_seconds <= 0:
        return "--sample-seconds takes a number above 0"
    if bool(options.tls_cert) != bool(options.tls_key):
        return "--tls-cert and --tls-key belong together"
    clusters = sum(place.startswith(CLUSTER) for place in options.places)
    return "one FILE, and one kubernetes:NAMESPACE" if clusters > 1 or len(options.places) - clusters > 1 else None


def _sort_out(options: Namespace) -> None:
    """Which of the words is the file; and if one is a cluster, that this is the deck."""
    for place in options.places:
        if not place.startswith(CLUSTER):
            options.file = place
        elif options.where == DEFAULT_STATE or options.where.startswith(CLUSTER):
            options.where, options.state = place, home_of(place)
        else:  # a directory that was typed beside a cluster is where our own files are
            options.where = place


def _settings(options: Namespace) -> dict[str, Any]:
    """What the file says under [server], with the options of the command line over it."""
    from msgspec import UNSET

    from everdeck.config import DEFAULT_FILE, ServerTable, load
    from everdeck.server.fitness import DEFAULT_LISTEN

    file = options.file or (DEFAULT_FILE if Path(DEFAULT_FILE).is_file() else None)
    config = None if file is None else load(file)
    server = ServerTable() if config is None else config.server

    def said(name: str) -> Any:
        value = getattr(server, name)
        return None if value is UNSET else value

    listen = None if options.no_http or not (server.http or options.listen) else options.listen or said("listen")
    if listen is None and not options.no_http and server.http:
        listen = DEFAULT_LISTEN
    return {
        "config": config,
        "listen": listen,
        "listen_was_asked_for": bool(options.listen or said("listen")),
        "log_file": None if options.log_file is None else Path(options.log_file),
        "insecure": options.insecure,
        "log_format": options.log_format,
        "hosts": (*server.hosts, *options.host),
        "tls_cert": options.tls_cert or said("tls_cert"),
        "tls_key": options.tls_key or said("tls_key"),
        "tls_client_ca": said("tls_client_ca"),
        "public_url": said("public_url"),
        "access_log": said("access_log"),
        "people": _people(server.users, server.groups),
        "sample_seconds": options.sample_seconds or said("sample_seconds"),
    }


def _people(users: Any, groups: Any) -> Any:
    """The accounts that ``[server]`` names, by their numbers; unknown ones are refused: a typo lets nobody in."""
    import grp
    import pwd

    from everdeck.access import LocalPeople
    from everdeck.errors import SpecError

    def number(field: str, name: str, look: Any) -> int:
        try:
            return int(name) if name.isdigit() else int(look(name))
        except KeyError:
            raise SpecError(f"server.{field}", name, f"one of this machine's {field}, or a number") from None

    return LocalPeople(
        users={number("users", name, lambda one: pwd.getpwnam(one).pw_uid): role for name, role in users.items()},
        groups={number("groups", name, lambda one: grp.getgrnam(one).gr_gid): role for name, role in groups.items()},
    )


def _ready(ready_fd: str | None) -> Any:
    if ready_fd is None:
        return lambda _: None

    def tell(link: str) -> None:
        with os.fdopen(int(ready_fd), "w", encoding="utf-8") as pipe:
            pipe.write(f"ready {link}\n")

    return tell


def page_line(link: str, state: Path, *, to_a_terminal: bool) -> str:
    """Where the page is; with the token only for eyes: what goes into a pipe or a file is kept there."""
    base, with_token, _ = link.partition("login#token=")
    if not with_token:
        return f"the page: {base}"
    if to_a_terminal:
        return f"the page, shown once with its token: {link}"
    return f"the page: {base} (its token is in {state / 'token'}; `everdeck login` prints the link in a terminal)"


def _detach(options: Namespace) -> int:
    """Start the daemon in a session of its own and wait until it says that it is ready, or why it is not."""
    import subprocess

    from everdeck.deck.home import make_state_dir
    from everdeck.server import TYPED_IN_ENV

    state: Path = options.state
    make_state_dir(state)
    log_path = state / DAEMON_LOG
    arguments = [word for word in sys.argv[1:] if word != "--detach"]
    if options.log_file is None:
        arguments += ["--log-file", str(log_path)]
    else:
        log_path = Path(options.log_file)
    read_fd, write_fd = os.pipe()
    log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    begins_at = os.fstat(log_fd).st_size
    try:
        daemon = subprocess.Popen(  # noqa: TID251 - the daemon is no worker: nobody supervises it from here
            # Never from where it was typed: a module that somebody put there would run as us.
            [sys.executable, "-P", "-m", "everdeck.cli", *arguments],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log_fd,
            start_new_session=True,
            pass_fds=(write_fd,),
            env={**os.environ, READY_FD_ENV: str(write_fd), TYPED_IN_ENV: str(Path.cwd())},
        )
    finally:
        os.close(write_fd)
        os.close(log_fd)
    with os.fdopen(read_fd, encoding="utf-8") as pipe:
        said = pipe.readline()
    if not said.startswith("ready"):
        code = daemon.wait()
        with log_path.open("rb") as log:
            log.seek(begins_at)
            sys.stderr.write(log.read().decode("utf-8", "replace"))
        return code or FAILED
    link = said.removeprefix("ready").strip()
    what = f"serving {options.where}" if options.where.startswith(CLUSTER) else f"supervising {state}"
    print(f"up, {what} (pid {daemon.pid}); its log is {log_path}")
    if link:
        print(page_line(link, state, to_a_terminal=sys.stdout.isatty()))
    # Left to itself on purpose; without this Python would warn about a child that still runs.
    daemon.returncode = 0
    return DONE
