"""Every example in the README and the docs is run, as the reader would run it."""

import codeop
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.repo_examples import PAGES, REFUSED, ROOT, RUNNABLE, Example, PageRun, examples_of, matches
from support.repo_processes import end_all_under

NOT_RUN_LIMIT = 12


@pytest.fixture
def page_run(tmp_path: Path) -> Iterator[PageRun]:
    """An empty directory with an interpreter; whatever still runs there afterwards is ended."""
    run = PageRun(tmp_path)
    try:
        yield run
    finally:
        try:
            run.close()
        finally:
            end_all_under(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_work(page: Path, page_run: PageRun) -> None:
    """Each Python block runs, each command ends and prints as the page says."""
    for example in examples_of(page):
        if example.not_run is None:
            page_run.run(example)


def test_every_block_says_what_it_is() -> None:
    """A block has a language, and shell commands are written as ``console`` so that they can be run."""
    blocks = [example for page in PAGES for example in examples_of(page)]

    nameless = [block.where for block in blocks if not block.language]
    shell = [block.where for block in blocks if block.language in REFUSED and not (block.file or block.not_run)]

    assert not nameless, f"blocks without a language: {nameless}"
    assert not shell, f"write these as ```python or ```console, or give them a file name: {shell}"


TUTORIALS = [page for page in PAGES if page.parent.name == "tutorial"]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_pastes_into_an_interpreter(page: Path) -> None:
    """Line by line, as the prompt reads it: a block that is not ended by an empty line is a mistake there."""
    for block in examples_of(page):
        if block.language != "python" or block.file is not None:
            continue
        compiled, typed = codeop.CommandCompiler(), list[str]()
        for line in [*block.text.splitlines(), ""]:
            typed.append(line)
            if not any(typed) or compiled("\n".join(typed), block.where, "single") is not None:
                typed.clear()
        assert not typed, f"{block.where}: the prompt waits for more after {typed}"


def test_few_examples_are_not_run() -> None:
    """``<!-- not run: reason -->`` is for what a test machine cannot do, and stays rare."""
    left_out = [
        f"{block.where}: {block.not_run}"
        for page in PAGES
        for block in examples_of(page)
        if block.not_run is not None and block.language in RUNNABLE
    ]

    print(*left_out, sep="\n")
    assert len(left_out) <= NOT_RUN_LIMIT, "\n".join(left_out)


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        (["alice  running"], ["alice  running"], True),
        (["alice  …ing  …"], ["alice  running  12 s"], True),
        (["…", "bob"], ["alice", "carol", "bob"], True),
        (["alice", "…"], ["alice"], True),
        (["alice"], ["alice", "bob"], False),
        (["a.c"], ["abc"], False),
    ],
)
def test_expected_output_is_compared_with_wildcards(expected: list[str], printed: list[str], same: bool) -> None:
    """``…`` stands for any text in a line, and alone on a line for any number of lines."""
    assert matches(expected, printed) is same


def test_an_example_that_is_wrong_is_found(page_run: PageRun) -> None:
    """The runner itself fails on a wrong value, a wrong exit code and a wrong output."""

    def example(language: str, text: str) -> Example:
        return Example(ROOT / "README.md", 1, language, None, text, None)

    page_run.run(example("python", "import asyncio\nx = 1\nawait asyncio.sleep(0)\nprint('printed')\n"))
    page_run.run(example("python", "assert x == 1\n"))
    with pytest.raises(AssertionError, match=r"README\.md:1"):
        page_run.run(example("python", "assert x == 2\n"))
    with pytest.raises(AssertionError, match="exit 7, not 0"):
        page_run.run(example("console", "$ exit 7\n"))
    with pytest.raises(AssertionError, match="printed"):
        page_run.run(example("console", "$ echo a\nb\n"))
    page_run.run(example("console", "$ exit 7  # exit 7\n$ echo \\\n  a\na\n"))
