"""The site of the docs (docs/conf.py).  Sphinx itself checks the links of the sources."""

from __future__ import annotations

import importlib
import posixpath
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

for _name in ("sphinx", "furo", "myst_nb", "merman"):
    pytest.importorskip(_name, reason="needs `pip install -r requirements-docs.txt`")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

# Modules whose public names are promised to users.  Those of torchft and Lightning need packages
# that are not here: their one name each is read from the source.
MODULES = [
    "ringreduce",
    "ringreduce.hooks",
    "ringreduce.errors",
    "ringreduce.launch",
    "ringreduce.step",
    "ringreduce.timeline",
    "ringreduce.elastic",
    "ringreduce.horovod",
    "ringreduce.horovod.torch",
    "ringreduce.horovod.torch.elastic",
    "ringreduce.integrations.accelerate",
]
FOREIGN = {
    "ringreduce.torchft.ProcessGroupRingReduce",
    "ringreduce.integrations.lightning.CommHook",
}


@pytest.fixture(scope="module")
def site() -> Path:
    """The built site; where `make docs` has just built it, that is quick."""
    folder = ROOT / "build" / "docs"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-c", "docs", ".", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        shutil.rmtree(folder)  # the next build would not warn again
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def resolve(name: str) -> object:
    """The object of a dotted name; None if it cannot be had without foreign packages."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part, None)
        return found
    return None


def test_every_public_name_has_an_entry(site: Path) -> None:
    """Under one of its names: some modules have the names of others as well."""
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    entries = {
        name for kind, names in inventory.data.items() if kind[:3] == "py:" for name in names
    }
    documented = [resolve(name) for name in entries - FOREIGN]
    missing = FOREIGN - entries
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            full = value.__name__ if isinstance(value, ModuleType) else f"{module.__name__}.{name}"
            if full not in entries and not any(value is other for other in documented):
                missing.add(full)
    assert missing == set()


class Page(HTMLParser):
    """The anchors of a page, and what it refers to: for readers to follow, or by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag == "link" and "href" in given:
            self.loads.add(given["href"])
        self.loads.update(given[name] for name in ("src", "poster", "data") if name in given)


def test_links_resolve_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {
        path.relative_to(site).as_posix(): Page(path.read_text()) for path in site.rglob("*.html")
    }
    assert {"index.html", "docs/design.html", "search.html"} <= pages.keys()
    broken = []
    for name, page in pages.items():
        for link in page.links | page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads:
                    broken.append(f"{name} loads {link}")
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path)))
            target = path if parts.path else name
            anchor = unquote(parts.fragment)
            if not (site / target).exists():
                broken.append(f"{name}: no file {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                broken.append(f"{name}: no anchor {link}")
    assert broken == []


def test_diagrams_and_outputs_are_there(site: Path) -> None:
    """They are made by other programs, which could leave them out."""
    design = (site / "docs" / "design.html").read_text()
    source = (ROOT / "docs" / "design.md").read_text()
    assert design.count('<div class="diagram"><svg') == source.count("```mermaid") > 0
    notebook = (site / "examples" / "tutorials" / "two_ranks.html").read_text()
    assert "same weights: True" in notebook
    for page in (site / "docs" / "api").glob("*.html"):
        # A property's docstring is cut at a colon in its first line, as "type: meaning".
        assert ">Type<" not in page.read_text(), page
    programs = (site / "docs" / "api" / "programs.html").read_text()
    assert programs.count("show this help message") == programs.count("<h2>") > 0


def test_each_python_test_stands_by_its_promise() -> None:
    """The table of promises has the files of each folder."""
    table: dict[str, set[str]] = {}
    for row in (ROOT / "CONTRIBUTING.md").read_text().split("\n"):
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        if len(cells) == 4 and cells[0][:1] == "`":
            table.setdefault(cells[0].strip("`"), set()).update(re.findall(r"`(\w+)`", cells[2]))
    tree: dict[str, set[str]] = {}
    for path in (ROOT / "tests").glob("*/test_*.py"):
        tree.setdefault(path.parent.name, set()).add(path.stem.removeprefix("test_"))
    assert table == tree
