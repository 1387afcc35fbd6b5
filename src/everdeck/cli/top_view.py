"""The view of ``everdeck top``: a table of workers, a filter, and the last words of the chosen one.

A module of its own because loading it loads Textual.
"""

from pathlib import Path
from typing import Any

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.widgets import DataTable, Footer, Header, Input, RichLog

from everdeck.cli import output
from everdeck.cli.act import on_one
from everdeck.cli.ps import look
from everdeck.client import Client
from everdeck.errors import EverdeckError
from everdeck.logs import reader as logreader
from everdeck.statedir import StateDir


class Top(App[None]):
    """The table, a filter and a log."""

    TITLE = "everdeck top"
    CSS = "DataTable { height: 1fr; } RichLog { height: 12; border-top: solid $primary; } Input { display: none; }"
    BINDINGS = [  # noqa: RUF012 - Textual declares it so
        Binding("q", "quit", "Quit"),
        Binding("s", "act('stop')", "Stop"),
        Binding("r", "act('restart')", "Restart"),
        Binding("x", "act('reset')", "Reset"),
        Binding("a", "act('start')", "Start"),
        Binding("slash", "filter", "Filter"),
        Binding("c", "sort('cpu_percent')", "by cpu"),
        Binding("m", "sort('rss_bytes')", "by memory"),
        Binding("n", "sort('name')", "by name"),
    ]

    def __init__(self, state: Path, interval_seconds: float) -> None:
        super().__init__()
        self._state_dir = state
        self._interval_seconds = interval_seconds
        self._sort = "name"
        self._filter = ""
        self._shown_log: tuple[str, list[str]] = ("", [])

    def compose(self) -> ComposeResult:
        """The widgets, top to bottom."""
        yield Header()
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield RichLog(wrap=False, markup=False)
        yield Input(placeholder="part of a name")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.query_one(DataTable).add_columns("NAME", "STATE", "PID", "UPTIME", "CPU", "RSS", "RESTARTS")
        self.set_interval(self._interval_seconds, self.look)
        self.look()

    def look(self) -> None:
        """Read the deck once and show it."""
        try:
            seen = look(self._state_dir)
        except EverdeckError as error:
            self.sub_title = str(error)
            return
        workers = [worker for worker in seen["workers"] if self._filter in worker["name"]]
        running = sum(worker["state"] == "running" for worker in workers)
        supervision = f"owner {seen['owner_pid']}" if seen["supervised"] else "NOT SUPERVISED"
        self.sub_title = f"{supervision}, {running} of {len(workers)} running"
        self._fill(workers)
        self._show_log()

    def _fill(self, workers: list[dict[str, Any]]) -> None:
        table = self.query_one(DataTable)
        chosen = self._chosen()
        scroll = table.scroll_y
        by_number = self._sort != "name"
        workers.sort(key=lambda worker: worker[self._sort] or (0 if by_number else ""), reverse=by_number)
        table.clear()
        for worker in workers:
            cpu = worker["cpu_percent"]
            table.add_row(
                worker["name"],
                worker["state"],
                str(worker["pid"] or "-"),
                output.duration(worker["uptime_seconds"]),
                "-" if cpu is None else f"{cpu:.1f}%",
                output.size(worker["rss_bytes"]),
                str(worker["restarts"]),
                key=worker["name"],
            )
        names = [worker["name"] for worker in workers]
        if chosen in names:
            table.move_cursor(row=names.index(chosen), scroll=False)
        table.scroll_y = scroll

    def _chosen(self) -> str | None:
        table = self.query_one(DataTable)
        if table.row_count == 0:
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

    def action_act(self, verb: str) -> None:
        """Act on the chosen worker, in a thread: a stop may take its grace."""
        name = self._chosen()
        if name is not None:
            self.run_worker(lambda: self._act(verb, name), thread=True)

    def _act(self, verb: str, name: str) -> None:

        try:
            with Client(self._state_dir) as client:
                on_one(client, verb, name)
        except EverdeckError as error:
            self.call_from_thread(self.notify, str(error), severity="error")
        else:
            self.call_from_thread(self.look)
