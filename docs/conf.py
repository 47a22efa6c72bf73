"""Makes the documentation site: scripts/docs runs Sphinx with it.

The root of the repository is the source folder. So benchmarks, CONTRIBUTING.md and CHANGELOG.md are
pages where they lie, and the build checks every link between them. Pages are plain Markdown, which
GitHub shows too. What Sphinx alone needs is added here: the side bar is the list in docs/index.md.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pipegrad

if TYPE_CHECKING:
    from docutils.nodes import Element, reference
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "pipegrad"
author = "the authors of pipegrad"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/*/README.md", "examples/*/README.md", "C*.md"]
exclude_patterns = ["docs/_build"]

myst_heading_anchors = 4  # those of GitHub
myst_links_external_new_tab = True


html_theme = "furo"
html_title = "pipegrad"
html_static_path = ["_static"]
html_css_files = ["pipegrad.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
autodoc_use_type_comments = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Sync", "notes_style"), ("Source", "notes_style")]
nitpicky = True
# Names of other packages: the build needs no network, so it has none of their inventories.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|nn|dist|pydantic|click|collections|pathlib|numpy|transformers|rich)\..*"),
]

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_LISTED = re.compile(r"^\| \[[^\]]+\]\((?P<page>[^)#]+)\)", re.MULTILINE)
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_PUBLIC = {f"pipegrad.{home}.{name}": f"pipegrad.{name}" for name, home in pipegrad._HOME_OF.items()}


def with_side_bar(index: str) -> str:
    """Returns the home page with a hidden table of contents for each heading that lists pages."""
    titles = _HEADING.split(index)[1:]
    parts = [index]
    for title, text in zip(titles[::2], titles[1::2], strict=True):
        pages = [found["page"].rpartition(".")[0] for found in _LISTED.finditer(text)]
        if pages:
            parts.append(f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages))
            parts.append("```")
    return "\n".join(parts)


def prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    """Takes the markers of tests from a page, and gives the home page the side bar."""
    source[0] = _COMMENT.sub("", source[0])
    if docname == root_doc:
        source[0] = with_side_bar(source[0])


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: Element
) -> reference | None:
    """Finds a public class by the module in which it is written."""
    public = _PUBLIC.get(node["reftarget"]) if node["refdomain"] == "py" else None
    if public is None:
        return None
    domain = env.domains.python_domain
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], public, node, text
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects what is above."""
    app.connect("source-read", prepare)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
