"""What the outside knows of a machine whose power is cut, and what it finds wrong afterwards."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ledger:
    """Told line by line; :meth:`faults` compares what is found after a cut with what was told before it."""

    events: dict[int, str] = field(default_factory=dict)
    wanted: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # by name: the last verb that was answered, its mark
    open: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # asked since then, without an answer
    confirmed: int = 1
    answers: int = 0
    begun: bool = False  # has what was found after the last cut been taken over?

    def hear(self, line: dict[str, Any]) -> None:
        """One line of the workload."""
        match line:
            case {"what": "asked", "verb": verb, "name": name, "turn": turn}:
                self.open.setdefault(name, []).append((verb, turn))
            case {"what": "answered", "verb": verb, "name": name, "turn": turn}:
                self.wanted[name] = (verb, turn)
                self.open[name] = []
                self.answers += 1
            case {"what": "refused", "name": name}:
                self.open[name] = []
            case {"what": "event", "id": number, "said": said}:
                self.events.setdefault(number, said)
            case {"what": "confirmed", "below": below}:
                self.confirmed = max(self.confirmed, below)

    def faults(self, found: dict[str, Any]) -> list[str]:
        """What a power cut must not do, and did; afterwards what was found is what is known."""
        faults = [
            f"event {number} was {self.events[number]!r} and is {said!r}"
            for number, said in found["events"]
            if self.events.get(number, said) != said
        ]
        for name in sorted({*self.wanted, *found["workers"]}):
            faults += self._of_worker(name, found["workers"].get(name))
        booked = found["booked"]
        if len(booked) != len(set(booked)):
            faults.append(f"{len(booked) - len(set(booked))} messages are booked twice")
        return faults

    def lost_messages(self, first_poll: int) -> list[str]:
        """A poll below what was confirmed asks for what the other side has forgotten."""
        lost = self.confirmed - first_poll
        return [f"{lost} confirmed messages are lost"] if lost > 0 else []

    def begin_again(self, found: dict[str, Any]) -> None:
        """From here on what was found is what holds."""
        for number, said in found["events"]:
            self.events[number] = said
        self.open.clear()
        self.begun = True
        self.wanted = {
            name: ("start" if one["runs"] else "stop", one["turn"]) for name, one in found["workers"].items()
        }

    def _of_worker(self, name: str, now: dict[str, Any] | None) -> list[str]:
        """Either what was answered last, or one of the verbs that were under way."""
        possible = [*([self.wanted[name]] if name in self.wanted else [("remove", "")]), *self.open.get(name, [])]
        if not any(_fits(verb, turn, now) for verb, turn in possible):
            return [f"{name}: {possible[0]} was answered, and now it is {now}"]
        if now is not None and now["secret"] != f"secret of {now['turn']}":
            turns = {turn for verb, turn in self.open.get(name, []) if verb == "start"}
            if now["secret"] not in {f"secret of {turn}" for turn in turns}:
                return [f"{name}: its secret is {now['secret']!r}"]
        return []


def _fits(verb: str, turn: str, now: dict[str, Any] | None) -> bool:
    match verb:
        case "remove":
            return now is None
        case "start":
            return now is not None and now["runs"] and now["turn"] == turn
        case _:
            return now is None or not now["runs"]
