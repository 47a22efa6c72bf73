"""Makes the documentation site: scripts/docs runs Sphinx with it.

The root of the repository is the source folder. So benchmarks, CONTRIBUTING.md and CHANGELOG.md are
pages where they lie, and the build checks every link between them. Pages are plain Markdown, which
GitHub shows too. What Sphinx alone needs is added here: the side bar is the list in docs/index.md.
"""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.domains.python import PythonDomain

import pipegrad
from pipegrad import errors, schedules

if TYPE_CHECKING:
    from docutils.nodes import Element, reference
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).parents[1]
project = "pipegrad"
version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
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
default_role = "py:obj"  # `Scheduler` in a docstring is a link if there is such a name
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", ".*"),  # arguments and attributes stand in backticks too
    # Other packages: the build needs no network, so it has none of their inventories.
    ("py:.*", r"(torch|nn|dist|pydantic|click|collections|contextlib|pathlib|numpy|rich)\..*"),
    # Types of public functions that are not public themselves: by name, and by module.
    ("py:class", r"\w+"),
    ("py:class", r"pipegrad\.(\w+\.)+\w+"),
]

myst_heading_anchors = 4  # those of GitHub

html_theme = "furo"
html_title = f"pipegrad {version}"
html_logo = html_favicon = "_static/logo.svg"
html_search_scorer = str(ROOT / "docs" / "_static" / "scorer.js")
pygments_dark_style = "github-dark"  # furo's own underlines the names of modules, like links
html_static_path = ["_static"]
html_extra_path = ["_root"]  # leads from the root of the site to the home page
html_css_files = ["pipegrad.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

HOUSE_IS_DRAWN = "`scripts/docs` draws `docs/house.svg`"
HOUSE = "![The folders of pipegrad: the core in blue, the tools in orange.](house.svg)\n\n"
# Pages whose end is made: function of scripts/docs.
MADE = {"docs/files": "files", "docs/config": "config", "docs/families": "families"}
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_LISTED = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[^)#]+)\.\w+\)", re.MULTILINE)
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_PUBLIC = {name: f"pipegrad.{name}" for name in pipegrad._HOME_OF}
_PUBLIC |= {f"pipegrad.{home}.{name}": _PUBLIC[name] for name, home in pipegrad._HOME_OF.items()}
for _module in (errors, schedules):
    for _name, _value in vars(_module).items():
        if getattr(_value, "__module__", "").startswith("pipegrad."):
            _public = f"{_module.__name__}.{_name}"
            _PUBLIC |= {_name: _public, f"{_value.__module__}.{_name}": _public}


def contents(index: str) -> dict[str, str]:
    """Returns hidden tables of contents by the page that has them: the side bar is made of them.

    The home page has one for each of its headings that lists pages. Under `Benchmarks` the page of
    all figures has the others, so that the side bar shows one line instead of thirty.
    """
    titles, home, figures = _HEADING.split(index)[1:], list[str](), ""
    for title, text in zip(titles[::2], titles[1::2], strict=True):
        pages = [f"{each['title']} <{each['page']}>" for each in _LISTED.finditer(text)]
        if title == "Benchmarks":
            figures, pages = "\n".join(["```{toctree}\n:hidden:\n", *pages[1:], "```"]), pages[:1]
        if pages:
            home += [f"```{{toctree}}\n:hidden:\n:caption: {title}\n", *pages, "```"]
    return {root_doc: "\n".join(home), "docs/numbers": figures}


def prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    """Drops the markers of tests; adds the side bar, tables that are made, and drawn folders."""
    source[0] = source[0].replace(HOUSE_IS_DRAWN, HOUSE + HOUSE_IS_DRAWN)  # git has no such file
    source[0] = _COMMENT.sub("", source[0])
    index = ROOT / f"{root_doc}.md"
    if docname in (root_doc, "docs/numbers"):
        app.env.note_dependency(index)  # who changes the list changes the side bar
        source[0] += "\n\n" + contents(index.read_text(encoding="utf-8"))[docname]
    if docname in MADE:
        script = runpy.run_path(str(ROOT / "scripts" / "docs"))
        source[0] += "\n".join(script[MADE[docname]]())


def tidy(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Writes a docstring so that napoleon reads it as it is meant."""
    # The first sentence of a property may have a colon: it would be read as a type and a text.
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment
    # A paragraph between sections would cut the list of arguments in two.
    sections = [number for number, line in enumerate(lines) if _SECTION.fullmatch(line)]
    notes = ("Sync: ", "Source: ")
    begins = [number for number, line in enumerate(lines) if line.startswith(notes)]
    for begin in [begin for begin in begins if sections and begin > sections[0]]:
        end = next((n for n in range(begin, len(lines)) if not lines[n]), len(lines))
        paragraph = [*lines[begin:end], ""]
        del lines[begin : end + 1]
        lines[sections[0] : sections[0]] = paragraph
        sections[0] += len(paragraph)


def is_bare_field(
    app: Sphinx, what: str, name: str, value: object, skip: bool, options: object
) -> bool | None:
    """Leaves out fields of named tuples: their class lists them."""
    return True if type(value).__name__ == "_tuplegetter" else None


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: Element
) -> reference | None:
    """Finds a public name by itself, or by the module in which it is written."""
    public = _PUBLIC.get(node["reftarget"]) if node["refdomain"] == "py" else None
    if public is None or public == node["reftarget"]:
        return None
    domain = env.domains.python_domain
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects what is above."""
    for directive in PythonDomain.directives.values():
        for field in getattr(directive, "doc_field_types", ()):
            if field.name == "variable":
                field.label = "Attributes"  # as docstrings call them
    app.connect("source-read", prepare)
    app.connect("autodoc-process-docstring", tidy, priority=100)  # before napoleon
    app.connect("autodoc-skip-member", is_bare_field)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
