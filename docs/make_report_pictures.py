"""Creates the pictures of the report from real runs: trains small models, then takes screenshots of the page.

usage: python docs/make_report_pictures.py [FOLDER]

FOLDER keeps the runs, so that a second call only takes the pictures. Without it the runs are trained again, in minutes.
Needs Chromium with its driver, and selenium.
"""

from __future__ import annotations

import base64
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
TASK = "gpt:2x64"
RUNS = {
    "fp16": ["--recipe", "fp16"],
    "no-scale": ["--recipe", "fp16[loss_scale=none]", "--steps", "60"],
    "bf16-0": ["--recipe", "bf16", "--seed", "0"],
    "bf16-1": ["--recipe", "bf16", "--seed", "1"],
    "bf16-2": ["--recipe", "bf16", "--seed", "2"],
}
SAVED = {
    "validation": ["validate", TASK, "--candidates", "bf16,fp8", "--seeds", "3", "--steps", "30", "--device", "cpu"],
    "layers": ["roofline", TASK, "--gpu", "h200"],
}
"""Results on the same page as the runs."""
FORECASTS = {
    "roofline": ["roofline", "gpt2-124m", "--gpu", "h200"],
    "memory": ["memory", "gpt2-124m", "--gpu", "h200", "--no-search"],
}
"""Results on a separate page: forecasts for a model too large to train here."""
MOST_BYTES = 200_000
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


def narrowgauge(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "narrowgauge", *arguments], capture_output=True, text=True, check=False
    )


def train_all(folder: Path) -> list[Path]:
    """Train the runs that do not exist yet."""
    for name, options in RUNS.items():
        if not (folder / name / "run.json").exists():
            common = ["--steps", "160", "--watch", "5", "--device", "cpu", "--checkpoint-every", "0"]
            narrowgauge("train", TASK, *common, *options, "--out", str(folder / name))
    return [folder / name for name in RUNS]


def save_all(folder: Path, commands: dict[str, list[str]]) -> list[Path]:
    """Save the JSON of other commands, if it does not exist yet."""
    paths = []
    for name, command in commands.items():
        path = folder / f"{name}.json"
        if not path.exists():
            done = narrowgauge(*command, "--json")
            if done.returncode == 2:
                print(f"without {name}: {done.stderr.strip().splitlines()[-1]}")
                continue
            path.write_text(done.stdout)
        paths.append(path)
    return paths


def report(page: Path, paths: list[Path]) -> Path:
    done = narrowgauge("report", *map(str, paths), "--out", str(page))
    print(done.stdout + done.stderr, end="")
    return page


class Browser:
    """A browser that takes screenshots of parts of a page."""

    def __init__(self, profile: str) -> None:
        options = ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for switch in (*SWITCHES, f"--user-data-dir={profile}"):
            options.add_argument(switch)
        self.chrome = Chrome(options=options, service=ChromeService(executable_path=shutil.which("chromedriver")))

    def open(self, page: Path, width: int, dark: bool = False) -> None:
        command = self.chrome.execute_cdp_cmd
        shape = {"width": width, "height": 900, "deviceScaleFactor": 1.5, "mobile": width < 500}
        command("Emulation.setDeviceMetricsOverride", shape)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        command("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.chrome.get(page.resolve().as_uri())
        self.run("")

    def run(self, script: str) -> None:
        """Run a script in the page and waits until it is drawn."""
        self.chrome.execute_async_script(f"const done = arguments[0]; {script}; setTimeout(done, 300);")

    def take(self, name: str, css: str, height: float | None = None) -> None:
        """Take a screenshot of an element, or of its upper part, with as many colors as fit into 200 kB."""
        box: dict[str, Any] = self.chrome.execute_script(
            "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return { x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height };",
            css,
        )
        clip = {**box, "height": min(box["height"], height or box["height"]), "scale": 1}
        shot = self.chrome.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        picture = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
        for colours in (256, 128, 64, 32):
            data = io.BytesIO()
            picture.quantize(colours, dither=Image.Dither.NONE).save(data, "PNG", optimize=True)
            if data.tell() < MOST_BYTES:
                break
        path = PICTURES / f"{name}.png"
        path.write_bytes(data.getvalue())
        print(f"{path.relative_to(ROOT)}: {data.tell() / 1000:.0f} kB, {picture.width} x {picture.height}")


def choose(**values: str) -> str:
    """Return a script that sets the select boxes of the page."""
    return "; ".join(
        f"{{ const box = document.getElementById('choose-{name.replace('_', '-')}'); box.value = '{value}';"
        " box.dispatchEvent(new Event('change')) }"
        for name, value in values.items()
    )


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as passing, tempfile.TemporaryDirectory() as profile:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(passing)
        folder.mkdir(parents=True, exist_ok=True)
        runs = report(folder / "runs.html", [*train_all(folder), *save_all(folder, SAVED)])
        forecasts = report(folder / "forecasts.html", save_all(folder, FORECASTS))
        browser = Browser(profile)
        try:
            take_pictures(browser, runs, forecasts)
        finally:
            browser.chrome.quit()


def take_pictures(browser: Browser, runs: Path, forecasts: Path) -> None:
    browser.open(runs, 1100)
    browser.take("report-findings", "#found", 560)
    browser.take("report-curves", "#curves")
    browser.run(choose(heat_run="bf16 seed 0", heat_kind="gradient", heat_format="fp8_e4m3"))
    browser.take("report-heat", "#heat")
    unscaled = "fp16[loss_scale=none]"
    browser.run(choose(exponents_run=unscaled, exponents_kind="gradient", exponents_module="blocks.0.up"))
    browser.take("report-exponents", "#exponents", 580)
    browser.take("report-layers", "#layers", 560)
    browser.take("report-formats", "#formats")
    browser.open(forecasts, 1100)
    browser.take("report-roofline", "#roofline")
    browser.take("report-memory", "#memory")
    browser.open(runs, 1100, dark=True)
    browser.take("report-dark", "body", 800)
    browser.open(runs, 390, dark=True)
    browser.take("report-phone", "#curves")


main()
