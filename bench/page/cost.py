"""What one open page costs the daemon: CPU time and memory, at rest and while fifty events a second happen.

``python bench/page/cost.py [--workers 2000] [--seconds 20] [--pages 0 1 2 4]``

Real Chromium pages, each in a profile of its own, look at a real daemon (tests/support/dash_crowd.py: real deck, API
and streams over a registry with many workers). For each number of pages the daemon's CPU time is read from
/proc/PID/stat before and after a quiet and a busy stretch, its memory from /proc/PID/smaps_rollup; what one page
costs is the slope between no page and the most pages. Prints a table, and the numbers as JSON on the last line.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

CROWD = Path(__file__).parents[2] / "tests" / "support" / "dash_crowd.py"
PORT = 8793
TICKS = os.sysconf("SC_CLK_TCK")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2000)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--pages", type=int, nargs="+", default=[0, 1, 2, 4])
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no chromium on this machine (apt-get install chromium)")
    rows = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        for pages in options.pages:
            with _daemon(options.workers) as (process, token):
                rows.append(_measure(browser, process, token, pages, options.seconds))
        browser.close()
    _print(rows, options.workers)


@contextmanager
def _daemon(workers: int) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    folder = Path(tempfile.mkdtemp(prefix="everdeck-page-"))
    command = [sys.executable, str(CROWD), str(folder / "state"), str(PORT), str(workers)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None  # noqa: S101 - asked for above
        said = process.stdout.readline().split()
        if said[:1] != ["ready"]:
            raise SystemExit(f"the daemon did not come up: {said}")
        yield process, said[1]
    finally:
        process.communicate(timeout=60)
        shutil.rmtree(folder)


def _measure(
    browser: Browser, process: "subprocess.Popen[str]", token: str, pages: int, seconds: int
) -> dict[str, Any]:
    contexts = []
    for _ in range(pages):
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{PORT}/login?token={token}")
        page.locator('.pill[data-standing="live"]').wait_for()
        contexts.append(context)
    quiet = _cpu_percent(process.pid, seconds, lambda: time.sleep(seconds))
    # Per granted second of events: on a busy machine such a second may take longer than one of the clock's.
    busy = _cpu_percent(process.pid, seconds, lambda: _change(process, seconds))
    memory = _pss_bytes(process.pid)
    for context in contexts:
        context.close()
    return {"pages": pages, "quiet_cpu_percent": quiet, "busy_cpu_percent": busy, "pss_bytes": memory}


def _cpu_percent(pid: int, seconds: int, work: Callable[[], None]) -> float:
    before = _cpu_seconds(pid)
    work()
    return 100 * (_cpu_seconds(pid) - before) / seconds


def _change(process: "subprocess.Popen[str]", seconds: int) -> None:
    assert process.stdin is not None  # noqa: S101 - asked for when it was started
    assert process.stdout is not None  # noqa: S101 - as above
    process.stdin.write("." * seconds)
    process.stdin.flush()
    for _ in range(seconds):
        process.stdout.readline()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no Pss in smaps_rollup")


def _print(rows: list[dict[str, Any]], workers: int) -> None:
    print(f"{workers} workers; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| open pages | CPU at rest | CPU at 50 events/s | PSS |")
    print("|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['pages']} | {row['quiet_cpu_percent']:.1f} % | {row['busy_cpu_percent']:.1f} % "
            f"| {row['pss_bytes'] / 1e6:.1f} MB |"
        )
    first, last = rows[0], rows[-1]
    more = max(1, last["pages"] - first["pages"])
    each = {key: (last[key] - first[key]) / more for key in ("quiet_cpu_percent", "busy_cpu_percent", "pss_bytes")}
    print(
        f"| each page | {each['quiet_cpu_percent']:.1f} % | {each['busy_cpu_percent']:.1f} % "
        f"| {each['pss_bytes'] / 1e6:.1f} MB |"
    )
    print(json.dumps({"workers": workers, "rows": rows, "each_page": each}))


if __name__ == "__main__":
    main()
