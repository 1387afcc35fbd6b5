"""``everdeck feed``: look at what was set aside, and decide.

A dead letter is a message that kept failing or took its process with it. It stays in the inbox's file until a person
lets it be tried again or drops it. These commands work on the file itself, beside a running bot: the bot notices a
retry within seconds. No deck is needed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from everdeck.feed import Inbox

feed_app = typer.Typer(
    name="feed",
    help="Look into a feed's inbox.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
dead_letters_app = typer.Typer(
    help="Messages that were set aside: they kept failing, or took their process with them.", no_args_is_help=True
)
feed_app.add_typer(dead_letters_app, name="dead-letters")

_PATH = typer.Argument(metavar="PATH", help="The inbox's file, such as bot.db.", exists=True, dir_okay=False)
_NUMBERS = typer.Argument(metavar="NUMBER…", help="The numbers that `list` shows; unsent replies begin with 'out-'.")
_JSON = typer.Option("--json", help="Machine-readable: one JSON object per line.")
_ALL = typer.Option("--all", help="All of them.")
_SHOWN_PAYLOAD = 60
_Answer = TypeVar("_Answer")


@dead_letters_app.command("list")
def list_dead_letters(
    path: Annotated[Path, _PATH],
    *,
    json: Annotated[bool, _JSON] = False,
    stream: Annotated[str | None, typer.Option(help="Only those of this stream, such as telegram:123456.")] = None,
) -> None:
    """List what was set aside, oldest first: received messages, then unsent replies."""
    letters = _with(path, lambda inbox: _all_letters(inbox, stream))
    if json:
        _print_json(letters)
        return
    if not letters:
        typer.echo("no dead letters")
        return
    fields = ("number", "stream", "id", "key", "attempts", "died_at", "error")
    rows = [[name.replace("_", " ") for name in fields]]
    rows += [
        [_one_line("-" if letter[field] is None else str(letter[field])) for field in fields] for letter in letters
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@dead_letters_app.command("show")
def show_dead_letter(
    path: Annotated[Path, _PATH],
    number: Annotated[str, typer.Argument(metavar="NUMBER")],
    *,
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Show one dead letter with its payload."""
    letters = [letter for letter in _with(path, _all_letters) if letter["number"] == number]
    if not letters:
        _refuse(path, [number])
    if json:
        _print_json(letters)
        return
    for name, value in letters[0].items():
        typer.echo(f"{name + ':':<11} {'-' if value is None else value}")


@dead_letters_app.command("retry")
def retry_dead_letters(
    path: Annotated[Path, _PATH],
    numbers: Annotated[list[str] | None, _NUMBERS] = None,
    *,
    everything: Annotated[bool, _ALL] = False,
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Let them be tried again, with all their attempts. A running bot notices within seconds."""
    from everdeck.feed.outbox import retry_unsent

    async def act(inbox: "Inbox", number: int, *, unsent: bool) -> bool:
        return await (retry_unsent(inbox, number) if unsent else inbox.retry_dead_letter(number))

    _act_on(path, numbers or [], act, "to be tried again", everything=everything, json=json)


@dead_letters_app.command("drop")
def drop_dead_letters(
    path: Annotated[Path, _PATH],
    numbers: Annotated[list[str] | None, _NUMBERS] = None,
    *,
    everything: Annotated[bool, _ALL] = False,
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Forget them for good."""
    from everdeck.feed.outbox import drop_unsent

    async def act(inbox: "Inbox", number: int, *, unsent: bool) -> bool:
        return await (drop_unsent(inbox, number) if unsent else inbox.drop_dead_letter(number))

    _act_on(path, numbers or [], act, "dropped", everything=everything, json=json)


# --- helpers, in the order they are called ---


def _with(path: Path, ask: "Callable[[Inbox], Awaitable[_Answer]]") -> _Answer:
    from everdeck.errors import FeedError
    from everdeck.feed import Inbox

    async def opened() -> _Answer:
        inbox = Inbox(path)
        await inbox.open(work=False)
        try:
            return await ask(inbox)
        finally:
            await inbox.close()

    try:
        return asyncio.run(opened())
    except FeedError as err:
        typer.echo(f"everdeck feed: {err}", err=True)
        raise typer.Exit(1) from err


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


def _act_on(
    path: Path, numbers: list[str], act: Callable[..., Awaitable[bool]], done: str, *, everything: bool, json: bool
) -> None:
    if bool(numbers) == everything:
        typer.echo("everdeck feed: give the numbers that `list` shows, or --all", err=True)
        raise typer.Exit(2)

    async def each(inbox: "Inbox") -> dict[str, bool]:
        wanted = [letter["number"] for letter in await _all_letters(inbox)] if everything else numbers
        found: dict[str, bool] = {}
        for number in wanted:
            digits = number.removeprefix("out-")
            found[number] = digits.isdecimal() and await act(inbox, int(digits), unsent=number.startswith("out-"))
        return found

    answers = _with(path, each)
    if json:
        _print_json([{"number": number, "done": answer} for number, answer in answers.items()])
    else:
        for number, answer in answers.items():
            if answer:
                typer.echo(f"{number}: {done}")
        if not answers:
            typer.echo("no dead letters")
    missing = [number for number, answer in answers.items() if not answer]
    if missing:
        _refuse(path, missing)


def _refuse(path: Path, numbers: list[str]) -> None:
    typer.echo(f"everdeck feed: no dead letter {', '.join(numbers)} in {path}", err=True)
    raise typer.Exit(1)


def _print_json(rows: list[dict[str, Any]]) -> None:
    import msgspec

    for row in rows:
        typer.echo(msgspec.json.encode(row).decode())


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _SHOWN_PAYLOAD else flat[: _SHOWN_PAYLOAD - 1] + "…"
