"""``everdeck export``: the deck's daemon as a unit of systemd or a manifest for Kubernetes."""

import json
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

from everdeck.cli import DONE, USED_WRONGLY
from everdeck.kernel.containment import OWNER_LEAF
from everdeck.statedir import HTTP_SOCKET

DEFAULT_FILE: Final = "everdeck.toml"


def export_options(parser: ArgumentParser) -> None:
    """Options of export."""
    parser.add_argument("target", choices=("systemd", "kubernetes"))
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="configuration for `up` (default: ./everdeck.toml if there)",
    )
    parser.add_argument("--user", action="store_true", help="systemd: a unit of your own user manager, without root")
    parser.add_argument(
        "--run-as", metavar="USER", help="systemd: a unit of the system that runs the daemon as this user"
    )
    parser.add_argument(
        "--socket", action="store_true", help="systemd: the socket unit beside it, which listens for the daemon"
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default="127.0.0.1:8787", help="systemd: where the socket unit listens"
    )
    parser.add_argument("--name", default="everdeck", help="name of the unit or the resources (default everdeck)")
    parser.add_argument("--image", help="kubernetes: the image with everdeck and your workers (default: the file's)")
    parser.add_argument("--namespace", metavar="NAME", help="kubernetes: where the workers live (default: the file's)")
    parser.add_argument("-o", "--output", metavar="PATH", help="write there instead of standard output")
    parser.epilog = (
        "examples:\n"
        "  everdeck export systemd /etc/everdeck.toml -o /etc/systemd/system/everdeck.service\n"
        "  everdeck export systemd --user -o ~/.config/systemd/user/everdeck.service\n"
        "  everdeck export systemd --socket -o /etc/systemd/system/everdeck.socket\n"
        "  everdeck export kubernetes everdeck.toml --image registry.example/bots:7 | kubectl apply -f -"
    )


def export(options: Namespace) -> int:
    """Print what another supervisor needs to keep this deck's daemon running."""
    if options.user and (options.run_as or options.target != "systemd"):
        print(
            "everdeck export: --user is for a systemd unit of your own, which cannot run as another user",
            file=sys.stderr,
        )
        return USED_WRONGLY
    if options.file is None and Path(DEFAULT_FILE).is_file():
        options.file = DEFAULT_FILE
    if options.target == "kubernetes":
        text = _kubernetes_manifest(options)
    else:
        text = _systemd_socket(options) if options.socket else _systemd_unit(options)
    if options.output:
        Path(options.output).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return DONE


_USER_HINT: Final = """\
# For your own manager: save it as ~/.config/systemd/user/{name}.service, then
#   systemctl --user daemon-reload && systemctl --user enable --now {name}
# It ends with your last session, and starts with your next, unless you say once:  loginctl enable-linger
"""
# What is left to the daemon of root's rights: to start workers under other accounts with limits, to reach and end
# them, to give them directories, and to listen on a low port.
_CAPABILITIES: Final = (
    "CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID CAP_KILL CAP_NET_BIND_SERVICE "
    "CAP_SETGID CAP_SETPCAP CAP_SETUID CAP_SYS_NICE CAP_SYS_PTRACE CAP_SYS_RESOURCE"
)
_HARDENING: Final = """\
# Hardening. Workers are children, so whatever stands here binds them too: it takes away what long-lived programs of
# users do not need. Netlink stays (asking for network interfaces uses it), and so do devices, home directories and
# executable memory (JIT compilers). Loosen it where a worker needs more.
# Not set on purpose: PrivateTmp, ProtectHome and ProtectSystem=strict. A worker that survives a restart of the daemon
# would keep the old view of the files, and systemd removes the old /tmp under it.
UMask=0077
NoNewPrivileges=yes
ProtectSystem=full
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectClock=yes
ProtectHostname=yes
PrivateMounts=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=~@clock @cpu-emulation @module @obsolete @raw-io @reboot @swap
SystemCallErrorNumber=EPERM
"""
_NOT_ROOT: Final = """\
CapabilityBoundingSet=
"""
_AS_ROOT: Final = f"""\
# More of it, because the daemon is root here. A worker that runs a browser in its own sandbox, a container or a
# debugger needs namespaces, mounts and ptrace: then remove the last two lines, or run the daemon as a user (--run-as).
CapabilityBoundingSet={_CAPABILITIES}
ProtectProc=invisible
RestrictNamespaces=yes
SystemCallFilter=~@debug @mount
"""
# A user's manager has no right to what needs root: such a line makes the unit fail with 218/CAPABILITIES.
_USER_HARDENING: Final = """\
UMask=0077
NoNewPrivileges=yes
"""
_STATES: Final = Path("/var/lib")  # where systemd makes the directories of its StateDirectory=
_SUBGROUP_SINCE: Final = 254  # systemd's NEWS: DelegateSubgroup=


def _systemd_unit(options: Namespace) -> str:
    program = shutil.which("everdeck") or f"{sys.executable} -m everdeck.cli"
    state = options.state.resolve()
    file = f" {_quoted(str(Path(options.file).resolve()))}" if options.file else ""
    user = f"User={options.run_as}\n" if options.run_as else ""
    # Another account may have no right to the directory that this is typed in (/root), and then cannot start at all.
    here = Path("/") if options.run_as else Path.cwd()
    place = _quoted(str(here if options.file is None else Path(options.file).resolve().parent))
    # A user's manager has no network-online.target, and begins when file systems are mounted. Without its mount the
    # state directory would be an empty one below it, and the deck a new one.
    after = "After=network-online.target\nWants=network-online.target\n"
    after = "" if options.user else f"{after}RequiresMountsFor={_quoted(str(state))}\n"
    hardening = _USER_HARDENING if options.user else _HARDENING + (_NOT_ROOT if options.run_as else _AS_ROOT)
    wanted_by = "default.target" if options.user else "multi-user.target"
    return f"""\
{_USER_HINT.format(name=options.name) if options.user else ""}[Unit]
Description=Everdeck: the deck in {state}
Documentation=man:systemd.service(5)
{after}StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
WorkingDirectory={place}
{user}{_made_by_systemd(state, options.run_as)}ExecStart={program} up{file} --state {_quoted(str(state))}
ExecReload={program} reload --state {_quoted(str(state))}
Restart=always
RestartSec=1

# Only the daemon is signalled when the unit stops or restarts. Adoptable workers live on in the unit's cgroup and the
# next daemon takes them over; bound ones are ended by the daemon or, if it was killed, by its guardian.
KillMode=process
# A daemon that hangs is killed: after so long at a stop, and when its loop has not turned for two minutes. That is far
# beyond what a busy machine does to it; a daemon that is merely slow must not be killed for it.
TimeoutStartSec=10min
TimeoutStopSec=2min
WatchdogSec=2min

{delegation(_systemd_version())}
{hardening}LimitNOFILE=65536
TasksMax=infinity
OOMPolicy=continue

[Install]
WantedBy={wanted_by}
"""


def _made_by_systemd(state: Path, account: str | None) -> str:
    """The line by which systemd makes the state directory for another account, which may not make it in /var/lib."""
    if account is None or not state.is_relative_to(_STATES) or state == _STATES:
        return ""
    return f"StateDirectory={_quoted(str(state.relative_to(_STATES)))}\nStateDirectoryMode=0700\n"


def delegation(version: int | None) -> str:
    """How the daemon gets cgroups of its own from a systemd of this version; for an unknown one what fits all."""
    lines = [
        "# A subtree of cgroups of our own: a worker's limits hold, and cgroup.kill reaches even what called setsid().",
        "Delegate=yes",
    ]
    if version is None or version >= _SUBGROUP_SINCE:
        lines.append(f"DelegateSubgroup={OWNER_LEAF}")
    if version is None or version < _SUBGROUP_SINCE:
        lines += [
            f"# systemd below {_SUBGROUP_SINCE} starts the daemon at the top of the subtree, which takes no process",
            "# while controllers are enabled there (219/CGROUP). The next daemon enables them again.",
            f"ExecStopPost=-{sys.executable} -m everdeck.kernel.controllers release",
        ]
    return "\n".join(lines) + "\n"


def _systemd_version() -> int | None:
    """The major version of this machine's systemd; None where there is none to ask."""
    try:
        said = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    words = said.stdout.split()
    return int(words[1]) if len(words) > 1 and words[0] == "systemd" and words[1].isdigit() else None


def _systemd_socket(options: Namespace) -> str:
    """Sockets on which systemd listens: they are there before the daemon is, and while it restarts."""
    state = options.state.resolve()
    owner = f"SocketUser={options.run_as}\n" if options.run_as else ""
    # What is missing of the path is root's; the state directory itself is handed to the account by the service's unit.
    passable = "0711" if options.run_as else "0700"
    return f"""\
# Save it as {options.name}.socket beside {options.name}.service; then: systemctl enable --now {options.name}.socket
[Unit]
Description=Everdeck: the sockets of the deck in {state}
Documentation=man:systemd.socket(5)

[Socket]
ListenStream={options.listen}
ListenStream={_unquoted(str(state / HTTP_SOCKET))}
{owner}SocketMode=0600
DirectoryMode={passable}

[Install]
WantedBy=sockets.target
"""


def _unquoted(text: str) -> str:
    """A path that is a whole value: only percent signs mean something there."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """As systemd.syntax(7) reads it: percent signs doubled, quoted when there is anything to quote."""
    doubled = text.replace("%", "%%")
    if all(character.isalnum() or character in "/._-+:@%" for character in doubled):
        return doubled
    return '"' + doubled.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _kubernetes_manifest(options: Namespace) -> str:
    """Namespace, operator and workers; each worker a StatefulSet of one behind a fence."""
    from msgspec import UNSET

    from everdeck import config
    from everdeck.cluster.export import manifests
    from everdeck.cluster.objects import Settings
    from everdeck.model import WorkerSpec

    loaded = config.load(options.file) if options.file else None
    table = loaded.kubernetes if loaded is not None else config.KubernetesTable()
    said = {name: value for name in table.__struct_fields__ if (value := getattr(table, name)) is not UNSET}
    said |= {name: value for name in ("namespace", "image") if (value := getattr(options, name)) is not None}
    workers = loaded.workers if loaded is not None else {}
    # On one box a worker of a file runs where the file stands; that directory is not in the image.
    beside = str(Path(options.file).resolve().parent) if options.file else None
    inside = {name: WorkerSpec.of(spec, cwd=None if spec.cwd == beside else spec.cwd) for name, spec in workers.items()}
    made = manifests(Settings(**said), inside)
    header = (
        "# Each worker is a StatefulSet of one whose pod starts nothing without the worker's Lease: never two copies.\n"
        "# The operator brings workers back whose node has died. Secrets are in here: keep this file to yourself.\n"
        "# Made by: everdeck export kubernetes\n"
    )
    # JSON is YAML, and needs no emitter; `---` separates the documents.
    return header + "".join(f"---\n{json.dumps(document, indent=2)}\n" for document in made)
