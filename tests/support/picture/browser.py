"""Page: a page of pictures in a headless Chromium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1280,860",
)  # fmt: skip
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Page:
    """What tests do with a page, and what they see of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def show_as(self, width: int, height: int, colours: str) -> None:
        """Sets the size of the window, in pixels, and what the user prefers: "light" or "dark"."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": colours}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, path: Path, address: str = "") -> None:
        """Loads a file and waits until its data is unpacked; `address` stands behind "#"."""
        self.driver.get("about:blank")  # another "#" alone would load nothing
        self.driver.get(f"{path.as_uri()}#{address}")
        self.wait("return document.documentElement.dataset.ready")

    def wait(self, script: str) -> None:
        """Waits until JavaScript returns something true."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 60).until(lambda driver: driver.execute_script(script))

    def run(self, script: str, *arguments: object) -> Any:
        """Runs JavaScript and returns what it returns."""
        return self.driver.execute_script(script, *arguments)

    def element(self, name: str) -> Any:
        """Returns the element with this id."""
        return self.driver.find_element("id", name)

    def type(self, name: str, text: str) -> None:
        """Replaces what is in an input."""
        from selenium.webdriver.common.keys import Keys

        self.element(name).send_keys(Keys.CONTROL, "a")
        self.element(name).send_keys(text or Keys.DELETE)

    def press(self, key: str) -> None:
        """Presses a key on the picture."""
        from selenium.webdriver.common.keys import Keys

        self.element("viewport").send_keys(getattr(Keys, key, key))

    def span(self, condition: str, number: int = 0) -> int:
        """Returns the first span of a timeline for which JavaScript is true, of `t` and `s`."""
        script = f"""
            const t = picture.timelines[{number}], name = (s) => t.labels[t.label[s]];
            const kind = (s) => kinds[t.kind[s]];
            for (let s = 0; s < t.size; s++) if ({condition}) return s;
            return -1;"""
        kinds = "const kinds = JSON.parse(document.getElementById('data').textContent).kinds"
        found: int = self.run(f"{kinds}.map((each) => each.kind);{script}")
        assert found >= 0, condition
        return found

    def point_at(self, span: int, number: int = 0, *, click: bool = False, down: int = 0) -> str:
        """Moves the pointer to a box, or `down` pixels below it; returns what the tip says."""
        from selenium.webdriver.common.action_chains import ActionChains

        at = self.run("return picture.locate(arguments[0], arguments[1])", number, span)
        viewport = self.element("viewport")
        box = viewport.rect  # the driver counts from its middle
        right, under = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        actions = ActionChains(self.driver, duration=0)
        actions.move_to_element_with_offset(
            viewport, round(at["x"] - right), round(at["y"] + down - under)
        )
        (actions.click() if click else actions).perform()
        return self.tip()

    def tip(self) -> str:
        """Returns what the tip says."""
        text: str = self.element("tip").text
        return text

    def view(self) -> dict[str, Any]:
        """Returns the seconds that are shown."""
        view: dict[str, Any] = self.run("return {from: picture.view.from, to: picture.view.to}")
        return view

    def drawn(self) -> dict[str, float]:
        """Draws, and returns what was drawn and how long it took."""
        drawn: dict[str, float] = self.run("return picture.drawNow()")
        return drawn

    def problems(self) -> list[str]:
        """Returns the errors in the console of the browser."""
        entries = self.driver.get_log("browser")
        return [json.dumps(entry) for entry in entries if entry["level"] == "SEVERE"]


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Starts a Chromium with an empty profile; skips the test where there is none."""
    reason = "needs selenium (it is in the extra dev), Chromium and chromedriver"
    webdriver = pytest.importorskip("selenium.webdriver", reason=reason)
    service = pytest.importorskip("selenium.webdriver.chrome.service", reason=reason)
    binary = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver_binary = shutil.which("chromedriver")
    if binary is None or driver_binary is None:
        pytest.skip(f"{reason}: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=service.Service(driver_binary))
    try:
        yield Page(driver)
    finally:
        driver.quit()
