"""The built site in a headless Chromium: home, search, navigation, phones and the dark theme.

``scripts/docs`` builds it. ``.ci/check`` then runs these tests with ``pytest tests/site``.
"""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.pages import PAGES, ROOT
from tests.support.picture.browser import Page, browser

SITE = ROOT / "docs" / "_build"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PHONE = 360  # pixels
# What people look for, and the page that answers.
QUERIES = {
    "checkpoint": "docs/how_to/checkpoints",
    "tied embedding": "docs/how_to/tie_parameters",
    "learning rate": "docs/config",
    "clip": "docs/attach",
    "DDP": "docs/coming_from/ddp",
    "hang": "docs/how_to/debug_a_hang",
    "codec": "docs/codecs",
    "fp16": "docs/how_to/mixed_precision",
    "resume": "docs/how_to/checkpoints",
    "slurm": "docs/how_to/slurm_and_kubernetes",
}


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class Site:
    """The site as a reader sees it.

    Attributes:
        page: What the browser shows.
    """

    def __init__(self, page: Page, address: str) -> None:
        self.page, self._address = page, address

    def open(self, name: str) -> None:
        """Loads a page, by its path in the repository without a suffix, or another file."""
        self.page.driver.get(f"{self._address}/{name}" + ("" if "." in name else ".html"))

    def all(self, selector: str) -> list[Any]:
        """Returns the elements."""
        elements: list[Any] = self.page.driver.find_elements("css selector", selector)
        return elements

    def hits(self, query: str) -> list[str]:
        """Returns the pages that a search lists, in their order."""
        from selenium.webdriver.support.ui import WebDriverWait

        self.open(f"search.html?q={query}")
        summary = "document.querySelector('.search-summary')"
        ended = f"return {summary}?.innerText.startsWith('Search finished')"
        WebDriverWait(self.page.driver, 60).until(lambda driver: driver.execute_script(ended))
        links = "return [...document.querySelectorAll('ul.search > li > a')].map(a => a.pathname)"
        return [path.removesuffix(".html").strip("/") for path in self.page.run(links)]

    def show(self, theme: str = "light", width: int = 1280) -> None:
        """Chooses a theme and the width of the screen."""
        size = {"width": width, "height": 760, "deviceScaleFactor": 1, "mobile": width == PHONE}
        self.page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.page.run("localStorage.setItem('theme', arguments[0])", theme)

    def where(self) -> str:
        """Returns the path of the page that is shown."""
        path: str = self.page.run("return location.pathname")
        return path.strip("/").removesuffix(".html")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    built = SITE / "searchindex.js"
    sources = [*(ROOT / name for name in PAGES), *(ROOT / "docs" / "_static").iterdir()]
    sources += [ROOT / "docs" / "conf.py", *ROOT.glob("docs/**/*.rst")]
    if not built.exists():
        pytest.skip("the site is not built: run scripts/docs")
    if late := [path for path in sources if path.stat().st_mtime > built.stat().st_mtime]:
        pytest.skip(f"the site is older than {late[0].relative_to(ROOT)}: run scripts/docs")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with browser(tmp_path_factory.mktemp("profile")) as page:
            site = Site(page, f"http://127.0.0.1:{server.server_port}")
            site.open("docs/index")
            yield site
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def site(opened: Site) -> Iterator[Site]:
    """The site in a wide window and the light theme, whose console must stay empty."""
    opened.show()
    opened.page.problems()
    yield opened
    assert opened.page.problems() == []


def test_the_root_leads_to_a_home_with_name_version_and_logo(site: Site) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    site.open("index.html")
    there = "return location.pathname === '/docs/index.html' && document.readyState === 'complete'"
    WebDriverWait(site.page.driver, 60).until(lambda driver: driver.execute_script(there))
    assert site.page.driver.title == f"pipegrad {VERSION}"
    [brand] = site.all(".sidebar-brand")
    assert brand.text == f"pipegrad {VERSION}"
    [logo] = site.all(".sidebar-logo")
    assert site.page.run("return arguments[0].naturalWidth", logo) > 0
    [icon] = site.all("link[rel='shortcut icon']")
    assert icon.get_attribute("href").endswith("logo.svg")


def test_home_says_in_its_order_for_whom_shows_a_run_and_leads_on(site: Site) -> None:
    site.open("docs/index")
    headings = [each.text.rstrip("#¶") for each in site.all("main h2, article h2")]
    assert headings[:4] == [
        "Is it for you?", "A whole example", "Which page do I read?", "Start here",
    ]  # fmt: skip
    code, output = [each.text for each in site.all("article pre")][:2]
    assert code.startswith("import torch")
    assert output.splitlines()[0].startswith("step 1  loss ")
    [warning] = [each for each in site.all("article p") if "hardly run on GPUs" in each.text]
    [audience] = site.all("#is-it-for-you table")
    screen = site.page.run("return innerHeight")  # the first one says what it is and is not
    assert warning.location["y"] < audience.location["y"] < screen / 2


@pytest.mark.parametrize("query", QUERIES)
def test_the_best_page_is_one_of_the_first_two(site: Site, query: str) -> None:
    hits = site.hits(query)
    assert QUERIES[query] in hits[:2], hits[:5]


def test_guides_come_before_changes_and_benchmarks(site: Site) -> None:
    """The changelog stood above the Checkpoints page for "checkpoint"."""
    below = 0
    for query in QUERIES:
        hits = site.hits(query)
        guides = [n for n, page in enumerate(hits) if page.startswith(("docs/how_to", "docs/tut"))]
        others = [n for n, page in enumerate(hits) if page.startswith(("CHANGE", "benchmarks"))]
        assert max(guides, default=-1) < min(others, default=len(hits)), (query, hits)
        below += len(others)
    assert below > 10


def test_a_public_name_leads_to_the_reference(site: Site) -> None:
    for name in ("GradientSync", "find_tied", "clip_grad_norm_"):
        assert site.hits(name)[0].startswith("docs/reference/"), name


def test_the_side_bar_is_the_list_of_the_home_page_in_its_order(site: Site) -> None:
    site.open("docs/index")
    bar = [each.get_attribute("href") for each in site.all(".sidebar-tree a.reference.internal")]
    listed = [
        each.get_attribute("href")
        for each in site.all("article section ul > li > p > a:first-child, article ul > li > a")
    ]
    assert len(listed) > 80
    assert bar == listed
    captions = [each.text for each in site.all(".sidebar-tree .caption-text")]
    assert captions[0] == "START HERE"


def test_the_copy_button_leaves_out_prompts(site: Site) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    site.open("CONTRIBUTING")
    heard = "addEventListener('copy', (event) => (window.copied = event.target.value), true)"
    site.page.run(heard)
    copied = []
    for button in site.all(".copybtn"):
        at_once = "{block: 'center', behavior: 'instant'}"
        site.page.run(f"arguments[0].scrollIntoView({at_once})", button)
        ActionChains(site.page.driver).move_to_element(button).click().perform()
        copied.append(site.page.run("return window.copied"))
    assert len(set(copied)) > 3
    assert [text for text in copied if text.startswith("$ ") or "\n$ " in text] == []
    assert any(text.startswith("scripts/docs  ") for text in copied)


WIDE = ("docs/index", "docs/how_to/checkpoints", "docs/attach", "docs/config", "docs/numbers",
        "docs/schedules", "docs/reference/gradients", "docs/internals", "docs/codecs",
        "benchmarks/network/README", "CHANGELOG", "search.html?q=codec")  # fmt: skip


@pytest.mark.parametrize("name", WIDE)
def test_a_phone_scrolls_down_only(site: Site, name: str) -> None:
    site.show(width=PHONE)
    site.open(name)
    assert site.page.run("return innerWidth") == PHONE
    assert site.page.run("return document.scrollingElement.scrollWidth") <= PHONE


def test_drawings_can_be_read_on_a_phone(site: Site) -> None:
    """Letters of the opening drawing had 4 pixels."""
    site.show(width=PHONE)
    inner = (
        "return arguments[0].clientWidth - 2 * parseFloat(getComputedStyle(arguments[0]).padding)"
    )
    for name in ("docs/index", "docs/concepts", "docs/handlers", "docs/how_to/choose_a_schedule"):
        site.open(name)
        for drawing in site.all("article img"):
            shown = site.page.run(inner, drawing)
            drawn = box_width(drawing.get_attribute("src"))
            assert 11 * shown / drawn > 9, (name, drawing.get_attribute("src"))
    site.open("docs/index")
    [opening] = site.all("article img")
    assert opening.size["width"] <= PHONE  # and it needs no scrolling


def box_width(address: str) -> float:
    """Returns how wide a drawing is in its own units."""
    [path] = SITE.rglob(address.rpartition("/")[2])
    return float(path.read_text().partition('viewBox="0 0 ')[2].split()[0])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_drawings_stand_on_white_in_both_themes(site: Site, theme: str) -> None:
    ground = "return getComputedStyle(arguments[0]).backgroundColor"
    site.show(theme)
    for name in ("docs/index", "docs/concepts", "docs/internals", "docs/how_to/read_a_timeline"):
        site.open(name)
        page = site.page.run("return getComputedStyle(document.body).backgroundColor")
        red = int(page.partition("(")[2].split(",")[0])
        assert red < 40 if theme == "dark" else red > 240
        drawings = site.all("article img")
        assert {site.page.run(ground, each) for each in drawings} == {"rgb(255, 255, 255)"}
        assert all(site.page.run("return arguments[0].naturalWidth", each) for each in drawings)
