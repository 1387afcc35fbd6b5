"""A worker that writes numbered lines: in C where there is a compiler, because Python writes them more slowly."""

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

LINE_BYTES = 100
_IN_PYTHON = """
import os, sys
count, part = int(sys.argv[1]), int(sys.argv[2])
for number in range(count):
    if number and number % part == 0:
        assert os.read(0, 1)
    os.write(1, b"%012d %s\\n" % (number, b"." * 86))
"""


def writer_command(build_dir: Path, count: int, part: int | None = None) -> list[str]:
    """The command line of a writer of ``count`` lines; after every ``part`` of them it waits for a byte on stdin."""
    how_many = [str(count), str(part or count)]
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return [sys.executable, "-c", _IN_PYTHON, *how_many]
    program = build_dir / "logs_writer"
    if not program.exists():
        source = Path(__file__).with_name("logs_writer.c")
        subprocess.run([compiler, "-O2", "-o", str(program), str(source)], check=True)
    return [str(program), *how_many]


def numbered(first: int, count: int) -> bytes:
    """The same lines, as bytes."""
    return b"".join(b"%012d %s\n" % (number, b"." * 86) for number in range(first, first + count))


def assert_numbered(blocks: Iterable[bytes], count: int) -> None:
    """Every line from 0 to ``count``, each exactly once, in order, and nothing else."""
    expected = 0
    rest = b""
    step = 5000
    for block in blocks:
        rest += block
        while len(rest) >= step * LINE_BYTES:
            chunk, rest = rest[: step * LINE_BYTES], rest[step * LINE_BYTES :]
            if chunk != numbered(expected, step):
                _complain(chunk, expected)
            expected += step
    lines = len(rest) // LINE_BYTES
    if rest != numbered(expected, lines):
        _complain(rest, expected)
    assert expected + lines == count, f"{expected + lines} of {count} lines"


def _complain(chunk: bytes, expected: int) -> None:
    for line in chunk.split(b"\n"):
        assert line == numbered(expected, 1)[:-1], f"expected line {expected}, found {line[:60]!r}"
        expected += 1
