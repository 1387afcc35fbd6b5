"""What people can type, get or catch is documented, and what the docs link to is there.

Names are read from the code, never listed here: a new verb, state, event or error fails until a page in
``docs/reference`` shows it as code.
"""

import argparse
import importlib
import inspect
import itertools
import pkgutil
import re
from pathlib import Path

import msgspec
import pytest
from markdown_it import MarkdownIt

import everdeck
import everdeck.child
import everdeck.cli
import everdeck.cli.feed
import everdeck.errors
import everdeck.model
from support.repo_examples import PAGES, ROOT

REFERENCE = ROOT / "docs" / "reference"


def code_in(*pages: Path) -> set[str]:
    """Every identifier-like word that these pages show as code, in a span or in a block; and each span as a whole."""
    words: set[str] = set()
    for page in pages:
        for token in MarkdownIt().enable("table").parse(page.read_text()):
            inline = [child.content for child in token.children or () if child.type == "code_inline"]
            for text in [token.content, *inline] if token.type == "fence" else inline:
                words.update(re.findall(r"[A-Za-z_][\w-]*", text))
            words.update(inline)  # a value of several words is shown as a whole
    return words


def public_names(module: str) -> list[str]:
    """The names of a module that has an ``__all__``; a module without one publishes nothing."""
    return [name for name in getattr(importlib.import_module(module), "__all__", ()) if not name.startswith("__")]


def public_modules() -> list[str]:
    """The modules that users import by name."""
    known = {module.name for module in pkgutil.walk_packages(everdeck.__path__, "everdeck.")}
    wanted = ("everdeck.child", "everdeck.client", "everdeck.testing", "everdeck.satellites", "everdeck.feed")
    return ["everdeck", *(module for module in wanted if module in known)]


def missing(names: list[str], *pages: Path) -> list[str]:
    """The names that no page shows as code."""
    documented = code_in(*pages)
    return [name for name in names if name not in documented]


@pytest.mark.parametrize("module", public_modules())
def test_public_names_are_documented(module: str) -> None:
    """Each name in a public module's ``__all__`` appears in the reference."""
    assert not missing(public_names(module), *REFERENCE.rglob("*.md"))


@pytest.mark.parametrize("deck", ["Deck", "AsyncDeck"])
def test_the_verbs_of_the_deck_are_documented(deck: str) -> None:
    """Each public method and property of both decks appears in the library reference."""
    members = [name for name, _ in inspect.getmembers(getattr(everdeck, deck)) if not name.startswith("_")]

    assert not missing(members, REFERENCE / "library.md")


@pytest.mark.parametrize(
    "value",
    ["WorkerSpec", "Restart", "Stop", "Log", "Limits", "Health", "Secret", "WorkerStatus", "Event"],
)
def test_the_fields_of_the_values_are_documented(value: str) -> None:
    """Each field of each value appears in the reference of specs and of states."""
    fields = [field.name for field in msgspec.structs.fields(getattr(everdeck.model, value))]

    assert not missing(fields, REFERENCE / "spec.md", REFERENCE / "events-and-states.md")


def test_states_and_events_are_documented() -> None:
    """Each state, event kind and containment strength appears in its reference page."""
    kinds = [str(member) for kind in (everdeck.model.State, everdeck.model.EventKind) for member in kind]
    strengths = [str(member) for member in everdeck.model.Containment]

    assert not missing(kinds + strengths, REFERENCE / "events-and-states.md")


def test_errors_are_documented_with_the_sentence_of_their_docstring() -> None:
    """The error reference shows each class, and the tree in ``errors.py`` shows each one too."""
    classes = [
        name
        for name, member in inspect.getmembers(everdeck.errors, inspect.isclass)
        if issubclass(member, everdeck.errors.EverdeckError)
    ]
    tree = everdeck.errors.__doc__ or ""

    assert not missing(classes, REFERENCE / "errors.md")
    assert not [name for name in classes if name not in tree]


def test_the_environment_of_a_worker_is_documented() -> None:
    """Each variable that we write into a worker appears in the library or spec reference."""
    names = [value for name, value in vars(everdeck.child).items() if name.endswith("_ENV") and isinstance(value, str)]

    assert names
    assert not missing(names, *REFERENCE.rglob("*.md"))


def test_the_verbs_of_the_command_line_are_documented() -> None:
    """Each verb has its heading in the reference, and each of its options is shown there."""
    page = (REFERENCE / "cli.md").read_text()
    titles = " ".join(line for line in page.splitlines() if line.startswith("#"))

    undocumented = [verb for verb in everdeck.cli.VERBS if not re.search(rf"(?<![\w-]){verb}(?![\w-])", titles)]
    undocumented += [
        f"{verb} {option}"
        for verb in everdeck.cli.VERBS
        for action in everdeck.cli.parser_of(verb)._actions
        if action.help is not argparse.SUPPRESS
        for option in action.option_strings[-1:]
        if option not in page
    ]
    assert not undocumented


def test_the_verbs_within_the_feed_are_documented() -> None:
    """``everdeck feed`` has verbs within it; they and their options appear in the reference."""
    reference = " ".join(page.read_text() for page in REFERENCE.rglob("*.md"))

    assert not [word for word in _words_of(everdeck.cli.parser_of("feed")) if word not in reference]


def _words_of(parser: argparse.ArgumentParser) -> list[str]:
    """The verbs and long options of a parser and of those below it."""
    words: list[str] = []
    for action in parser._actions:
        words += [option for option in action.option_strings if option.startswith("--")]
        if isinstance(action.choices, dict):
            for name, inner in action.choices.items():
                words += [name, *_words_of(inner)]
    return words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """A relative link or image names a file of the repository, and its anchor a heading there."""
    broken = []
    for target in _link_targets(page):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in _anchors(there)):
            broken.append(target)
    assert not broken


def _link_targets(page: Path) -> list[str]:
    tokens = MarkdownIt().enable("table").parse(page.read_text())
    targets = [
        str(child.attrs.get("href") or child.attrs.get("src"))
        for token in tokens
        for child in token.children or ()
        if child.type in {"link_open", "image"}
    ]
    html = "".join(t.content for token in tokens for t in (token, *(token.children or ())) if t.type.startswith("html"))
    return targets + re.findall(r'(?:src|href|srcset)="([^"]+)"', html)


def _anchors(page: Path) -> set[str]:
    tokens = MarkdownIt().parse(page.read_text())
    titles = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).replace(" ", "-") for title in titles}


def test_every_page_is_reached_from_the_index() -> None:
    """docs/index.md leads to every page, so none is written and then forgotten."""
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in _link_targets(index)}

    assert not [str(page.relative_to(ROOT)) for page in PAGES if page.parent != ROOT and page not in {*linked, index}]
