"""``everdeck top`` in a terminal of 80 columns, driven key by key."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cli_daemon import Person

pytest.importorskip("textual", reason="textual is not installed (extra top)")
from textual.pilot import Pilot
from textual.widgets import DataTable, RichLog

from everdeck.cli.top_view import Top
from support.waiting import eventually

HOSTILE = "[@click=app.quit]x[/no such]\x1b]0;owned\x07\x9b31m\u202egnp"
LONG = "customer-" + "x" * 100 + "-17"


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    """A deck with a worker that has a long name, and one that talks."""
    person = Person(tmp_path_factory.mktemp("top") / "state")
    try:
        person.up()
        person.types("start", LONG, "--", "sleep", "1000")
        person.types("start", "talks", "--", "sh", "-c", "seq 40; exec sleep 1000")
        person.types("start", "bad", "--max-crashes", "0", "--", "false")
        yield person
    finally:
        person.leaves()


def _drive(state: Path, steps: Callable[[Top, Pilot[None]], Awaitable[None]]) -> None:
    async def driven() -> None:
        top = Top(state, 0.1)
        async with top.run_test(size=(80, 24)) as pilot:
            await eventually(lambda: top.query_one(DataTable).row_count == 3)
            await steps(top, pilot)

    asyncio.run(driven())


def _row(top: Top, name: str) -> list[str]:
    return [str(cell) for cell in top.query_one(DataTable).get_row(name)]


def test_a_long_name_leaves_room_for_the_rest(person: Person) -> None:
    """State, pid and the note are within 80 columns; the footer holds every verb; a search says how many it shows."""

    async def steps(top: Top, pilot: Pilot[None]) -> None:
        assert "…" in _row(top, LONG)[0]
        assert _row(top, LONG)[1] == "running"
        table = top.query_one(DataTable)
        before_note = sum(column.get_render_width(table) for column in list(table.columns.values())[:-1])
        assert before_note < 70
        await eventually(lambda: "everdeck reset bad" in _row(top, "bad")[-1])
        keys = [binding.description for binding in top.BINDINGS if binding.show]
        assert sum(len(key) + 4 for key in keys) <= 80
        await pilot.press("slash", *"talk", "enter")
        await eventually(lambda: "1 of 3 shown" in top.sub_title)

    _drive(person.state, steps)


def test_the_letters_of_the_page_and_a_question_before_what_hurts(person: Person) -> None:
    """X asks, n leaves it running, y stops it; s starts it again without a question."""

    async def steps(top: Top, pilot: Pilot[None]) -> None:
        names = [row.value for row in top.query_one(DataTable).rows]
        for _ in range(names.index("talks")):
            await pilot.press("j")
        await pilot.press("x", "n")
        for key in ("e", "delete"):
            await pilot.press(key)
            assert len(top.screen_stack) == 2
            await pilot.press("escape")
        assert _row(top, "talks")[1] == "running"
        await pilot.press("x", "y")
        await eventually(lambda: _row(top, "talks")[1] == "stopped")
        await pilot.press("s")
        await eventually(lambda: _row(top, "talks")[1] == "running")

    _drive(person.state, steps)


def test_a_key_that_comes_while_the_screen_is_taken_down_is_ignored(person: Person) -> None:
    """Textual still delivers what was on its way when the table is gone."""

    async def steps(top: Top, pilot: Pilot[None]) -> None:
        await top.query_one(DataTable).remove()
        top.look()
        await pilot.press("j", "l", "r")
        assert len(top.screen_stack) == 1
        top._screen_stack.clear()
        top.look()

    _drive(person.state, steps)


def test_the_log_on_the_whole_screen(person: Person) -> None:
    """More than the lines under the table, and back."""

    async def steps(top: Top, pilot: Pilot[None]) -> None:
        names = [row.value for row in top.query_one(DataTable).rows]
        for _ in range(names.index("talks")):
            await pilot.press("j")
        await pilot.press("l")
        await eventually(lambda: len(top.screen_stack) == 2)
        await eventually(lambda: len(top.screen.query_one(RichLog).lines) >= 40)
        await pilot.press("escape")
        assert len(top.screen_stack) == 1

    _drive(person.state, steps)


def test_what_a_worker_says_is_shown_as_it_is_written(person: Person) -> None:
    """Markup that would be a link to one of our own actions, or none at all; escapes and marks that turn text."""
    code = f"from everdeck.child import notify; notify(STATUS={HOSTILE!r}); print({HOSTILE!r}, flush=True)"
    person.types("start", "talks", "--replace", "--", sys.executable, "-c", f"{code}; import time; time.sleep(1000)")

    async def steps(top: Top, pilot: Pilot[None]) -> None:
        await eventually(lambda: "[@click" in _row(top, "talks")[-1])
        await pilot.press("j", "j")
        await eventually(lambda: "[@click=app.quit]x[/no such]" in _shown(top))
        seen = _shown(top)
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(seen)
        assert not any("@click" in str(style) for strip in _strips(top) for _, style, _ in strip if style is not None)

    _drive(person.state, steps)


def _strips(top: Top) -> list[Any]:
    """What is on the screen, line by line, with its styles."""
    return top.screen._compositor.render_strips()


def _shown(top: Top) -> str:
    return "\n".join(strip.text for strip in _strips(top))
