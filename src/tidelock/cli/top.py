"""``tidelock top``: a live view in the terminal, on Textual."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidelock.cli import DONE, FAILED, USED_WRONGLY, output

if TYPE_CHECKING:
    from textual.app import App


def top_options(parser: ArgumentParser) -> None:
    """Options of top."""
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="how often to look (default 1)")
    parser.epilog = "keys: s stop, r restart, x reset, l log, / filter, c/m/n sort by cpu, memory, name, q quit"


def top(options: Namespace) -> int:
    """A live view of the deck: every worker with its cpu, memory and last words; act on the chosen one by a key."""
    if options.interval <= 0:
        print("tidelock top: --interval takes a number above 0", file=sys.stderr)
        return USED_WRONGLY
    if not sys.stdout.isatty():
        print("tidelock top needs a terminal; for scripts there is `tidelock ps --json`", file=sys.stderr)
        return USED_WRONGLY
    try:
        app = create_top(options.state, options.interval)
    except ModuleNotFoundError as error:
        print(f"tidelock: {error.name} is not installed; pip install 'tidelock[top]'", file=sys.stderr)
        return FAILED
    app.run()
    return DONE


def create_top(state: Path, interval_seconds: float) -> "App[None]":
    """The application; a function because Textual is loaded only here."""
    from textual.app import App, ComposeResult
    from textual.binding import Binding
    from textual.widgets import DataTable, Footer, Header, Input, RichLog

    from tidelock.cli.ps import look
    from tidelock.client import Client
    from tidelock.errors import TidelockError
    from tidelock.kernel import logreader

    class Top(App[None]):
        """The table, a filter and a log."""

        TITLE = "tidelock top"
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

        def __init__(self) -> None:
            super().__init__()
            self._sort = "name"
            self._filter = ""
            self._shown_log: tuple[str, list[str]] = ("", [])

        def compose(self) -> ComposeResult:
            yield Header()
            yield DataTable(cursor_type="row", zebra_stripes=True)
            yield RichLog(wrap=False, markup=False)
            yield Input(placeholder="part of a name")
            yield Footer()

        def on_mount(self) -> None:
            self.query_one(DataTable).add_columns("NAME", "STATE", "PID", "UPTIME", "CPU", "RSS", "RESTARTS")
            self.set_interval(interval_seconds, self.look)
            self.look()

        def look(self) -> None:
            try:
                seen = look(state)
            except TidelockError as error:
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
            lines = logreader.tail(state / "workers" / name / "log", lines=10)
            if self._shown_log == (name, lines):
                return
            self._shown_log = (name, lines)
            log = self.query_one(RichLog)
            log.clear()
            log.border_title = name
            for line in lines:
                log.write(line)

        def on_data_table_row_highlighted(self) -> None:
            self._show_log()

        def action_sort(self, key: str) -> None:
            self._sort = key
            self.look()

        def action_filter(self) -> None:
            field = self.query_one(Input)
            field.display = True
            field.focus()

        def on_input_submitted(self, event: Input.Submitted) -> None:
            self._filter = event.value
            event.input.display = False
            self.query_one(DataTable).focus()
            self.look()

        def action_act(self, verb: str) -> None:
            name = self._chosen()
            if name is not None:
                self.run_worker(lambda: self._act(verb, name), thread=True)

        def _act(self, verb: str, name: str) -> None:
            from tidelock.cli.act import on_one

            try:
                with Client(state) as client:
                    on_one(client, verb, name)
            except TidelockError as error:
                self.call_from_thread(self.notify, str(error), severity="error")
            else:
                self.call_from_thread(self.look)

    return Top()
