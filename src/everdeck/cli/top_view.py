"""The view of ``everdeck top``: a table of workers, a filter, and what the chosen one prints.

The letters are those of the page: s start, x stop, r restart, e reset, Delete remove, l log, / search. What stops,
resets or removes asks first. A module of its own because loading it loads Textual.
"""

from argparse import Namespace
from pathlib import Path
from typing import Final

from rich.text import Text
from textual.app import App, ComposeResult, ScreenStackError
from textual.binding import Binding
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Header, Input, Label, RichLog

from everdeck.cli import output
from everdeck.cli.act import on_one
from everdeck.cli.ps import look, note, totals
from everdeck.cli.reach import reached
from everdeck.errors import EverdeckError
from everdeck.logs import reader as logreader
from everdeck.model import WorkerStatus
from everdeck.statedir import StateDir

_QUESTIONS: Final = {
    "stop": "Stop {}? It stays stopped until it is started again.",
    "reset": "Reset {}? Its crashes are forgotten, and it is started if it should run.",
    "remove": "Remove {}? Its record, its log and its data are deleted. This cannot be undone.",
}
# What the other columns take, so that a long name cannot push them off a terminal of 80 columns.
_OTHER_COLUMNS: Final = 52
_LEAST_NAME: Final = 12
_MOST_NAME: Final = 40
_LOG_LINES: Final = 1000


class Top(App[None]):
    """The table, a filter and a log."""

    TITLE = "everdeck top"
    CSS = "DataTable { height: 1fr; } RichLog { height: 8; border-top: solid $primary; } Input { display: none; }"
    BINDINGS = [  # noqa: RUF012 - Textual declares it so
        Binding("s", "act('start')", "Start"),
        Binding("x", "act('stop')", "Stop"),
        Binding("r", "act('restart')", "Restart"),
        Binding("e", "act('reset')", "Reset"),
        Binding("delete", "act('remove')", "Remove", key_display="Del"),
        Binding("l", "log", "Log"),
        Binding("slash", "filter", "Search", key_display="/"),
        # Named in the help only: a footer of 80 columns holds the verbs.
        Binding("c", "sort('cpu_percent')", "by cpu", show=False),
        Binding("m", "sort('rss_bytes')", "by memory", show=False),
        Binding("n", "sort('name')", "by name", show=False),
        Binding("j", "cursor(1)", "next", show=False),
        Binding("k", "cursor(-1)", "previous", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, state: Path, interval_seconds: float) -> None:
        super().__init__()
        self._state_dir = state
        self._deck = Namespace(where=str(state), state=state)
        self._interval_seconds = interval_seconds
        self._looking = False
        self._sort = "name"
        self._filter = ""
        self._shown_log: tuple[str, list[str]] = ("", [])

    def compose(self) -> ComposeResult:
        """The widgets, top to bottom."""
        yield Header()
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield RichLog(wrap=False, markup=False)
        yield Input(placeholder="part of a name")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one(DataTable).add_columns("NAME", "STATE", "PID", "UP", "CPU", "RSS", "↻", "NOTE")
        self.set_interval(self._interval_seconds, self.look)
        self._looking = True
        self.look()

    def on_resize(self) -> None:
        """Another width: names may be longer or shorter. The first size comes before there is a table."""
        if self._looking:
            self.look()

    def look(self) -> None:
        """Read the deck once and show it."""
        try:
            seen = look(self._deck)
        except EverdeckError as error:
            self.sub_title = str(error)
            return
        workers = [worker for worker in seen.workers if self._filter in worker.name]
        supervision = f"owner {seen.owner_pid}" if seen.supervised else "NOT SUPERVISED"
        shown = f"{len(workers)} of {len(seen.workers)} shown" if self._filter else totals(seen.workers)
        self.sub_title = f"{supervision}, {shown}"
        table = self._table()
        if table is None or isinstance(self.screen, Question | FullLog):
            return  # the table lies under it, and is looked at again when it is seen again
        self._fill(table, workers)
        self._show_log()

    def _table(self) -> "DataTable[Text] | None":
        """None while the screen is being taken down: a key or a tick may still come then."""
        try:
            return self.query(DataTable).first()
        except (NoMatches, ScreenStackError):
            return None

    def _fill(self, table: "DataTable[Text]", workers: list[WorkerStatus]) -> None:
        chosen = self._chosen()
        scroll = table.scroll_y
        by_number = self._sort != "name"
        workers.sort(key=lambda worker: getattr(worker, self._sort) or (0 if by_number else ""), reverse=by_number)
        width = min(_MOST_NAME, max(_LEAST_NAME, self.size.width - _OTHER_COLUMNS))
        table.clear()
        for worker in workers:
            cpu = worker.cpu_percent
            cells = (
                output.shortened(worker.name, width),
                worker.state,
                str(worker.pid or "-"),
                output.duration(worker.uptime_seconds),
                "-" if cpu is None else f"{cpu:.1f}%",
                output.size(worker.rss_bytes),
                str(worker.restarts),
                note(worker),
            )
            # A str would be read as markup, and the last one holds the worker's own words.
            table.add_row(*(Text(cell, no_wrap=True) for cell in cells), key=worker.name)
        names = [worker.name for worker in workers]
        if chosen in names:
            table.move_cursor(row=names.index(chosen), scroll=False)
        table.scroll_y = scroll

    def _chosen(self) -> str | None:
        table = self._table()
        if table is None or table.row_count == 0:
            return None
        return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value

    def _show_log(self) -> None:
        name = self._chosen()
        if name is None:
            return
        lines = logreader.tail(StateDir(self._state_dir).worker(name).log, lines=10)
        if self._shown_log == (name, lines):
            return
        self._shown_log = (name, lines)
        log = self.query_one(RichLog)
        log.clear()
        log.border_title = name
        for line in lines:
            log.write(line)

    def on_data_table_row_highlighted(self) -> None:
        """Another worker was chosen."""
        self._show_log()

    def action_sort(self, key: str) -> None:
        """Sort by another column."""
        self._sort = key
        self.look()

    def action_cursor(self, step: int) -> None:
        """The next or the previous worker."""
        if (table := self._table()) is not None:
            table.move_cursor(row=table.cursor_row + step)

    def action_filter(self) -> None:
        """Ask for part of a name."""
        field = self.query_one(Input)
        field.display = True
        field.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Show only names that contain it."""
        self._filter = event.value
        event.input.display = False
        self.query_one(DataTable).focus()
        self.look()

    def action_log(self) -> None:
        """The chosen worker's log on the whole screen."""
        if (name := self._chosen()) is not None:
            self.push_screen(FullLog(name, StateDir(self._state_dir).worker(name).log, self._interval_seconds))

    def action_act(self, verb: str) -> None:
        """Act on the chosen worker, in a thread: a stop may take its grace. What hurts is asked first."""
        name = self._chosen()
        if name is None:
            return
        question = _QUESTIONS.get(verb)
        if question is None:
            self._begin(verb, name)
        else:
            self.push_screen(Question(question.format(name)), lambda yes: self._begin(verb, name) if yes else None)

    def _begin(self, verb: str, name: str) -> None:
        self.run_worker(lambda: self._act(verb, name), thread=True)

    def _act(self, verb: str, name: str) -> None:
        try:
            with reached(self._deck) as deck:
                on_one(deck, verb, name)
        except EverdeckError as error:
            self.call_from_thread(self.notify, str(error), severity="error", markup=False)
        else:
            self.call_from_thread(self.look)


class Question(ModalScreen[bool]):
    """Yes or no; anything that is not yes is no."""

    CSS = "Question { align: center middle; } Vertical { width: 60; height: auto; padding: 1 2; background: $panel; }"
    BINDINGS = [  # noqa: RUF012 - as above
        Binding("y,enter", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """The question, and which keys answer it."""
        with Vertical():
            yield Label(self._text, markup=False)
            yield Label("\ny yes    n no")

    def action_answer(self, yes: bool) -> None:
        """Hand the answer back."""
        self.dismiss(yes)


class FullLog(Screen[None]):
    """One worker's log on the whole screen, as it grows."""

    CSS = "FullLog RichLog { height: 1fr; border: none; }"
    BINDINGS = [Binding("l,escape,q", "leave", "Back")]  # noqa: RUF012 - as above

    def __init__(self, name: str, log_dir: Path, interval_seconds: float) -> None:
        super().__init__()
        self._name = name
        self._log_dir = log_dir
        self._interval_seconds = interval_seconds
        self._shown: list[str] = []

    def compose(self) -> ComposeResult:
        """The name and the log."""
        yield Header()
        yield RichLog(wrap=True, markup=False, max_lines=_LOG_LINES)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to look."""
        self.title = self._name
        self.set_interval(self._interval_seconds, self.look)
        self.look()

    def look(self) -> None:
        """Show the last lines again if there are new ones; whoever scrolled up stays there."""
        lines = logreader.tail(self._log_dir, lines=_LOG_LINES)
        if lines == self._shown:
            return
        self._shown = lines
        log = self.query_one(RichLog)
        follows = log.is_vertical_scroll_end
        log.clear()
        for line in lines:
            log.write(line, scroll_end=follows)

    def action_leave(self) -> None:
        """Back to the table."""
        self.dismiss()
