"""What the outside knows of a machine whose power is cut, and what it finds wrong afterwards."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ledger:
    """Told line by line; :meth:`faults` compares what is found after a cut with what was told before it."""

    events: dict[int, str] = field(default_factory=dict)
    wanted: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # by name: the last verb that was answered, its mark
    refused: dict[str, str] = field(default_factory=dict)  # by name, since the last answer
    open: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # asked since then, without an answer
    secrets: dict[str, str | None] = field(default_factory=dict)  # as they were found after the last cut
    confirmed: int = 1
    booked: set[int] = field(default_factory=set)
    rotated: dict[str, int] = field(default_factory=dict)  # by life of the talker: its last line that is in an archive
    rotations: int = 0
    shown: dict[str, int] = field(default_factory=dict)  # by life: its last line that a reader was shown after a cut
    control: int = 0
    unsynced_lost: Counter[str] = field(default_factory=Counter)
    blocks_lost: int = 0
    answers: int = 0
    begun: bool = False  # has what was found after the last cut been taken over?
    heard_faults: list[str] = field(default_factory=list)

    @property
    def last_event(self) -> int:
        """The newest that is known."""
        return max(self.events, default=0)

    def hear(self, line: dict[str, Any]) -> None:
        """One line of the workload."""
        match line:
            case {"what": "asked", "verb": verb, "name": name, "turn": turn}:
                self.open.setdefault(name, []).append((verb, turn))
            case {"what": "answered", "verb": verb, "name": name, "turn": turn}:
                self.wanted[name] = (verb, turn)
                self.open[name] = []
                self.refused.pop(name, None)
                self.answers += 1
            case {"what": "refused", "name": name, "verb": verb, "why": why}:
                self.open[name] = []
                self.refused[name] = f" ({verb} was refused: {why})"
            case {"what": "event", "id": number, "said": said}:
                self.heard_faults += self._of_event(number, said)
                self.events[number] = said
            case {"what": "confirmed", "below": below}:
                self.confirmed = max(self.confirmed, below)
            case {"what": "booked", "id": number}:
                self.booked.add(number)
            case {"what": "rotated", "upto": [life, number]} if life:
                self.rotated[life] = number
                self.rotations += 1
            case {"what": "control", "number": number}:
                self.control = number

    def faults(self, found: dict[str, Any]) -> list[str]:
        """What a power cut must not do, and did."""
        faults, self.heard_faults = self.heard_faults, []
        for number, said in found["events"]:
            faults += self._of_event(number, said)
        for name in sorted({*self.wanted, *found["workers"]}):
            faults += self._of_worker(name, found["workers"].get(name))
        return [*faults, *self._of_messages(found["booked"]), *self._of_log(**found["log"])]

    def lost_messages(self, first_poll: int) -> list[str]:
        """A poll below what was confirmed asks for what the other side has forgotten."""
        lost = self.confirmed - first_poll
        return [f"{lost} confirmed messages are lost"] if lost > 0 else []

    def unbooked(self, below: int) -> set[int]:
        """Messages that the other side has forgotten, and nobody has booked yet."""
        return {*range(1, below)} - self.booked

    def begin_again(self, found: dict[str, Any]) -> None:
        """From here on what was found is what holds."""
        self.events |= dict(found["events"])
        self.open.clear()
        self.begun = True
        self.wanted = {
            name: ("start" if one["runs"] else "stop", one["turn"]) for name, one in found["workers"].items()
        }
        # A booking and the end of its message are one commit: what a cut takes back is handed out and booked again.
        self.booked = _members(found["booked"]["runs"])
        self.secrets = {name: one["secret"] for name, one in found["workers"].items()}
        # But for the last, which may be the life that speaks again: its lines are on no disk yet.
        self.shown |= {life: last for life, _, last in found["log"]["runs"][:-1]}
        self.unsynced_lost += Counter(kind for kind, number in found["control"].items() if number < self.control)

    def _of_event(self, number: int, said: str) -> list[str]:
        before = self.events.get(number, said)
        return [] if before == said else [f"event {number} was {before!r} and is {said!r}"]

    def _of_worker(self, name: str, now: dict[str, Any] | None) -> list[str]:
        """Either what was answered last, or one of the verbs that were under way."""
        possible = [*([self.wanted[name]] if name in self.wanted else [("remove", "")]), *self.open.get(name, [])]
        if not any(_fits(verb, turn, now) for verb, turn in possible):
            return [f"{name}: {possible[0]} was answered, and now it is {now}{self.refused.get(name, '')}"]
        if now is not None and now["secret"] != f"secret of {now['turn']}":
            turns = {turn for verb, turn in self.open.get(name, []) if verb == "start"}
            before = {self.secrets[name]} if name in self.secrets else set()
            if now["secret"] not in before | {f"secret of {turn}" for turn in turns}:
                return [f"{name}: its secret is {now['secret']!r}"]
        return []

    def _of_messages(self, booked: dict[str, Any]) -> list[str]:
        doubled = booked["rows"] - len(_members(booked["runs"]))
        return [f"{doubled} messages are booked twice"] if doubled else []

    def _of_log(self, runs: list[list[Any]], strange: dict[str, int], full: bool) -> list[str]:
        """A life is one run of lines; what was rotated or shown before is there, but for the oldest of a full log."""
        faults = [f"{strange['zeros']} lines of the log are zeros"] if "zeros" in strange else []
        lives = Counter(life for life, _, _ in runs)
        faults += [f"the lines of {life} are {count} pieces: {runs}" for life, count in lives.items() if count > 1]
        known = list(dict.fromkeys([*self.shown, *self.rotated]))
        oldest = 0
        if full and runs:  # of a life that nobody knew: then the known ones are older still
            oldest = known.index(runs[0][0]) if runs[0][0] in known else len(known)
        last = {life: last for life, _, last in runs}
        for life in known[oldest:]:
            promised = max(self.rotated.get(life, 0), self.shown.get(life, 0))
            if last.get(life, 0) < promised:
                faults.append(f"line {promised} of {life} was kept, and the log ends with {last.get(life)}")
        if not full and any(first != 1 for _, first, _ in runs):
            faults.append(f"the first lines of a log that is not full are gone: {runs}")
        return faults


def _members(runs: list[list[int]]) -> set[int]:
    return {number for first, last in runs for number in range(first, last + 1)}


def _fits(verb: str, turn: str, now: dict[str, Any] | None) -> bool:
    match verb:
        case "remove":
            return now is None
        case "start":
            return now is not None and now["runs"] and now["turn"] == turn
        case _:
            return now is None or not now["runs"]
