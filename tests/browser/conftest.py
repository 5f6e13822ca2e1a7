"""Headless Chromium for the report's tests; without it they are skipped with one line of explanation."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

sys.path.append(str(Path(__file__).parent.parent / "report"))  # for example_run and example_results

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
READY = bool(CHROMIUM and DRIVER and importlib.util.find_spec("selenium"))
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not READY:
        here = [item for item in items if Path(__file__).parent in item.path.parents]
        for item in here:
            item.add_marker(pytest.mark.skip(reason="no Chromium"))


SKIPPED = "tests/browser skipped: no Chromium with its driver (apt-get install chromium chromium-driver)"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not READY:
        terminalreporter.write_line(SKIPPED)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With pytest-xdist only the workers load this file, so the first worker prints the line."""
    worker = getattr(session.config, "workerinput", {}).get("workerid")
    if not READY and worker == "gw0":
        with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            os.write(2, f"\n{SKIPPED}\n".encode())


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(executable_path=str(DRIVER)))
    yield driver
    driver.quit()


class Page:
    """A page in the browser, with shortcuts for the tests."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, where: Path | str, width: int = 1280, dark: bool = False) -> None:
        command = self.driver.execute_cdp_cmd
        shape = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        command("Emulation.setDeviceMetricsOverride", shape)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        command("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(where if isinstance(where, str) else where.resolve().as_uri())
        self.settle()

    def settle(self) -> None:
        """Wait for two frames: charts are drawn when their width is known."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 0)));"
        )

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, css: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", css))

    def click(self, css: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", css)
        self.settle()

    def set(self, css: str, value: Any, event: str = "input") -> None:
        """Set the value of a control as a user would."""
        self.run(
            "const [css, value, event] = arguments; const node = document.querySelector(css); node.value = value;"
            "node.dispatchEvent(new Event(event, { bubbles: true }));",
            css, value, event,
        )  # fmt: skip
        self.settle()

    def press(self, css: str, key: str) -> None:
        from selenium.webdriver.common.by import By

        self.driver.find_element(By.CSS_SELECTOR, css).send_keys(key)
        self.settle()


@pytest.fixture
def page(chrome: Chrome) -> Iterator[Page]:
    """A page that must not log any error to the console during the test."""
    for kind in ("browser", "performance"):
        chrome.get_log(kind)
    yield Page(chrome)
    errors = [entry["message"] for entry in chrome.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []
