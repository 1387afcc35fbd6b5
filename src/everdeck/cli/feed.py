"""``everdeck feed``: look at what was set aside, and decide.

A dead letter is a message that kept failing or took its process with it. It stays in the inbox's file until a person
lets it be tried again or drops it. These commands work on the file itself, beside a running bot: the bot notices a
retry within seconds. No deck is needed.
"""

import asyncio
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from everdeck import wording
from everdeck.cli import DONE, FAILED, USED_WRONGLY, output
from everdeck.cli.reach import TOKEN_ENV, is_elsewhere

if TYPE_CHECKING:
    from everdeck import Deck
    from everdeck.feed import Inbox
    from everdeck.messages import FeedStatus, Letter, LetterVerb, Which
    from everdeck.satellites.bridge import Feed

_SHOWN_PAYLOAD = 60
_Answer = TypeVar("_Answer")


def feed_options(parser: ArgumentParser) -> None:
    """Options of feed."""
    parser.usage = "everdeck feed NAME [list|show|retry|drop|replay] …\n       everdeck feed dead-letters …"
    parser.epilog = (
        "examples:\n  everdeck feed bob-tg                       (its connection, its numbers, what was set aside)\n"
        "  everdeck feed bob-tg retry 17 out-3\n  everdeck feed bob-tg list --which done\n"
        "  everdeck feed dead-letters list bot.db     (any inbox's file)"
    )
    subjects = parser.add_subparsers(metavar="NAME|dead-letters", required=True)
    of = subjects.add_parser("satellite", help="the feed of a satellite; `everdeck feed NAME` is short for it")
    of.description = _SATELLITE
    of.usage = "everdeck feed NAME [list|show|retry|drop|replay] [NUMBER …] [options]"
    of.add_argument("name", metavar="NAME", help="a satellite of this deck")
    of.add_argument("verb_within", metavar="list|show|retry|drop|replay", nargs="?", default="", choices=("", *_VERBS))
    of.add_argument(
        "numbers", metavar="NUMBER", nargs="*", help="as `list` shows them; what goes out begins with 'out-'"
    )
    of.add_argument("--which", choices=("dead", "waiting", "done", "all"), default="dead", help="default: dead")
    of.add_argument("--all", action="store_true", help="retry or drop all that were set aside")
    of.add_argument("--json", action="store_true", help="one JSON object per line")
    of.set_defaults(act=_satellite, path=None)
    letters = subjects.add_parser("dead-letters", help="messages that were set aside", description=_DEAD_LETTERS)
    acts = letters.add_subparsers(metavar="list|show|retry|drop", required=True)
    for name, (function, many) in {
        "list": (_list, False),
        "show": (_show, False),
        "retry": (_retry, True),
        "drop": (_drop, True),
    }.items():
        said = function.__doc__ or ""
        act = acts.add_parser(name, help=said.partition(".")[0], description=said)
        act.add_argument("path", metavar="PATH", type=Path, help="the inbox's file, such as bot.db")
        if name == "show":
            act.add_argument("number", metavar="NUMBER", help="the number that `list` shows")
        if many:
            act.add_argument(
                "numbers", metavar="NUMBER", nargs="*", help="as `list` shows them; unsent replies begin with 'out-'"
            )
            act.add_argument("--all", action="store_true", help="all of them")
        if name == "list":
            act.add_argument("--stream", metavar="NAME", help="only those of this stream, such as telegram:123456")
        act.add_argument("--json", action="store_true", help="one JSON object per line")
        act.set_defaults(act=function)


_VERBS = ("list", "show", "retry", "drop", "replay")
_SATELLITE = (
    "What comes in and goes out by a satellite. Without a verb: its account, its connection, its numbers and what was "
    "set aside. `replay` has one of the last thousand messages that are done handled again."
)
_DEAD_LETTERS = "Messages that were set aside: they kept failing, or took their process with them."


def feed(options: Namespace) -> int:
    """Look into a satellite's feed, or into any inbox's file: what was set aside can be tried again or dropped.

    It works on the file itself, beside a running program, which notices a retry at once.
    """
    from everdeck.errors import FeedError

    if options.path is not None and not options.path.is_file():
        print(f"everdeck feed: {options.path} is not an inbox's file", file=sys.stderr)
        return USED_WRONGLY
    try:
        code: int = options.act(options)
    except FeedError as error:
        print(f"everdeck feed: {error}", file=sys.stderr)
        return FAILED
    return code


def words_of(arguments: list[str]) -> list[str]:
    """``NAME …`` as ``satellite NAME …``: a name stands where a verb within the verb would."""
    for place, word in enumerate(arguments):
        if not word.startswith("-"):
            known = word in {"dead-letters", "satellite"}
            return arguments if known else [*arguments[:place], "satellite", *arguments[place:]]
    return arguments


def _satellite(options: Namespace) -> int:
    """The feed of a satellite."""
    if not is_elsewhere(options.where):
        return _in(_FileFeed(_inbox_of(options), options.name), options)
    from everdeck import Deck

    with Deck(options.where, token=os.environ.get(TOKEN_ENV)) as deck:
        return _in(_DeckFeed(deck, options.name), options)


class _FileFeed:
    """A satellite's feed, by its file."""

    def __init__(self, feed: "Feed", name: str) -> None:
        self._feed = feed
        self._name = name

    def status(self) -> "FeedStatus":
        from everdeck.satellites import bridge

        return bridge.feed_status(self._feed, self._name)

    def letters(self, which: "Which" = "dead", number: str | None = None) -> "list[Letter]":
        from everdeck.satellites import bridge

        return bridge.letters(self._feed, which=which, number=number)

    def decide(self, verb: "LetterVerb", number: str) -> bool:
        from everdeck.satellites import bridge

        return bridge.decide(self._feed, verb, number)


class _DeckFeed:
    """The same of a deck that is elsewhere, by its verbs."""

    def __init__(self, deck: "Deck", name: str) -> None:
        self._deck = deck
        self._name = name

    def status(self) -> "FeedStatus":
        return self._deck.feed(self._name)

    def letters(self, which: "Which" = "dead", number: str | None = None) -> "list[Letter]":
        return self._deck.letters(self._name, which=which, number=number)

    def decide(self, verb: "LetterVerb", number: str) -> bool:
        return self._deck.decide(self._name, verb, number)


def _in(feed: _FileFeed | _DeckFeed, options: Namespace) -> int:
    act = options.verb_within
    if act in {"", "list"}:
        return _overview(options, feed)
    if act == "show" and len(options.numbers) == 1:
        found = [*feed.letters("all", options.numbers[0]), *feed.letters("done", options.numbers[0])]
        if not found:
            return _none(options.numbers, options.name)
        _print_letters(found[:1], options, whole=True)
        return DONE
    if act == "show" or bool(options.numbers) == options.all or (act == "replay" and options.all):
        print("everdeck feed: give the numbers that `list` shows, or --all", file=sys.stderr)
        return USED_WRONGLY
    numbers = [letter.number for letter in feed.letters()] if options.all else options.numbers
    answers = {number: feed.decide(act, number) for number in numbers}
    said = {"retry": "to be tried again", "drop": "dropped", "replay": "to be handled again"}[act]
    if options.json:
        _print_json([{"number": number, "done": answer} for number, answer in answers.items()])
    else:
        print("\n".join(f"{number}: {said}" for number, answer in answers.items() if answer) or "nothing was done")
    missing = [number for number, answer in answers.items() if not answer]
    return _none(missing, options.name) if missing else DONE


def _inbox_of(options: Namespace) -> "Feed":
    from everdeck.deck.feeds import feed_of
    from everdeck.deck.peek import peek_spec
    from everdeck.errors import SpecError

    spec = peek_spec(options.state, options.name)
    if spec.satellite is None:
        raise SpecError("NAME", options.name, "a satellite; this worker runs a command of its own")
    return feed_of(options.state, options.name, spec)


def _overview(options: Namespace, feed: _FileFeed | _DeckFeed) -> int:
    letters = feed.letters(options.which)
    if not options.verb_within:
        import msgspec

        status = feed.status()
        if options.json:
            print(json.dumps({**msgspec.to_builtins(status), "letters": msgspec.to_builtins(letters)}))
            return DONE
        account = f", {status.account}" if status.account else ""
        since = f" since {status.since:%Y-%m-%d %H:%M:%S} UTC" if status.since else ""
        contact = f"{status.last_contact_at:%Y-%m-%d %H:%M:%S} UTC" if status.last_contact_at else "never"
        head = f"{options.name}: {status.kind}{account}: {status.connection}{since}; last contact {contact}"
        print(wording.plain(head))
        if status.error:
            print(wording.plain(f"  {status.error}"))
        numbers = f"{status.waiting:,} waiting, {status.in_flight:,} in flight, {status.done:,} done"
        print(f"  in   {numbers}, {status.dead:,} dead")
        print(f"  out  {status.to_send:,} to send, {status.unsent:,} unsent")
        if not letters:
            return DONE
    _print_letters(letters, options)
    return DONE


def _print_letters(letters: "list[Letter]", options: Namespace, *, whole: bool = False) -> None:
    import msgspec

    if options.json:
        _print_json(msgspec.to_builtins(letters))
    elif not letters:
        print({"dead": "no dead letters", "done": "nothing is done yet"}.get(options.which, "nothing waits"))
    elif whole:
        for name, value in msgspec.to_builtins(letters[0]).items():
            print(wording.plain(f"{name + ':':<13} {'-' if value is None else value}"))
    else:
        header = ["NUMBER", "STATE", "CONVERSATION", "ATTEMPTS", "AT", "TEXT", "ERROR"]
        rows = [
            [
                _one_line(part)
                for part in (
                    letter.number,
                    letter.state,
                    letter.conversation,
                    letter.attempts,
                    f"{letter.at:%Y-%m-%d %H:%M:%S}",
                    letter.subject or letter.text,
                    letter.error,
                )
            ]
            for letter in letters
        ]
        print(output.table(header, rows))


def _none(numbers: list[str], name: str) -> int:
    print(f"everdeck feed: {name} has no message {', '.join(numbers)} for that", file=sys.stderr)
    return FAILED


def _list(options: Namespace) -> int:
    """List what was set aside, oldest first: received messages, then unsent replies."""
    letters = _with(options.path, lambda inbox: _all_letters(inbox, options.stream))
    if options.json:
        _print_json(letters)
    elif not letters:
        print("no dead letters")
    else:
        fields = ("number", "stream", "id", "key", "attempts", "died_at", "error")
        header = [name.replace("_", " ").upper() for name in fields]
        print(output.table(header, [[_one_line(letter[field]) for field in fields] for letter in letters]))
    return DONE


def _show(options: Namespace) -> int:
    """Show one dead letter with its payload."""
    letters = [letter for letter in _with(options.path, _all_letters) if letter["number"] == options.number]
    if not letters:
        return _unknown(options.path, [options.number])
    if options.json:
        _print_json(letters)
        return DONE
    for name, value in letters[0].items():
        print(wording.plain(f"{name + ':':<11} {'-' if value is None else value}"))
    return DONE


def _retry(options: Namespace) -> int:
    """Let them be tried again, with all their attempts. A running bot notices within seconds."""
    from everdeck.feed.outbox import retry_unsent

    async def act(inbox: "Inbox", number: int, *, unsent: bool) -> bool:
        return await (retry_unsent(inbox, number) if unsent else inbox.retry_dead_letter(number))

    return _act_on(options, act, "to be tried again")


def _drop(options: Namespace) -> int:
    """Forget them for good."""
    from everdeck.feed.outbox import drop_unsent

    async def act(inbox: "Inbox", number: int, *, unsent: bool) -> bool:
        return await (drop_unsent(inbox, number) if unsent else inbox.drop_dead_letter(number))

    return _act_on(options, act, "dropped")


# --- helpers, in the order they are called ---


def _with(path: Path, ask: "Callable[[Inbox], Awaitable[_Answer]]") -> _Answer:
    from everdeck.feed import Inbox

    async def opened() -> _Answer:
        inbox = Inbox(path)
        await inbox.open(work=False)
        try:
            return await ask(inbox)
        finally:
            await inbox.close()

    return asyncio.run(opened())


async def _all_letters(inbox: "Inbox", stream: str | None = None) -> list[dict[str, Any]]:
    from everdeck.feed.outbox import unsent_messages

    received = [
        {
            "number": str(letter.number),
            "stream": letter.stream,
            "id": letter.id,
            "key": letter.key,
            "attempts": letter.attempts,
            "crashes": letter.crashes,
            "error": letter.error,
            "stored_at": letter.stored_at.isoformat(timespec="seconds"),
            "died_at": letter.died_at.isoformat(timespec="seconds"),
            "payload": letter.payload.decode("utf-8", errors="replace"),
        }
        for letter in inbox.dead_letters(stream=stream)
    ]
    unsent = [
        {
            "number": f"out-{letter.number}",
            "stream": letter.outbox,
            "id": None,
            "key": letter.key,
            "attempts": letter.attempts,
            "crashes": 0,
            "error": letter.error,
            "stored_at": letter.put_at.isoformat(timespec="seconds"),
            "died_at": letter.died_at.isoformat(timespec="seconds"),
            "payload": letter.payload.decode("utf-8", errors="replace"),
        }
        for letter in unsent_messages(inbox, outbox=stream)
    ]
    return received + unsent


def _act_on(options: Namespace, act: Callable[..., Awaitable[bool]], done: str) -> int:
    if bool(options.numbers) == options.all:
        print("everdeck feed: give the numbers that `list` shows, or --all", file=sys.stderr)
        return USED_WRONGLY

    async def each(inbox: "Inbox") -> dict[str, bool]:
        wanted = [letter["number"] for letter in await _all_letters(inbox)] if options.all else options.numbers
        found: dict[str, bool] = {}
        for number in wanted:
            digits = number.removeprefix("out-")
            found[number] = digits.isdecimal() and await act(inbox, int(digits), unsent=number.startswith("out-"))
        return found

    answers = _with(options.path, each)
    if options.json:
        _print_json([{"number": number, "done": answer} for number, answer in answers.items()])
    else:
        for number, answer in answers.items():
            if answer:
                print(f"{number}: {done}")
        if not answers:
            print("no dead letters")
    missing = [number for number, answer in answers.items() if not answer]
    return _unknown(options.path, missing) if missing else DONE


def _unknown(path: Path, numbers: list[str]) -> int:
    print(f"everdeck feed: no dead letter {', '.join(numbers)} in {path}", file=sys.stderr)
    return FAILED


def _print_json(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(json.dumps(row))


def _one_line(value: object) -> str:
    flat = "-" if value is None else " ".join(str(value).split())
    return flat if len(flat) <= _SHOWN_PAYLOAD else flat[: _SHOWN_PAYLOAD - 1] + "…"
