"""Compiles the C programs when a source is newer than its program. Static, so that a start costs no dynamic linking."""

import subprocess

from bench.places import BIN, NATIVE

_PROGRAMS = ("stamp", "nest", "spawnloop")


def build_programs() -> None:
    """Make ``bench/work/bin`` hold current builds of every C program."""
    BIN.mkdir(parents=True, exist_ok=True)
    header_changed_at = (NATIVE / "board.h").stat().st_mtime
    for name in _PROGRAMS:
        source, program = NATIVE / f"{name}.c", BIN / name
        changed_at = max(source.stat().st_mtime, header_changed_at)
        if program.exists() and program.stat().st_mtime >= changed_at:
            continue
        # Built beside and renamed: a running copy is never overwritten (ETXTBSY), and two builders do not meet.
        fresh = program.with_suffix(".new")
        command = ["cc", "-O2", "-Wall", "-Wextra", "-static", "-o", str(fresh), str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        fresh.replace(program)
