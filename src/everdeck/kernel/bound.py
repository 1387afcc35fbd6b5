"""What the owner tells the guardian about a bound worker: the words on the channel between them.

The channel is a pair of connected ``SOCK_SEQPACKET`` sockets: one packet is one word, nothing is torn, and what the
owner said before it died is still delivered before end-of-file (unix(7)). End-of-file *is* the news of the owner's
death, so one descriptor is both the channel and the guardian's lifeline.
"""

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from everdeck.kernel.containment import Tree
from everdeck.model import Cookie, Identity


@dataclass(frozen=True, slots=True)
class Bind:
    """End this tree, in this manner, when the owner dies. A second one for the same worker replaces the first."""

    tree: Tree
    signal_number: int = signal.SIGTERM
    grace_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Unbind:
    """That worker is gone or no longer bound."""

    name: str


Word: TypeAlias = Bind | Unbind


def encode(word: Word) -> bytes:
    """One packet."""
    match word:
        case Unbind(name):
            return json.dumps({"unbind": name}).encode()
        case Bind(tree, signal_number, grace_seconds):
            who = tree.identity
            return json.dumps(
                {
                    "bind": tree.name,
                    "cookie": tree.cookie,
                    "lock": tree.lock_path and str(tree.lock_path),
                    "identity": who and [who.boot_id, who.pid, who.start_ticks, who.pidfd_inode],
                    "cgroup": tree.cgroup and str(tree.cgroup),
                    "signal": signal_number,
                    "grace": grace_seconds,
                }
            ).encode()


def decode(packet: bytes) -> Word:
    """The word in a packet."""
    said = json.loads(packet)
    if "unbind" in said:
        return Unbind(said["unbind"])
    tree = Tree(
        said["bind"],
        Cookie(said["cookie"]),
        said["lock"] and Path(said["lock"]),
        said["identity"] and Identity(*said["identity"]),
        said["cgroup"] and Path(said["cgroup"]),
    )
    return Bind(tree, said["signal"], said["grace"])
