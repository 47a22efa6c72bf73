"""write_html: one file that needs nothing else, and that no text can break."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipegrad.picture import write_html
from tests.support.picture.timelines import SMALL, SPANS

EVIL = "</script><script>alert(1)</script><!-- %%DATA%% & \"'"


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    write_html([SMALL], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?://|src=|@import|url\(|import\(|fetch\(", text)
    assert not re.search(r"transition|animation|behavior", text)  # nothing moves by itself
    assert "default-src 'none'" in text
    assert "%%" not in text
    assert '<p id="reading">Each line is one rank; time runs from left to right. A box' in text
    write_html([SMALL], tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "page.html").read_bytes()


def test_no_text_ends_the_data_or_the_title(tmp_path: Path) -> None:
    spans = (SPANS[0]._replace(label=EVIL), *SPANS[1:])
    timeline = replace(SMALL, name=EVIL, spans=spans, notes={EVIL: EVIL, "costs": EVIL})
    write_html([timeline], tmp_path / "page.html", title=EVIL)
    text = (tmp_path / "page.html").read_text()

    assert text.count("<script") == text.count("</script") == 2
    data = text.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    assert "<" not in data
    found = json.loads(data)
    assert found["title"] == EVIL
    assert EVIL in found["timelines"][0]["labels"]
    assert "<title>&lt;/script&gt;" in text


@pytest.mark.parametrize(("title", "expected"), [("", "by hand (predicted)"), ("Ä run", "Ä run")])
def test_the_title_is_given_or_the_name(title: str, expected: str, tmp_path: Path) -> None:
    write_html([SMALL], tmp_path / "page.html", title=title)
    assert f"<h1>{expected}</h1>" in (tmp_path / "page.html").read_text(encoding="utf-8")
