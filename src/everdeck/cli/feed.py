"""``everdeck feed``: look at what was set aside, and decide.

A dead letter is a message that kept failing or took its process with it. It stays in the inbox's file until a person
lets it be tried again or drops it. These commands work on the file itself, beside a running bot: the bot notices a
retry within seconds. No deck is needed.
"""

import asyncio
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from everdeck.cli import DONE, FAILED, USED_WRONGLY, output

if TYPE_CHECKING:
    from everdeck.feed import Inbox

_SHOWN_PAYLOAD = 60
_Answer = TypeVar("_Answer")


def feed_options(parser: ArgumentParser) -> None:
    """Options of feed."""
    parser.epilog = (
        "examples:\n  everdeck feed dead-letters list bot.db\n  everdeck feed dead-letters retry bot.db --all"
    )
    subjects = parser.add_subparsers(metavar="dead-letters", required=True)
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


_DEAD_LETTERS = "Messages that were set aside: they kept failing, or took their process with them."


def feed(options: Namespace) -> int:
    """Look into a feed's inbox: messages that were set aside, to be tried again or dropped.

    It works on the inbox's file, beside a running bot, which notices a retry within seconds.
    """
    from everdeck.errors import FeedError

    if not options.path.is_file():
        print(f"everdeck feed: {options.path} is not an inbox's file", file=sys.stderr)
        return USED_WRONGLY
    try:
        code: int = options.act(options)
    except FeedError as error:
        print(f"everdeck feed: {error}", file=sys.stderr)
        return FAILED
    return code


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
        print(f"{name + ':':<11} {'-' if value is None else value}")
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
