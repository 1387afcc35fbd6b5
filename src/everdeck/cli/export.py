"""``everdeck export``: the deck's daemon as a unit of systemd or a manifest for Kubernetes."""

import json
import shutil
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

from everdeck.cli import DONE, USED_WRONGLY

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
    parser.add_argument("--name", default="everdeck", help="name of the unit or the resources (default everdeck)")
    parser.add_argument("--image", help="kubernetes: the image with everdeck and your workers (default: the file's)")
    parser.add_argument("--namespace", metavar="NAME", help="kubernetes: where the workers live (default: the file's)")
    parser.add_argument("-o", "--output", metavar="PATH", help="write there instead of standard output")
    parser.epilog = (
        "examples:\n"
        "  everdeck export systemd /etc/everdeck.toml -o /etc/systemd/system/everdeck.service\n"
        "  everdeck export systemd --user -o ~/.config/systemd/user/everdeck.service\n"
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
    text = _systemd_unit(options) if options.target == "systemd" else _kubernetes_manifest(options)
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
_HARDENING: Final = """\
# Hardening that workers share, since they are children. Loosen it where a worker needs more.
# Not set on purpose: PrivateTmp and ProtectSystem=strict give each start of the daemon a mount namespace of its own,
# and a worker that survived would live in the old one.
UMask=0077
NoNewPrivileges=yes
ProtectSystem=full
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectClock=yes
ProtectHostname=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
SystemCallArchitectures=native
"""


def _systemd_unit(options: Namespace) -> str:
    program = shutil.which("everdeck") or f"{sys.executable} -m everdeck.cli"
    state = options.state.resolve()
    file = f" {_quoted(str(Path(options.file).resolve()))}" if options.file else ""
    user = f"User={options.run_as}\n" if options.run_as else ""
    place = _quoted(str(Path.cwd() if options.file is None else Path(options.file).resolve().parent))
    # A user's manager has no network-online.target and no right to the settings that need root.
    network = "" if options.user else "After=network-online.target\nWants=network-online.target\n"
    hardening = "UMask=0077\nNoNewPrivileges=yes\n" if options.user else _HARDENING
    wanted_by = "default.target" if options.user else "multi-user.target"
    return f"""\
{_USER_HINT.format(name=options.name) if options.user else ""}[Unit]
Description=Everdeck: the deck in {state}
Documentation=man:systemd.service(5)
{network}StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
WorkingDirectory={place}
{user}ExecStart={program} up{file} --state {_quoted(str(state))}
ExecReload={program} reload --state {_quoted(str(state))}
Restart=always
RestartSec=1

# Only the daemon is signalled when the unit stops or restarts. Adoptable workers live on in the unit's cgroup and the
# next daemon takes them over; bound ones are ended by the daemon or, if it was killed, by its guardian.
KillMode=process
SendSIGKILL=no
TimeoutStopSec=30

# A subtree of cgroups of our own: cgroup.kill then reaches even what called setsid().
Delegate=yes

{hardening}LimitNOFILE=65536
TasksMax=infinity
OOMPolicy=continue

[Install]
WantedBy={wanted_by}
"""


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
