"""The documentation as a site: the same Markdown, with navigation and search. Built by ``make docs``.

Sphinx, MyST and Furo, because all three are kept by more than one person, fail on a broken link when asked to, and make
plain files whose search works without a server. The pages stay ordinary Markdown: what a site needs beyond it is made
here from what they say already. The navigation is the order of the links in ``index.md``; a block that names its file
(```` ```python bot.py ````) gets that name as a caption.
"""

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The headings of index.md, as documentation calls them elsewhere (diataxis.fr).
SECTIONS = {"Learn": "Tutorials", "Do": "How-to", "Look up": "Reference", "Understand": "Explanation"}

project = "Everdeck"
author = "The Everdeck authors"
version = release = PROJECT["version"]
html_title = f"Everdeck {release}"
html_theme = "furo"
html_logo = html_favicon = "../src/everdeck/server/dashboard/static/icon.svg"
html_show_copyright = False
html_copy_source = False
extensions = ["myst_parser"]
exclude_patterns = ["conf.py"]
suppress_warnings = ["misc.highlighting_failure"]  # a console block shows "…" for what differs from run to run
highlight_language = "text"
myst_heading_anchors = 4
myst_links_external_new_tab = False
nitpicky = True


def setup(app: Sphinx) -> None:
    """Change pages as they are read, not as they are written."""
    app.connect("source-read", _as_the_site_needs_it)


def _as_the_site_needs_it(_app: Sphinx, name: str, source: list[str]) -> None:
    text = source[0]
    text = re.sub(r"^(`{3,})(\w+) ([^\s`]+\.[^\s`]+)$", r"\1{code-block} \2\n:caption: \3\n", text, flags=re.MULTILINE)
    # Files of the repository that are no page: they are named, since a site cannot link to them.
    text = re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?:README|CONTRIBUTING|CHANGELOG|SECURITY)\.md[^)]*\)", r"\1", text)
    if name == "index":
        text += _navigation(text)
    source[0] = text


def _navigation(index: str) -> str:
    parts = re.split(r"^## (.+)$", index, flags=re.MULTILINE)
    tables = []
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        pages = dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.md\)", body))
        listed = "\n".join(pages)
        tables.append(f"\n```{{toctree}}\n:caption: {SECTIONS[title]}\n:hidden:\n\n{listed}\n```\n")
    return "".join(tables)
