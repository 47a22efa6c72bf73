"""How fast is the page with 100,000 actions, by its own clock?

    python -m benchmarks.picture.page [--ranks 64] [--microbatches 800]

Simulates 1f1b, writes the page, opens it in a headless Chromium, and prints how long the page takes
for what a user does. Each time is that of all work that the page does before it can draw the next
frame: event, filter, layout, drawing, and all pixels. Needs Chromium and `pip install selenium`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from pipegrad.picture import write_html
from tests.support.picture.browser import browser
from tests.support.picture.timelines import simulated

REPEATS = 7
# Drawing only notes what to draw; whoever reads a pixel waits for all of them.
PIXELS = "document.getElementById('canvas').getContext('2d').getImageData(0, 0, 1, 1);"
CLICK = "document.getElementById('{}').click();"
TYPE = (
    "const input = document.getElementById('{}'); input.value = '{}';"
    "input.dispatchEvent(new Event('input'));"
)
HOVER = (
    "const at = picture.locate(0, arguments[0]); document.getElementById('viewport').dispatchEvent("
    "new PointerEvent('pointermove', {clientX: at.x, clientY: at.y, bubbles: true}));"
)
ACTIONS = {
    "draw all of the time": CLICK.format("fit"),
    "draw all ranks and all of the time": CLICK.format("fit") + CLICK.format("fit-ranks"),
    "zoom": CLICK.format("zoom-in"),
    "hover over a wait": HOVER,
    "filter by microbatch": TYPE.format("microbatches", "100-200"),
    "filter by text": TYPE.format("text", "7f70"),
    "filter by kind": "document.querySelector('[data-kind=F]').click();",
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=800)
    options = parser.parse_args()
    timeline = simulated(ranks=options.ranks, microbatches=options.microbatches)
    actions = sum(span.kind in ("F", "B") for span in timeline.spans)
    print(f"{actions} actions, {len(timeline.spans)} spans")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "page.html")
        begin = time.perf_counter()
        write_html([timeline], path)
        print(f"writing {time.perf_counter() - begin:.1f} s, {path.stat().st_size / 1e6:.1f} MB")
        with browser(Path(name, "profile")) as page:
            begin = time.perf_counter()
            page.open(path)
            print(f"opening {time.perf_counter() - begin:.1f} s")
            wait = page.span("kind(s) === 'wait for receive' && t.rank[s] === 7")
            for what, script in ACTIONS.items():
                timed = (
                    f"const begin = performance.now(); {script} picture.drawNow(); {PIXELS}"
                    f"return performance.now() - begin;"
                )
                times = [page.run(timed, wait) for _ in range(REPEATS)]
                median, worst = statistics.median(times), max(times)
                print(f"{what:36} {median:6.0f} ms, at most {worst:4.0f} ms")


if __name__ == "__main__":
    main()
