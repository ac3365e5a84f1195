"""The site of the docs: `make docs` builds it in build/docs.  Sphinx reads this file.

Sphinx, because its source folder can be the root of the repository: README.md, docs/ and
examples/tutorials stay where they are, one set of links serves readers of the files and of the
site, and each link and anchor is checked.  Its search is a script beside the pages, which needs
neither a server nor a network.  No page loads anything from elsewhere.

No address of the repository is known here, so a link to a file that is no page, such as a source
or a table of results, becomes a link to a copy of it in the site.
"""

import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import merman
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parent.parent

project = "ringreduce"
version = release = importlib.metadata.version("ringreduce")
copyright = author = "the ringreduce authors"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "examples/tutorials/**", "tests/cuda/README.md"]
exclude_patterns = ["build", "**/.*", ".*", "docs/upstream"]

PAGES = {
    "Use": (
        "Start <self>",
        "examples/tutorials/README",
        "examples/tutorials/two_ranks",
        "docs/torch",
        "docs/hosts",
        "docs/gpu",
        "docs/compression",
        "docs/diloco",
        "docs/frameworks",
        "docs/horovod",
        "docs/survive",
        "docs/see",
        "docs/doctor",
        "docs/plan",
        "docs/options",
        "docs/security",
    ),
    "Look up": (
        "docs/api/ringreduce",
        "docs/api/observing",
        "docs/api/elastic",
        "docs/api/frameworks",
        "docs/api/horovod",
        "docs/api/programs",
    ),
    "Understand": ("docs/design", "docs/performance"),
    "Develop": ("CONTRIBUTING", "tests/cuda/README", "SECURITY", "CHANGELOG"),
}

html_theme = "furo"
html_title = f"ringreduce {release}"
html_copy_source = False
html_css_files = ["site.css"]
html_static_path = ["static"]

# As on the pages of repositories: the same anchors, and a fence of Mermaid is a diagram.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

# The notebook runs in this environment's kernel.  What that writes stays in build/, and it does not
# warn that its connections, which are the loopback's, are not encrypted.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 60

_jupyter = ROOT / "build" / "jupyter"
(_jupyter / "profile_default").mkdir(parents=True, exist_ok=True)
(_jupyter / "profile_default/ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 40\n")
for _name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"):
    os.environ[_name] = str(_jupyter)
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"

autodoc_member_order = "bysource"
autodoc_mock_imports = ["lightning", "torchft"]  # their modules need them; the docs do not
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # several names in a line, as in Args
default_role = "py:obj"
highlight_language = "default"
pygments_style = "friendly"


def from_markdown(
    _: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Docstrings have Markdown's code, indented after an empty line, and files for pages."""
    found: list[str] = []
    before = ""  # the line before the empty one
    in_code = False
    for line in lines:
        if line and not line.startswith(" "):
            in_code = False
        elif line and found and not found[-1] and not before.startswith(" "):
            found += ["::", ""]
            in_code = True
        if not in_code:
            line = re.sub(r"docs/([a-z]+)\.md", r":doc:`/docs/\1`", line)
        found.append(line)
        before = line or before
    lines[:] = found


def more_of_some_pages(_app: Sphinx, page: str, source: list[str]) -> None:
    """What only the site has: the navigation, and the tutorials' scripts."""
    if page == root_doc:
        for caption, pages in PAGES.items():
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n"
            source[0] += "\n".join(pages) + "\n```\n"
    if page == "examples/tutorials/README":
        for path in sorted((ROOT / page).parent.glob("*.py")):
            source[0] += f"\n\n## {path.name}\n\n```{{literalinclude}} {path.name}\n```\n"


class Mermaid(SphinxDirective):
    """A Mermaid diagram, drawn now: readers need no script for it."""

    has_content = True
    LOOK = {  # noqa: RUF012
        "theme": "neutral",
        "fontFamily": "arial",
        "flowchart": {"wrappingWidth": 400},
        "sequence": {"wrap": True, "width": 150, "actorMargin": 70},
    }

    def run(self) -> list[nodes.Node]:
        source = "\n".join(self.content)
        name = f"diagram-{self.env.new_serialno('mermaid')}"
        try:
            svg = merman.Merman().render_svg(
                f"%%{{init: {json.dumps(self.LOOK)}}}%%\n{source}",
                json.dumps({"svg": {"diagram_id": name}}),
            )
        except merman.MermanError as error:
            raise self.error(f"this is no Mermaid diagram: {error}") from error
        return [nodes.raw("", f'<div class="diagram">{svg}</div>', format="html")]


class HelpOf(SphinxDirective):
    """What a program prints for --help: `module`, or `module:function`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name, _, function = self.arguments[0].partition(":")
        module = importlib.import_module(name)
        self.env.note_dependency(module.__file__)
        text = io.StringIO()
        look = {"COLUMNS": "86", "NO_COLOR": "1"}
        with (
            contextlib.redirect_stdout(text),
            contextlib.suppress(SystemExit),
            mock.patch.dict(os.environ, look),
            mock.patch.object(sys, "argv", [name, "--help"]),
        ):
            getattr(module, function or "main")()
        return [nodes.literal_block("", text.getvalue(), language="none")]


def first_page(app: Sphinx, error: Exception | None) -> None:
    """A folder's page is index.html."""
    if error is None and app.builder.format == "html":
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    app.add_directive("mermaid", Mermaid)
    app.add_directive("help-of", HelpOf)
    app.connect("autodoc-process-docstring", from_markdown, priority=100)  # before napoleon
    app.connect("source-read", more_of_some_pages)
    app.connect("build-finished", first_page)
