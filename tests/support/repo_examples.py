"""The examples in a Markdown page: what they are, and how they are run.

CONTRIBUTING.md ("Examples in the docs") tells writers the rules; this is their one implementation.
A page's examples run from top to bottom in one empty directory. Python blocks share one interpreter of their own,
console commands are run by bash, and a block with a file name is saved for both of them.
"""

import json
import os
import re
import select
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = {"python", "console"}
REFUSED = {"bash", "sh", "shell", "zsh", "py", "python3", "pycon"}
ANYTHING = "…"
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>\S.*?) -->")
_EXIT = re.compile(r"\s+# exit (?P<code>\d+)$")


@dataclass(frozen=True, slots=True)
class Example:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    file: str | None
    text: str
    not_run: str | None

    @property
    def where(self) -> str:
        """Page and line, as an editor opens it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """One ``$ command`` of a console block, with what it must print and how it must end."""

    line: int
    text: str
    expected: list[str]
    code: int


def examples_of(page: Path) -> list[Example]:
    """All fenced blocks of the page, in order."""
    found = []
    text = page.read_text()
    lines = text.splitlines()
    for token in MarkdownIt().parse(text):
        if token.type != "fence" or token.map is None:
            continue
        first, _, rest = token.info.strip().partition(" ")
        above = lines[token.map[0] - 1].strip() if token.map[0] else ""
        reason = _NOT_RUN.fullmatch(above)
        file = rest.strip() if "." in rest else None
        found.append(Example(page, token.map[0] + 1, first, file, token.content, reason["reason"] if reason else None))
    return found


def commands_of(example: Example) -> list[Command]:
    """The commands of a console block; a line that ends in a backslash is continued."""
    commands: list[Command] = []
    continued = False
    for number, line in enumerate(example.text.splitlines(), example.line + 1):
        if continued:
            last = commands[-1]
            commands[-1] = Command(last.line, f"{last.text}\n{line.removeprefix('> ')}", [], 0)
        elif line.startswith("$ "):
            commands.append(Command(number, line[2:], [], 0))
        else:
            assert commands, f"{example.where}: a console block starts with '$ command'"
            commands[-1].expected.append(line)
        continued = (continued or line.startswith("$ ")) and line.endswith("\\")
    return [_with_exit_code(command) for command in commands]


def _with_exit_code(command: Command) -> Command:
    code = _EXIT.search(command.text)
    if code is None:
        return command
    return Command(command.line, command.text[: code.start()], command.expected, int(code["code"]))


def matches(expected: list[str], printed: list[str]) -> bool:
    """Whether the printed lines are the expected ones; ``…`` stands for any text, alone on a line for any lines."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == ANYTHING else ".*?".join(map(re.escape, line.split(ANYTHING))) + r"[ \t]*\n"
        for line in expected
    )
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in printed)) is not None


class PageRun:
    """Runs the examples of one page in one directory; ``close`` ends the interpreter."""

    def __init__(self, directory: Path, seconds: float = 60) -> None:
        self.directory = directory
        self.seconds = seconds
        self._python: subprocess.Popen[str] | None = None

    def run(self, example: Example) -> None:
        """Run or save one example; an assertion says where it went wrong."""
        if example.file is not None:
            path = self.directory / example.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(example.text)
        elif example.language == "python":
            self._run_python(example)
        elif example.language == "console":
            for command in commands_of(example):
                self._run_command(example, command)

    def close(self) -> None:
        """Let the interpreter leave as at the end of a script; the caller ends what does not."""
        if self._python is not None:
            try:
                self._python.communicate(timeout=self.seconds)
            except subprocess.TimeoutExpired:
                self._python.kill()
                self._python.communicate()
                raise

    def _environment(self) -> dict[str, str]:
        scripts = sysconfig.get_path("scripts")
        passed = {name: value for name, value in os.environ.items() if name in {"LD_LIBRARY_PATH", "TZ"}}
        return passed | {
            "PATH": f"{scripts}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(self.directory),
            "TMPDIR": str(self.directory),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_COLOR": "1",
            "COLUMNS": "120",
            "PYTHONUNBUFFERED": "1",
        }

    def _run_command(self, example: Example, command: Command) -> None:
        # Files, not pipes: a daemon that a command leaves behind keeps its stdout, and must not keep us waiting.
        output = self.directory / ".printed"
        with output.open("w") as printed:
            ended = subprocess.run(
                ["bash", "-c", command.text],
                cwd=self.directory,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                timeout=self.seconds,
                check=False,
            )
        text = output.read_text(errors="replace")
        output.unlink()
        place = f"{example.page.relative_to(ROOT)}:{command.line}: $ {command.text}"
        assert ended.returncode == command.code, f"{place}\nexit {ended.returncode}, not {command.code}:\n{text}"
        if command.expected:
            assert matches(command.expected, text.splitlines()), f"{place}\nprinted:\n{text}"

    def _run_python(self, example: Example) -> None:
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, str(Path(__file__)), "interpreter"],
                cwd=self.directory,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        # compile() counts from line 1: the empty lines in front make a traceback name the page's own line.
        source = "\n" * example.line + example.text
        self._python.stdin.write(json.dumps({"page": str(example.page), "source": source}) + "\n")
        self._python.stdin.flush()
        answer = _answer(self._python.stdout, self.seconds)
        assert answer is not None, f"{example.where}: the interpreter ended with {self._python.wait(self.seconds)}"
        assert not answer["error"], f"{example.where}\n{answer['error']}\nprinted:\n{answer['printed']}"


def _answer(stream: IO[str], seconds: float) -> dict[str, str] | None:
    if not select.select([stream], [], [], seconds)[0]:
        return {"error": f"no end after {seconds} s", "printed": ""}
    line = stream.readline()
    answer: dict[str, str] | None = json.loads(line) if line else None
    return answer


# --- the interpreter's side: this file, run as a script ----------------------------------------------------------


def _interpret() -> None:
    import ast
    import asyncio
    import contextlib
    import inspect
    import io
    import traceback

    namespace: dict[str, object] = {"__name__": "__main__"}
    # What an example prints must not mix with our answers: they leave through a copy of stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for request in map(json.loads, _requests()):
        printed = io.StringIO()
        error = ""
        with contextlib.redirect_stdout(printed):
            try:
                flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                code = compile(request["source"], request["page"], "exec", flags=flags, dont_inherit=True)
                if code.co_flags & inspect.CO_COROUTINE:
                    asyncio.run(_awaited(code, namespace))
                else:
                    exec(code, namespace)  # noqa: S102 - running examples is what this is for
            except BaseException:  # noqa: BLE001 - whatever an example raises is its answer
                error = traceback.format_exc()
        answers.write(json.dumps({"error": error, "printed": printed.getvalue()}) + "\n")
        answers.flush()


def _requests() -> Iterator[str]:
    while line := sys.stdin.readline():
        yield line


async def _awaited(code: object, namespace: dict[str, object]) -> None:
    await eval(code, namespace)  # type: ignore[arg-type]  # noqa: S307 - as above: our own examples


if __name__ == "__main__":
    _interpret()
