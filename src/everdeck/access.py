"""Who may do what: roles, label selectors, and the people of this machine who are let in.

A :class:`Grant` says what somebody may do: a role, and the labels a worker must have to exist for them at all. Pure
values and decisions; who somebody is was found out before (a token's digest, SO_PEERCRED), and :mod:`everdeck.guarded`
holds every verb of a deck to a grant.

- ``read``: look at workers, their logs and events.
- ``operate``: also start, stop, restart and reset workers that are known, and send messages.
- ``admin``: also say what is run: new and changed workers, adopting, removing, applying a file, reloading. A command
  runs with the rights of the daemon, so whoever may name one has those rights.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final

import msgspec

from everdeck.errors import AccessDenied, SpecError

__all__ = ["Grant", "LocalPeople", "Role", "selector"]


class Role(StrEnum):
    """What somebody may do; each includes the ones before it."""

    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"

    def includes(self, other: "Role") -> bool:
        """May whoever has this role do what the other needs?"""
        return _RANK[self] >= _RANK[other]


_RANK: Final = {role: rank for rank, role in enumerate(Role)}


class Grant(msgspec.Struct, frozen=True):
    """What one caller may do. ``labels`` empty: the whole deck."""

    name: str
    role: Role
    labels: dict[str, str] = {}

    def sees(self, labels: Mapping[str, str]) -> bool:
        """Does a worker with these labels exist for this caller?"""
        return all(labels.get(key) == value for key, value in self.labels.items())

    def require(self, role: Role, what: str, *, whole_deck: bool = False) -> None:
        """Refuse with :class:`AccessDenied` what this grant does not include."""
        if not self.role.includes(role):
            raise AccessDenied(self.name, what, f"role {role.value}; this caller has role {self.role.value}")
        if whole_deck and self.labels:
            raise AccessDenied(self.name, what, "access to the whole deck, not only to workers with certain labels")


OWN_GRANT: Final = Grant("owner", Role.ADMIN)
"""Of the account that runs the deck, and of root: both could do everything without asking us."""


class LocalPeople(msgspec.Struct, frozen=True):
    """Which accounts of this machine are let in by the sockets, beside the deck's own and root."""

    users: dict[int, Role] = {}
    groups: dict[int, Role] = {}

    def grant_of(self, uid: int, gids: Collection[int], own_uid: int) -> Grant | None:
        """The best of what an account and its groups are given; None: not let in."""
        if uid in {0, own_uid}:
            return OWN_GRANT
        given = [self.users[uid]] if uid in self.users else []
        given += [role for gid, role in self.groups.items() if gid in gids]
        return Grant(f"uid:{uid}", max(given, key=_RANK.__getitem__)) if given else None

    def __bool__(self) -> bool:
        return bool(self.users or self.groups)


def selector(texts: Collection[str]) -> dict[str, str]:
    """``["team=a", "env=prod"]`` as labels; raises :class:`SpecError` for anything else."""
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SpecError("label", text, "KEY=VALUE")
        labels[key] = value
    return labels
