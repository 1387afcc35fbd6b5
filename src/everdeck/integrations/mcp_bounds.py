"""What an agent may do: a role, the labels of the workers that exist for it, and the commands it may have run.

Pure values and decisions. Roles and labels are those of :mod:`everdeck.access`, and :mod:`everdeck.guarded` holds every
verb to them. What is added here is the list of allowed commands, because a command runs with the rights of the deck:
whoever may name any command has those rights.
"""

import re
import shlex
from collections.abc import Iterable, Sequence

import msgspec

from everdeck.access import Grant, Role
from everdeck.errors import AccessDenied, SpecError


class Bounds(msgspec.Struct, frozen=True):
    """``commands`` None: known workers may be started, and none is made. ``labels`` empty: the whole deck."""

    role: Role = Role.READ
    commands: tuple[tuple[str, ...], ...] | None = None
    labels: dict[str, str] = {}

    def grant(self, client: str) -> Grant:
        """As the guard of the deck takes it."""
        return Grant(client, self.role, self.labels)

    def maker(self, client: str) -> Grant:
        """For a start by a command that :meth:`require_command` has let pass."""
        return Grant(client, Role.ADMIN, self.labels)

    def require_command(self, client: str, command: Sequence[str], *, known: bool) -> None:
        """Refuse with :class:`AccessDenied` a command that may not be started."""
        if self.commands is None:
            if not known:
                raise AccessDenied(client, "start by a command", "`everdeck mcp --commands` with this command")
        elif not any(_fits(pattern, command) for pattern in self.commands):
            allowed = "; ".join(map(" ".join, self.commands))
            raise AccessDenied(client, f"to run {shlex.join(command)!r}", f"one of the allowed commands: {allowed}")


def allowed_commands(lines: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Command lines as patterns, word by word; empty lines and those that begin with # are left out."""
    found = []
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            words = tuple(shlex.split(line))
        except ValueError as err:
            raise SpecError("--commands", line, f"a command line as a shell reads it ({err})") from err
        if any(sign in words[0] for sign in "*?"):
            raise SpecError("--commands", line, "a command line whose program is named without * and ?")
        found.append(words)
    return tuple(found)


def _fits(pattern: Sequence[str], command: Sequence[str]) -> bool:
    return len(pattern) == len(command) and all(map(_word_fits, pattern, command))


def _word_fits(pattern: str, word: str) -> bool:
    """``*`` and ``?`` stand for text without a slash: they lead out of no directory and make no option of a word."""
    if pattern == word:
        return True
    if word.startswith("-") and not pattern.startswith("-"):
        return False
    if ".." in word.split("/"):
        return False
    signs = {"*": "[^/]*", "?": "[^/]"}
    return re.fullmatch("".join(signs.get(sign, re.escape(sign)) for sign in pattern), word, re.DOTALL) is not None
