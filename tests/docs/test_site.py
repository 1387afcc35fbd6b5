"""The documentation site builds without a warning, can be searched, and is ordered as documentation is."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it: a broken link, a page that nothing leads to or an unknown directive is an error."""
    pytest.importorskip("furo", reason="the docs group is not installed")
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(place / "cache")]
    built = subprocess.run(
        [*command, str(ROOT / "docs"), str(place / "html")], capture_output=True, text=True, timeout=110, check=False
    )
    assert built.returncode == 0, built.stderr
    return place / "html"


def test_it_has_navigation_and_search(site: Path) -> None:
    """Four kinds of pages, each page in the navigation, and an index that finds words."""
    front = (site / "index.html").read_text()
    for caption in ("Tutorials", "How-to", "Reference", "Explanation"):
        assert f'<span class="caption-text">{caption}</span>' in front
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()
    assert "lifelin" in (site / "searchindex.js").read_text()


def test_a_block_shows_the_name_of_its_file(site: Path) -> None:
    """A reader sees what to save it as."""
    page = (site / "tutorial" / "first-deck.html").read_text()
    assert '<span class="caption-text">counter.py</span>' in page
    named = [
        line.split(" ", 1)[1]
        for file in (ROOT / "docs").rglob("*.md")
        for line in file.read_text().splitlines()
        if line.startswith("```") and " " in line and "." in line
    ]
    shown = "".join(file.read_text() for file in site.rglob("*.html"))
    assert named
    assert not [name for name in named if f'<span class="caption-text">{name}</span>' not in shown]
