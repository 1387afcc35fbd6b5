"""What rotation costs the writer: its speed with Everdeck rotating, divided by its speed into a plain file.

``python bench/logs/rotation_ratio.py [--megabytes 200] [--rounds 5]``

One writer in C (numbered lines of 100 bytes, one write each; or blocks of 64,000 bytes), and the keeper of logs in
a process of its own, as in a deck. Plain and rotated runs alternate, so that a change of the machine's mood hits both;
the ratio is taken within each pair, and the median of the pairs is the result. On a machine that is busy with other
things use ``--together``: both writers run at the same time, so that both get the same share of it.
After each rotated run every line is looked for.
Supervisor, circus and pm2 are measured beside it by ``python -m bench --only logs``.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from everdeck.logs import files as logfiles
from everdeck.logs import reader as logreader
from everdeck.logs.keeper import LogKeeper
from everdeck.model import Log

_WRITER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
int main(int argc, char **argv) {
    (void)argc;
    long lines = atol(argv[1]), per_write = atol(argv[2]);
    char *block = malloc(per_write * 100 + 1);
    struct timespec begin, end;
    memset(block, '.', per_write * 100);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (long at = 0; at < lines; at += per_write) {
        for (long i = 0; i < per_write; i++) {
            char number[16];
            snprintf(number, sizeof number, "%012ld ", at + i);
            memcpy(block + i * 100, number, 13);
            block[i * 100 + 99] = '\n';
        }
        for (long done = 0; done < per_write * 100;) {
            long wrote = write(1, block + done, per_write * 100 - done);
            if (wrote <= 0) return 1;
            done += wrote;
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    dprintf(2, "%.6f\n", (end.tv_sec - begin.tv_sec) + (end.tv_nsec - begin.tv_nsec) / 1e9);
    return 0;
}
"""


def main() -> None:
    """Measure, or be the keeper of one log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--together", action="store_true", help="both writers at the same time (a busy machine)")
    parser.add_argument("--place", type=Path, help="a directory on the filesystem to measure")
    parser.add_argument("--keep-log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compress", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.keep_log is not None:
        asyncio.run(_keep(asked.keep_log, compress=asked.compress))
        return
    place = Path(tempfile.mkdtemp(prefix="everdeck-bench-logs-", dir=asked.place))
    try:
        (place / "writer.c").write_text(_WRITER)
        subprocess.run(["cc", "-O2", "-o", place / "writer", place / "writer.c"], check=True)
        lines = asked.megabytes * 10_000 // 640 * 640
        print(
            f"{'writes of':>12}  {'archives':>10}  {'plain MB/s':>10}  {'rotated MB/s':>12}  {'ratio':>6}  keeper CPU s"
        )
        for per_write in (1, 640):
            for compress in (False, True):
                print(_row(place, lines, per_write, asked, compress=compress), flush=True)
    finally:
        shutil.rmtree(place)


def _row(place: Path, lines: int, per_write: int, asked: argparse.Namespace, *, compress: bool) -> str:
    pairs = []
    cpu = 0.0
    with ThreadPoolExecutor(1) as beside:
        for _ in range(asked.rounds):
            plain = beside.submit(_plain, place, lines, per_write)
            if not asked.together:
                plain.result()
            rotated, cpu = _rotated(place, lines, per_write, compress=compress)
            pairs.append((plain.result(), rotated))
    megabytes = lines / 10_000
    ratio = statistics.median(plain / rotated for plain, rotated in pairs)
    plain_speed, rotated_speed = (megabytes / statistics.median(times) for times in zip(*pairs, strict=True))
    kind = "gzip" if compress else "plain"
    return (
        f"{per_write * 100:>10} B  {kind:>10}  {plain_speed:>10.0f}  {rotated_speed:>12.0f}  {ratio:>6.3f}  {cpu:.2f}"
    )


def _plain(place: Path, lines: int, per_write: int) -> float:
    path = place / "plain"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        return _write(place, fd, lines, per_write)
    finally:
        os.close(fd)
        path.unlink()
        os.sync()


def _rotated(place: Path, lines: int, per_write: int, *, compress: bool) -> tuple[float, float]:
    log_dir = place / "log"
    fd, _ = logfiles.open_for_worker(log_dir, split_stderr=False)
    keeper = subprocess.Popen(
        [sys.executable, __file__, "--keep-log", log_dir, *(["--compress"] if compress else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None  # noqa: S101 - it was asked for above
    keeper.stdout.readline()
    try:
        seconds = _write(place, fd, lines, per_write)
    finally:
        os.close(fd)
        said, _ = keeper.communicate()
    _check(log_dir, lines)
    shutil.rmtree(log_dir)
    os.sync()
    return seconds, json.loads(said.splitlines()[-1])["cpu_seconds"]


def _write(place: Path, fd: int, lines: int, per_write: int) -> float:
    done = subprocess.run(
        [place / "writer", str(lines), str(per_write)], stdout=fd, stderr=subprocess.PIPE, text=True, check=True
    )
    return float(done.stderr)


def _check(log_dir: Path, lines: int) -> None:
    expected = 0
    rest = b""
    for block in logreader.raw(log_dir):
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            if int(line[:12]) != expected:
                raise SystemExit(f"line {expected} is missing: found {line[:20]!r}")
            expected += 1
    if expected != lines:
        raise SystemExit(f"{expected} of {lines} lines")


async def _keep(log_dir: Path, *, compress: bool) -> None:
    keeper = LogKeeper(lambda _name, _detail: None)
    keeper.open()
    keeper.watch("w", log_dir, Log(max_bytes=10_000_000, keep=1000, compress=compress))
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, gone.set)
    before = os.times()
    print("ready", flush=True)
    await gone.wait()
    after = os.times()
    keeper.close()
    print(json.dumps({"cpu_seconds": after.user + after.system - before.user - before.system}))


if __name__ == "__main__":
    main()
