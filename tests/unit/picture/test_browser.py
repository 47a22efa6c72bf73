"""The page in a headless Chromium: it opens, zooms, explains, filters and compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipegrad.picture import write_html
from pipegrad.simulation.explain.critical_path import break_down
from pipegrad.simulation.explain.lookup import Lookup
from pipegrad.simulation.timeline import Timeline, in_percent
from tests.support.picture.browser import Page, browser
from tests.support.picture.timelines import SMALL, SPANS, repeated, simulated

ONE_RANK: dict[str, Any] = {"num_ranks": 1, "stage_to_rank": (0, 0)}
EVIL = "<img src=x onerror=document.title='broken'>"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(chromium: Page) -> Iterator[Page]:
    """A page whose console must stay empty."""
    chromium.problems()
    chromium.show_as(1280, 860, "light")
    yield chromium
    assert chromium.problems() == []


def num_boxes(timeline: Timeline) -> int:
    """Returns how many spans take time; what is rounded to less than 1 ns takes none."""
    return sum(span.seconds > 1e-9 for span in timeline.spans)


def opened(page: Page, tmp_path: Path, *timelines: Timeline) -> Page:
    write_html(timelines, tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    return page


def test_it_opens_and_draws_a_box_for_each_span(page: Page, tmp_path: Path) -> None:
    timeline = simulated()
    opened(page, tmp_path, timeline)
    drawn = page.drawn()
    assert drawn["boxes"] == num_boxes(timeline)
    assert drawn["bars"] == 0
    assert drawn["texts"] >= 2 * 4 * 8  # each forward and backward says what it is
    assert page.element("sentence").text.startswith("1f1b (predicted): ")
    assert "Critical path: of " in page.element("path-words").text
    assert page.element("reading").text.startswith("Each line is one rank; time runs from left")
    assert not page.element("step-choice").is_displayed()
    legend = page.element("legend").text
    assert "F forward" in legend
    assert "critical path: what the end of the step waited for" in legend
    assert "idle: part of a bubble" in legend
    corner = (
        "picture.drawNow(); return Array.from(document.getElementById('canvas')"
        ".getContext('2d').getImageData(2, 60, 1, 1).data.slice(0, 3))"
    )
    light = page.run(corner)
    page.element("theme").click()
    dark = page.run(corner)
    assert {sum(light) > 600, sum(dark) > 600} == {True, False}


def test_it_zooms_by_wheel_keys_and_buttons(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, simulated())
    whole = page.view()
    page.element("zoom-in").click()
    nearer = page.view()
    assert whole["from"] < nearer["from"] < nearer["to"] < whole["to"]
    page.press("+")
    nearest = page.view()
    assert nearest["to"] - nearest["from"] < nearer["to"] - nearer["from"]
    page.press("0")
    assert page.view() == whole
    # The moment under the pointer stays under it.
    at = page.run("return picture.locate(0, arguments[0])", page.span("t.microbatch[s] === 5"))
    page.run(
        "document.getElementById('viewport').dispatchEvent(new WheelEvent('wheel', {clientX:"
        " arguments[0], clientY: arguments[1], deltaY: -600, ctrlKey: true, cancelable: true}))",
        at["x"], at["y"],
    )  # fmt: skip
    page.drawn()
    after = page.run("return picture.locate(0, arguments[0])", page.span("t.microbatch[s] === 5"))
    assert page.view()["to"] - page.view()["from"] < 0.5 * (whole["to"] - whole["from"])
    assert after["x"] == pytest.approx(at["x"], abs=4)  # the browser rounds to a pixel, then zooms


def test_it_pans_by_dragging_and_by_keys(page: Page, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    opened(page, tmp_path, simulated())
    page.press("+")
    before = page.view()
    drag = ActionChains(page.driver).move_to_element(page.element("viewport"))
    drag.click_and_hold().move_by_offset(-100, 0).release().perform()
    dragged = page.view()
    assert dragged["from"] > before["from"]
    assert dragged["to"] - dragged["from"] == pytest.approx(before["to"] - before["from"])
    assert not page.element("tip").is_displayed()  # a drag chooses nothing
    page.press("a")
    assert page.view()["from"] < dragged["from"]


def test_a_wait_explains_itself(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, SMALL)
    wait = page.span("t.rank[s] === 1 && kind(s) === 'wait for receive'")
    assert page.point_at(wait).splitlines() == [
        "Wait for receive: 4 ms",
        "rank 1, stage 0, microbatch 0",
        "It waits for x of 0F0 from rank 0.",
        "For 3 ms rank 0 was still at 0F0.",
        "For 1 ms the message was on its way.",
        "0 us to 4 ms, takes 4 ms",
    ]
    chain = page.point_at(page.span("t.rank[s] === 0 && kind(s) === 'wait for receive'"))
    assert "For 8 ms rank 1 was still at a wait for rank 0, 1F0 and 1B0." in chain
    reduction = page.point_at(page.span("kind(s) === 'wait for reduction'"))
    assert "It waits for mean." in reduction
    assert "For 4 ms the reduction ran." in reduction


def test_boxes_transfers_and_memory_say_what_they_are(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, SMALL)
    backward = page.point_at(page.span("kind(s) === 'B' && t.rank[s] === 1"))
    assert backward.startswith("1B0: backward\nrank 1, stage 1, microbatch 0")
    assert "On the critical path" in backward
    transfer = page.point_at(page.span("kind(s) === 'transfer'"))
    assert "x of 0F0\nfrom rank 0 to rank 1" in transfer
    below = range(20, 120, 4)
    found = [page.point_at(0, down=down) for down in below]
    assert any(text.startswith("Memory: 100 B\nrank 0, at most 300 B") for text in found)


def test_keys_follow_what_a_wait_is_for(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, SMALL)
    wait = page.span("t.rank[s] === 1 && kind(s) === 'wait for receive'")
    page.point_at(wait, click=True)
    for expected in ("Transfer: 1 ms", "0F0: forward"):
        page.press("ENTER")
        assert page.tip().startswith(expected)
        assert page.run("return document.getElementById('spoken').textContent").startswith(expected)
    page.press("ARROW_RIGHT")
    assert page.tip().startswith("Wait for receive: 9 ms")
    page.press("ARROW_DOWN")
    assert page.tip().startswith("Transfer: 1 ms")
    page.press("ESCAPE")
    assert not page.element("tip").is_displayed()


def test_it_filters_by_kind_rank_microbatch_and_text(page: Page, tmp_path: Path) -> None:
    timeline = simulated()
    opened(page, tmp_path, timeline)
    masks = "return Array.from(picture.timelines[0].mask).filter((each) => each === 2).length"
    whole = page.drawn()["boxes"]

    page.driver.find_element("css selector", "[data-kind=F]").click()
    assert page.drawn()["boxes"] == whole - 32
    page.driver.find_element("css selector", "[data-kind=F]").click()
    page.type("ranks", "0, 2-3")
    others = tuple(span for span in timeline.spans if span.rank != 1)
    assert page.drawn()["boxes"] == num_boxes(replace(timeline, spans=others))
    page.type("ranks", "")
    page.type("microbatches", "3")
    assert page.run(masks) == sum(span.microbatch == 3 for span in timeline.spans)
    assert page.drawn()["boxes"] == whole  # others are dimmed, not gone
    page.type("microbatches", "")
    page.type("text", "2b7")
    assert page.run(masks) == 1
    page.type("ranks", "0-x")
    assert "“0-x” is no number and no range; write 3, 0-3 or 0-3, 7" in page.element("problem").text
    page.type("ranks", "0")
    assert not page.element("problem").is_displayed()


def test_the_controls_show_and_hide_rows_and_steps(page: Page, tmp_path: Path) -> None:
    timeline = simulated(steps=3)
    opened(page, tmp_path, timeline)
    first, second, _ = timeline.step_ends
    assert page.view() == {"from": 0, "to": pytest.approx(first, rel=1e-6)}  # one step at a time
    assert "for 3 steps" not in page.element("sentence").text
    page.element("step-after").click()
    assert page.view()["to"] == pytest.approx(second - first, rel=1e-6)
    page.press("[")
    page.press("[")
    assert "for 3 steps" in page.element("sentence").text
    assert not page.element("step-before").is_enabled()
    whole = page.drawn()["boxes"]
    assert whole == num_boxes(timeline)
    height = page.run("return picture.locate(0, 0).y")
    beside = ("transfer", "reduction", "parameter sync")
    for kind in beside:
        for entry in page.driver.find_elements("css selector", f"[data-kind='{kind}']"):
            entry.click()
    assert page.drawn()["boxes"] == whole - sum(s.kind in beside for s in timeline.spans)
    assert page.run("return picture.locate(0, 0).y") > height  # its lines are gone, others grow


def test_the_table_has_the_shares_of_the_step_that_is_shown(page: Page, tmp_path: Path) -> None:
    timeline = simulated(steps=2)
    opened(page, tmp_path, timeline)
    for step in range(2):
        expected = break_down(Lookup(timeline), step)
        table = page.element("shares").find_element("tag name", "table")
        bubbles = [row.text.split()[-1] for row in table.find_elements("css selector", "tbody tr")]
        idle = [in_percent(1 - rank.computing) for rank in expected.ranks]
        assert [f"{bubble} %" for bubble in bubbles] == idle
        page.press("]")


def test_a_copied_address_shows_the_same(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, simulated(steps=3))
    page.wait("return location.hash === ''")
    page.press("]")
    page.press("w")
    page.press("d")
    page.driver.find_element("css selector", "[data-kind=transfer]").click()
    page.element("show-memory").click()
    page.element("show-arrows").click()
    page.type("ranks", "0-2")
    page.type("text", EVIL)
    page.press(".")
    chosen = page.span(
        "kind(s) === 'B' && t.step[s] === 1 && t.rank[s] === 1 && t.microbatch[s] > 3"
    )
    page.point_at(chosen, click=True)
    page.wait("return location.hash.includes('box=0.')")
    state = (
        "const v = picture.view; return [v.step, v.from, v.to, v.scale, [...v.hidden], v.memory,"
        " v.path, v.arrows, v.chosen.span, v.text, document.getElementById('ranks').value]"
    )
    before, address = page.run(state), page.run("return location.hash.slice(1)")
    assert before[0] == 1
    assert before[5:8] == [False, True, True]
    page.open(tmp_path / "page.html", address)
    after = page.run(state)
    assert after[:4] == pytest.approx(before[:4], rel=1e-6)
    assert after[4:] == before[4:]
    # In the same tab, too; and an address without a meaning shows the usual view.
    page.run("location.hash = '#step=99&from=x&to=-1&hide=F,toString&ranks=0-x&box=7.7&layout=up'")
    page.wait("return picture.view.hidden.size === 1 && !picture.view.chosen")
    assert page.run("return picture.view.step") == 0
    assert page.element("problem").is_displayed()


def test_a_click_shows_a_microbatch_on_all_ranks(page: Page, tmp_path: Path) -> None:
    timeline = simulated()
    opened(page, tmp_path, timeline)
    whole = page.drawn()["texts"]
    page.point_at(
        page.span("kind(s) === 'F' && t.rank[s] === 1 && t.microbatch[s] === 3"), click=True
    )
    assert page.drawn()["texts"] < whole / 4  # the other microbatches are dimmed, without text
    chain = page.run(
        "const {t, chain} = picture.view.chosen;"
        "return chain.map((s) => [t.stage[s], t.microbatch[s], t.end[s] - t.begin[s] > 0.015])"
    )
    forward = [[stage, 3, False] for stage in range(4)]
    assert chain == [*forward, *([stage, 3, True] for stage in (3, 2, 1, 0))]
    page.press("ESCAPE")
    assert page.drawn()["texts"] == whole


@pytest.mark.parametrize("width", [360, 768, 1280, 1920])
def test_no_width_needs_to_scroll_sideways_or_leaves_half_of_the_page_empty(
    page: Page, tmp_path: Path, width: int
) -> None:
    page.show_as(width, 740, "light")
    write_html([simulated(steps=2)], tmp_path / "page.html", title="a_long_name" * 20)
    page.open(tmp_path / "page.html")
    page.element("help").click()
    page.drawn()
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert (
        page.run("return document.getElementById('canvas').getBoundingClientRect().right") <= width
    )
    assert page.run("return document.body.getBoundingClientRect().height") > 0.9 * 740


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_all_text_has_the_contrast_of_aa(page: Page, tmp_path: Path, colours: str) -> None:
    page.show_as(1280, 860, colours)
    opened(page, tmp_path, simulated(steps=2))
    page.element("help").click()
    page.element("show-memory").click()
    assert page.run("return document.documentElement.dataset.theme") == colours
    worst = page.run("""
        const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
        const luminance = (colour) => numbers(colour).slice(0, 3).map((n) => n / 255)
          .map((p) => (p <= 0.03928 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4))
          .reduce((sum, p, at) => sum + p * [0.2126, 0.7152, 0.0722][at], 0);
        const behind = (node) => {
          for (; node; node = node.parentElement) {
            const colour = getComputedStyle(node).backgroundColor;
            if (numbers(colour)[3] !== 0) return colour;
          }
        };
        let worst = 21, count = 0;
        const all = 'h1, p, b, kbd, button, select, th, td, summary, caption';
        for (const node of document.querySelectorAll(all)) {
          if (!node.offsetParent || node.disabled) continue;
          const both = [getComputedStyle(node).color, behind(node)].map(luminance);
          const [low, high] = both.sort((a, b) => a - b);
          worst = Math.min(worst, (high + 0.05) / (low + 0.05));
          count++;
        }
        return count > 60 ? worst : 0;""")
    assert worst >= 4.5


def test_keys_work_wherever_the_focus_is_but_in_a_field(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, simulated())
    page.element("zoom-in").click()
    nearer = page.view()
    page.element("zoom-in").send_keys("w")  # the focus is still on the button
    assert page.view()["to"] - page.view()["from"] < nearer["to"] - nearer["from"]
    near = page.view()
    page.type("text", "was")
    assert page.view() == near
    assert page.element("hint").is_displayed()


def test_a_prediction_lies_over_its_run(page: Page, tmp_path: Path) -> None:
    measured = replace(simulated(slow=1.25), source="measured")
    opened(page, tmp_path, simulated(), measured)
    assert " (predicted): " in page.element("sentence").text
    assert " (measured): " in page.element("sentence").text
    tops = [
        page.run("return picture.locate(arguments[0], arguments[1]).y", number, span)
        for rank in range(2)
        for number in range(2)
        for span in [page.span(f"t.rank[s] === {rank} && kind(s) === 'F'", number)]
    ]
    assert tops == sorted(tops)  # rank by rank, the prediction first
    tip = page.point_at(page.span("kind(s) === 'F'", 1), 1)
    assert "1f1b (predicted): 10 ms (here +25.0 %)" in tip


def test_two_schedules_are_shown_in_three_ways(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, simulated(), simulated("zbv", ranks=2))
    place = "return [0, 1].map((n) => picture.locate(n, 0))"
    first, second = page.run(place)
    assert first["y"] + 100 < second["y"]  # one above the other
    page.element("layout").send_keys("side")
    first, second = page.run("picture.drawNow();" + place)
    assert first["y"] == pytest.approx(second["y"], abs=20)
    assert first["x"] + 400 < second["x"]
    assert "zbv (predicted): " in page.element("sentence").text


def test_it_prints_all_ranks(page: Page, tmp_path: Path) -> None:
    timeline = simulated(ranks=32, microbatches=32)
    opened(page, tmp_path, timeline)
    page.run("dispatchEvent(new Event('beforeprint'))")
    printed = page.run("return document.getElementById('canvas').height")
    page.run("dispatchEvent(new Event('afterprint')); picture.drawNow()")
    assert printed > 2 * page.run("return document.getElementById('canvas').height")
    assert page.driver.print_page()


def test_no_text_of_a_timeline_becomes_markup(page: Page, tmp_path: Path) -> None:
    spans = tuple(span._replace(label=EVIL) for span in SPANS)
    opened(page, tmp_path, replace(SMALL, name=EVIL, spans=spans))
    assert EVIL in page.point_at(page.span("kind(s) === 'transfer'"))
    assert page.driver.title.startswith(EVIL)
    assert page.driver.find_elements("tag name", "img") == []


@pytest.mark.parametrize(
    "timeline",
    [
        replace(SMALL, step_ends=(), memory=()),
        replace(SMALL, **ONE_RANK, spans=SPANS[:1], memory=()),
        replace(SMALL, num_ranks=5, stage_to_rank=(0, 1, 2, 3, 4), memory=()),
        replace(SMALL, spans=(SPANS[0]._replace(end=0.0),), memory=()),
        replace(SMALL, **ONE_RANK, spans=(SPANS[0], SPANS[0]._replace(begin=0.001)), memory=((),)),
    ],
    ids=["no step", "one span", "idle ranks", "no time", "overlap"],
)
def test_odd_timelines_open(page: Page, tmp_path: Path, timeline: Timeline) -> None:
    opened(page, tmp_path, timeline)
    for key in ("+", "-", "0", "ARROW_RIGHT", "ARROW_DOWN", "ENTER", "r", ".", ",", "]", "["):
        page.press(key)
    assert page.view()["to"] > page.view()["from"]


def test_a_hundred_thousand_actions_are_drawn_as_few_things(page: Page, tmp_path: Path) -> None:
    """What a frame draws depends on the size of the screen, not on how many actions there are."""
    timeline = repeated(simulated(ranks=16, microbatches=100), 32)
    assert sum(span.kind in ("F", "B") for span in timeline.spans) == 102_400
    opened(page, tmp_path, timeline)
    page.press("[")  # all steps
    frames: list[dict[str, Any]] = [page.drawn()]
    page.element("fit-ranks").click()
    frames.append(page.drawn())
    for _ in range(8):
        page.element("zoom-in").click()
        frames.append(page.drawn())
    assert max(frame["boxes"] + frame["bars"] for frame in frames) < 60_000
    assert frames[1]["bars"] > 0  # from afar: shares
    assert frames[-1]["boxes"] > 0  # near: boxes
    assert page.point_at(page.span("t.begin[s] > picture.view.from + 0.1 && t.rank[s] === 9")) != ""
