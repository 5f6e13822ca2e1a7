"""The report in a real browser: fast, small, complete, without requests, usable by keyboard, on a phone and dark."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import example_results
import example_run
import pytest

from narrowgauge.formats import FORMATS, decode, store
from narrowgauge.gauges.watch.readings import Reading
from narrowgauge.report import live, write
from narrowgauge.runs import record
from pace import at_most

if TYPE_CHECKING:
    from conftest import Page

CHARTS = {"loss", "scale", "heat", "exponents", "gaps", "seeds", "bench", "memory", "memory-step", "roofline",
          "hierarchy", "explorer"}  # fmt: skip
RIGHT, DOWN, END, ENTER, ESCAPE = "\ue014", "\ue015", "\ue010", "\ue007", "\ue00c"
DRAWN = """
const node = document.querySelector(`[data-chart="${arguments[0]}"]`);
if (node.tagName === "CANVAS") {
  const copy = new OffscreenCanvas(node.width, node.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(node, 0, 0);
  const data = copy.getImageData(0, 0, node.width, node.height).data;
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) seen.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
  return seen.size;
}
return [...node.querySelectorAll(".curve, .area, .roof, circle, rect, path[data-part], .room, .bits i")]
  .filter((one) => !one.closest("clipPath")).length;
"""
"""How much a chart shows: the number of colors of a canvas, or of shapes of an SVG."""


@pytest.fixture(scope="module")
def long_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 100,000 steps with 40 modules sampled every 2,000 steps."""
    folder = tmp_path_factory.mktemp("long")
    return write([example_run.write_run(folder / "run", 100_000, tensors=40, every=2000)], folder / "report.html")


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two watched runs and a result of every kind."""
    folder = tmp_path_factory.mktemp("full")
    runs = [example_run.write_run(folder / name, 600, tensors=12, every=50, recipe=name) for name in ("fp16", "bf16")]
    return write([*runs, *example_results.save_all(folder)], folder / "report.html")


def test_run_of_100000_steps_opens_quickly(page: Page, long_page: Path) -> None:
    assert long_page.stat().st_size < 8_000_000
    with at_most(3):
        page.open(long_page)
        assert page.run(DRAWN, "loss") > 0 and page.run(DRAWN, "heat") > 20
    assert "100,000" in page.text("#runs") and "1 serious finding" in page.text("#found h1")
    labels = page.run("return [...document.querySelectorAll('#chart-loss svg text')].map((one) => one.textContent)")
    assert "100k" in labels and len(page.run("return narrowgauge.data.runs[0].curves.loss.x")) == 2000


def test_every_chart_is_drawn(page: Page, full_page: Path) -> None:
    page.open(full_page)
    found = page.run("return [...document.querySelectorAll('[data-chart]')].map((node) => node.dataset.chart)")
    assert set(found) == CHARTS and len(found) == len(CHARTS)
    for name in found:
        assert page.run(DRAWN, name) >= 2, name
    labels = page.run("return [...document.querySelectorAll('[role=img]')].map((n) => n.getAttribute('aria-label'))")
    assert all(labels) and len(labels) >= len(CHARTS) - 2
    assert page.run("return document.querySelectorAll('#layers tbody tr').length") >= 12
    assert "FP8 saves" in page.text("#layers")
    assert page.run("return document.querySelectorAll('#chart-roofline [data-layer]').length") == 3


def test_measured_layers_are_shown_with_their_prediction(page: Page, tmp_path: Path) -> None:
    page.open(write([Path("bench/results/h200-roofline-gpt2-124m.json")], tmp_path / "report.html"))
    page.run("document.querySelector('#chart-roofline .dot').dispatchEvent(new PointerEvent('pointerenter'))")
    assert "ms predicted" in page.text("#chart-roofline") and "measured in isolation" in page.text("#chart-roofline")


def test_page_makes_no_requests(page: Page, full_page: Path) -> None:
    page.open(full_page)
    page.click("#tab-gpu-3")
    assert page.run("return performance.getEntriesByType('resource').filter((one) => one.name !== 'data:,')") == []
    messages = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    asked = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("data:", full_page.as_uri()))] == []
    tried = "const done = arguments[0]; fetch('http://127.0.0.1:9/').then(() => done('sent'), () => done('refused'))"
    assert page.driver.execute_async_script(tried) == "refused"
    refusals = [entry["message"] for entry in page.driver.get_log("browser")]
    assert any("Content Security Policy" in message for message in refusals), "the Content-Security-Policy refuses it"


def test_names_are_not_executed(page: Page, full_page: Path) -> None:
    page.open(full_page)
    assert page.run("return document.scripts.length") == 2
    assert example_run.EVIL in page.text("#found")
    page.click("#heat details summary")
    assert example_run.EVIL in page.text("#heat details")
    assert example_run.EVIL in page.text("#choose-exponents-module")
    assert page.run("return document.querySelectorAll('main script').length") == 0


def test_tabs_work_with_pointer_and_keys(page: Page, full_page: Path) -> None:
    page.open(full_page)
    page.click("#tab-signal-1")
    assert page.run("return document.querySelector('#curves [data-chart]').dataset.chart") == "grad-norm"
    assert page.run(DRAWN, "grad-norm") >= 2
    page.press("#tab-signal-1", RIGHT)
    assert page.run("return document.activeElement.textContent") == "Learning rate"
    assert page.run("return document.querySelector('#curves [data-chart]').dataset.chart") == "lr"
    page.press("#tab-signal-2", END)
    assert page.text("#curves [aria-selected=true]") == "accuracy" and page.run(DRAWN, "metric") >= 2
    assert "H200" in page.text("#roofline [aria-selected=true]")
    before = page.text("#chart-hierarchy")
    assert "4.8 TB/s" in before and "151.40 GB" in before
    page.press("#roofline [aria-selected=true]", RIGHT)
    assert page.text("#roofline [aria-selected=true]") == "B200" and "7.7 TB/s" in page.text("#chart-hierarchy")
    assert "B200" in page.run("return document.querySelector('[data-chart=roofline]').getAttribute('aria-label')")
    focusable = page.run(
        "return [...document.querySelectorAll('#roofline [role=tab]')].filter((t) => t.tabIndex === 0)"
    )
    assert len(focusable) == 1


def test_sliders_move_values_through_the_format_ranges(page: Page, full_page: Path) -> None:
    page.open(full_page)

    def fp16() -> list[str]:
        return page.run(
            "return [...document.querySelectorAll('#exponents tr[data-format=fp16] td')].map((td) => td.textContent)"
        )

    kinds = "return [...document.querySelectorAll('#chart-exponents rect[data-kind]')].map((one) => one.dataset.kind)"
    page.set("#exponents-scale", -24)
    assert fp16()[1] == "100%" and set(page.run(kinds)) == {"under"} and "2⁻²⁴" in page.text("#exponents")
    page.set("#exponents-scale", 16)
    middle = fp16()
    assert "as trained" in page.text("#exponents") and middle[1] != "100%"
    page.set("#choose-exponents-kind", "activation", "change")
    page.set("#exponents-scale", 32)
    assert fp16()[3] != "0%" and "over" in page.run(kinds) and fp16() != middle
    at = "return document.querySelector('#exponents output[for=exponents-sample]').textContent"
    assert page.run(at) == "step 551"
    page.set("#exponents-sample", 0)
    assert page.run(at) == "step 1" and "values in fp16" in page.text("#exponents .readout")
    page.press("#exponents-scale", RIGHT)
    assert page.run("return document.activeElement.id") == "exponents-scale"


def test_heat_map_controls(page: Page, full_page: Path) -> None:
    page.open(full_page)
    colours = page.run(DRAWN, "heat")
    page.set("#choose-heat-format", "fp32", "change")
    assert "No tensor has values" in page.text("#heat") and page.run(DRAWN, "heat") != colours
    page.set("#choose-heat-format", "fp16", "change")
    page.set("#choose-heat-sort", "worst", "change")
    assert "Largest share" in page.text("#heat .note")
    page.press("#plot-heat", DOWN)
    page.press("#plot-heat", RIGHT)
    read = page.text("#heat .readout")
    assert "step" in read and "%" in read and "flushed to zero" in read
    module = page.text("#heat .readout b")
    page.press("#plot-heat", ENTER)
    assert page.run("return document.getElementById('choose-exponents-module').value") == module
    page.set("#choose-heat-kind", "update", "change")
    assert "too small to change a BF16 weight" in page.text("#choose-heat-loss")
    page.set("#choose-heat-run", "bf16", "change")
    assert page.run(DRAWN, "heat") >= 2


def test_curves_are_read_and_zoomed_with_keys(page: Page, full_page: Path) -> None:
    page.open(full_page)
    assert "at the end" in page.text("#chart-loss .readout")
    page.press("#plot-loss", RIGHT)
    assert page.text("#chart-loss .readout").startswith("step 3")
    reset = "return document.querySelector('#chart-loss .controls > button').hidden"
    assert page.run(reset) is True
    before = page.run("return document.querySelector('#chart-loss .curve').getAttribute('d')")
    page.press("#plot-loss", "+")
    assert page.run(reset) is False
    assert page.run("return document.querySelector('#chart-loss .curve').getAttribute('d')") != before
    page.press("#plot-loss", ESCAPE)
    assert page.run(reset) is True
    assert page.run("return document.querySelectorAll('#chart-loss .nonfinite').length") == 2
    page.click("#chart-loss .legend button")
    assert page.run("return document.querySelector('#chart-loss .legend button').ariaPressed") == "false"
    page.click("#check-log-loss")
    page.click("#chart-loss details summary")
    assert page.run("return document.querySelectorAll('#chart-loss details tr').length") > 50


def test_tables_sort_and_filter(page: Page, full_page: Path) -> None:
    page.open(full_page)
    page.set("#layers-filter", "qkv")
    assert page.run("return document.querySelectorAll('#layers tbody tr').length") == 2
    page.set("#layers-filter", "")
    column = page.run(
        "return [...document.querySelectorAll('#layers th')].findIndex((th) => th.textContent === 'fp8: ms saved')"
    )
    page.click(f"#layers th:nth-child({column + 1}) button")
    cells = page.run(
        "return [...document.querySelectorAll(arguments[0])].map((td) => td.textContent)",
        f"#layers tbody td:nth-child({column + 1})",
    )
    known = [float(cell) for cell in cells if cell]
    assert known == sorted(known, reverse=True) and known[0] > 0 and cells[-1] == ""


@pytest.mark.parametrize("width", [360, 768])
def test_page_fits_narrow_screens(page: Page, full_page: Path, long_page: Path, width: int) -> None:
    for path in (full_page, long_page):
        page.open(path, width=width)
        assert page.run("return document.documentElement.scrollWidth") <= width
        wide = page.run(
            "return [...document.querySelectorAll('main *')].filter((n) => !n.closest('.scroll, .tabs, svg, .heat')"
            " && n.getBoundingClientRect().right > innerWidth + 1).map((n) => n.outerHTML.slice(0, 120))"
        )
        assert wide == []


def test_light_and_dark(page: Page, full_page: Path) -> None:
    def brightness() -> float:
        red, green, blue = page.run(
            "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
        )
        return float(0.3 * red + 0.6 * green + 0.1 * blue)

    page.open(full_page)
    assert brightness() > 200
    page.open(full_page, dark=True)
    assert brightness() < 40
    colours = page.run(DRAWN, "heat")
    page.click("#theme")
    assert brightness() > 200 and page.text("#theme") == "Dark"
    assert page.run(DRAWN, "heat") >= colours / 2, "the map is redrawn"


def numbers() -> list[float]:
    """Ties, limits and adjacent numbers in every format, every FP8 number, and random numbers of all magnitudes."""
    draw = random.Random(7)
    found = [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 0.1, 1.2e-7, 65520.0]
    for f in FORMATS.values():
        for edge in (f.max, f.smallest_normal, f.smallest_subnormal, f.smallest_subnormal / 2, f.max * (1 + f.epsilon)):
            found += [edge, -edge, edge * 1.5, edge * 3, math.nextafter(edge, 0), math.nextafter(edge, math.inf)]
        half = f.epsilon / 2
        found += [1 + half, 1 + 3 * half, 1 + half + 2.0**-50, 2 - half, f.max + f.max * half / 2]
    for name in ("fp8_e4m3", "fp8_e5m2"):
        codes = [decode(code, name) for code in range(256)]
        found += [x for x in codes if math.isfinite(x)]
        finite = sorted(x for x in codes if math.isfinite(x))
        found += [(a + b) / 2 for a, b in pairwise(finite)]
    found += [
        math.copysign(draw.uniform(1, 2), draw.random() - 0.5) * 2.0 ** draw.randrange(-160, 140) for _ in range(600)
    ]
    return found


def test_formats_match_python(page: Page, full_page: Path) -> None:
    page.open(full_page)
    values = numbers()
    texts = [value.hex() if math.isfinite(value) else str(value) for value in values]
    outcome = page.run(
        "const { data, store, parseNumber } = narrowgauge;"
        "return arguments[0].map((text) => Object.entries(data.formats).map(([name, f]) => {"
        "  const kept = store(parseNumber(text), f);"
        "  return [name, kept.bits, kept.state, String(kept.value), String(kept.error)];"
        "}));",
        texts,
    )
    for value, rows in zip(values, outcome, strict=True):
        for name, bits, state, held, error in rows:
            wanted = store(value, name)
            assert (bits, state) == (wanted.bits, wanted.state), (value, name)
            assert float(held.replace("Infinity", "inf")) == wanted.value or math.isnan(wanted.value), (value, name)
            assert float(error.replace("Infinity", "inf")) == pytest.approx(wanted.relative_error, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e400", 1.7976931348623157e308), ("-1e400", -1.7976931348623157e308), ("1e-400", 5e-324), (" 1_000 ", 1000.0),
     ("0x1.8p-3", 0.1875), (".5", 0.5), ("-infinity", -math.inf)],
)  # fmt: skip
def test_numbers_are_parsed_like_python(page: Page, full_page: Path, text: str, value: float) -> None:
    page.open(full_page)
    found = page.run("return String(narrowgauge.parseNumber(arguments[0]))", text)
    assert float(found.replace("Infinity", "inf")) == value


def test_explorer_shows_bits_and_rejects_words(page: Page, full_page: Path) -> None:
    page.open(full_page)
    page.set("#explore", "1.2e-7")
    row = "#formats [data-format=fp16]"
    assert page.run(f"return document.querySelector('{row} .bits').dataset.bits") == "0000000000000010"
    assert "2 of 11 bits left" in page.text(row) and "1.1920929e-7" in page.text(row)
    page.set("#explore", "500")
    assert "saturate to 448" in page.text("#formats [data-format=fp8_e4m3]")
    page.set("#explore", "many")
    assert "Not a number" in page.text("#explore-help")
    assert page.run("return document.getElementById('explore').getAttribute('aria-invalid')") == "true"


def test_shares_match_readings(page: Page, full_page: Path) -> None:
    page.open(full_page)
    draw = random.Random(3)
    for _ in range(20):
        first = draw.randrange(-60, 10)
        counts = [draw.randrange(0, 500) for _ in range(draw.randrange(2, 25))]
        counts[-1] += 1
        amax = math.ldexp(1.7, first + len(counts) - 1)
        exponents = {first + i: n for i, n in enumerate(counts) if n}
        reading = Reading(kind="weight", module="m", dtype="fp32", count=sum(counts), amax=amax, exponents=exponents)
        shift = draw.randrange(-20, 24)
        found: dict[str, Any] = page.run(
            "const [first, counts, amax, shift] = arguments;"
            "return Object.fromEntries(Object.entries(narrowgauge.data.formats)"
            ".map(([name, f]) => [name, narrowgauge.shares(first, counts, amax, f, shift)]));",
            first, counts, amax, shift,
        )  # fmt: skip
        for name in FORMATS:
            wanted = reading.shares(name, 2.0**shift)
            assert found[name] == pytest.approx(vars(wanted), abs=1e-9)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[live.Server, Path]]:
    run = example_run.write_run(tmp_path / "run", 60, tensors=3, every=10, end=False)
    server = live.serve([run], 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server, run
    server.shutdown()
    thread.join()
    server.server_close()


def test_live_page_follows_the_run(page: Page, running: tuple[live.Server, Path]) -> None:
    server, run = running
    page.open(server.url)
    assert page.text("#live") == "live" and "60" in page.text("#runs .tile")
    page.click("#tab-signal-1")
    page.run("document.getElementById('tab-signal-1').focus()")
    with record.Record(run) as book:
        for step in range(61, 65):
            book.append("step", step, loss=2.0, lr=0.1, grad_norm=1.0, loss_scale=8.0, applied=True, tokens_per_s=9.0)
    deadline = time.monotonic() + 10
    while "64" not in page.text("#runs .tile") and time.monotonic() < deadline:
        time.sleep(0.1)
    page.settle()
    assert "64" in page.text("#runs .tile")
    assert page.text("#curves [aria-selected=true]") == "Gradient norm", "the selection is kept"
    assert page.run("return document.activeElement.id") == "tab-signal-1", "the focus is kept"
    assert page.run(DRAWN, "grad-norm") >= 1


RECIPES = ("fp32", "bf16", "fp16", "fp8", "bf16-lean")
LOOK = """
return [...document.querySelectorAll('#chart-loss path.curve')].map((one) => {
  const style = getComputedStyle(one);
  return [style.stroke, style.strokeDasharray];
});
"""
"""Color and dashes of every curve."""


@pytest.fixture(scope="module")
def five_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five recipes whose losses end within two percent of each other."""
    folder = tmp_path_factory.mktemp("five")
    runs = [
        example_run.write_run(folder / name, 600, recipe=name, seed=number, learning_rate=number + 1.0)
        for number, name in enumerate(RECIPES)
    ]
    return write(runs, folder / "report.html")


def _to_linear(channel: int) -> float:
    value = channel / 255
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)


def test_five_runs_can_be_told_apart(page: Page, five_page: Path) -> None:
    page.open(five_page)
    looks = list(dict.fromkeys(map(tuple, page.run(LOOK))))
    assert len({color for color, _ in looks}) == 5 and len({dashes for _, dashes in looks}) == 5
    samples = page.run(
        "return [...document.querySelectorAll('#chart-loss .legend svg.swatch line')]"
        ".map((one) => [getComputedStyle(one).stroke, getComputedStyle(one).strokeDasharray])"
    )
    assert {tuple(one) for one in samples} == set(looks), "the legend shows the same lines"
    tops = page.run(
        "return [...document.querySelectorAll('#chart-loss .legend button')].slice(0, 5).map((one) =>"
        " Math.abs(one.firstElementChild.getBoundingClientRect().bottom - one.getBoundingClientRect().bottom))"
    )
    assert max(tops) < 14, "a line stands beside its name, not above it"
    # Protanopia (Viénot 1999) keeps only these two mixtures: no two colors may coincide in both.
    seen = []
    for color, _ in looks:
        red, green, blue = (_to_linear(int(part)) for part in color.removeprefix("rgb(").rstrip(")").split(",")[:3])
        seen.append((0.11238 * red + 0.88762 * green, 0.00401 * red - 0.00401 * green + blue))
    assert all(math.dist(one, other) > 0.04 for i, one in enumerate(seen) for other in seen[:i]), seen


def test_the_difference_view_separates_runs_that_end_close_together(page: Page, five_page: Path) -> None:
    page.open(five_page)
    page.click("#check-loss-difference")
    names = page.run("return [...document.querySelectorAll('#chart-loss .legend button')].map((n) => n.textContent)")
    assert names == ["bf16", "fp16", "fp8", "bf16-lean"], "each is compared with fp32"
    label = page.run("return document.querySelector('#plot-loss').getAttribute('aria-label')")
    assert "difference of 4 losses from fp32" in label
    ticks = page.run("return [...document.querySelectorAll('#chart-loss svg text')].map((one) => one.textContent)")
    assert any(tick.endswith("%") for tick in ticks)
    page.click("#check-loss-difference")
    assert len(set(map(tuple, page.run(LOOK)))) == 5


def test_a_spike_of_one_step_is_visible(page: Page, long_page: Path, tmp_path: Path) -> None:
    """The band reaches the value of a single step, and its edge is at least a pixel wide."""
    for path in (long_page, write([example_run.write_run(tmp_path / "run", 900)], tmp_path / "short.html")):
        page.open(path)
        box, top, stroke = page.run(
            "const area = [...document.querySelectorAll('#chart-loss path.area')];"
            "const tops = area.map((one) => one.getBBox().y);"
            "const style = getComputedStyle(area[0]);"
            "return [document.querySelector('#plot-loss svg').getBoundingClientRect().height, Math.min(...tops),"
            " [style.stroke, style.strokeWidth, style.strokeOpacity]]"
        )
        assert top < 0.2 * box, "the spike of 40 is the largest value"
        assert stroke[0] != "none" and float(stroke[1].rstrip("px")) >= 1 and float(stroke[2]) >= 0.4


def test_phone_tables_keep_their_first_column(page: Page, full_page: Path) -> None:
    page.open(full_page, width=390)
    assert page.run("return document.documentElement.scrollWidth") <= 390
    for section in ("layers", "validation"):
        before, after, width = page.run(
            "const box = document.querySelector(`#${arguments[0]} .scroll:has(tbody tr)`);"
            "const cell = box.querySelector('tbody td');"
            "const before = cell.getBoundingClientRect().left; box.scrollLeft = 200;"
            "return [before, cell.getBoundingClientRect().left, cell.getBoundingClientRect().width]",
            section,
        )
        assert before == after and 90 < width < 200, section
    clipped = page.run(
        "return [...document.querySelectorAll('#validation svg text')].filter((one) => {"
        " const box = one.getBoundingClientRect(); return box.left < 0 || box.right > innerWidth; })"
        ".map((one) => one.textContent)"
    )
    assert clipped == []
    words = page.run("return [...document.querySelectorAll('#layers td.words')].map((n) => n.scrollWidth > 390)")
    assert words and not any(words), "the summary wraps"


def test_phone_labels_of_candidates_are_whole(page: Page, tmp_path: Path) -> None:
    saved = example_results.validation()
    one = next(iter(saved["candidates"].values()))
    names = [f"fp8[keep=blocks.{number}.up]" for number in range(3)]
    saved["candidates"] = dict.fromkeys(names, one)
    page.open(write(example_results.save(tmp_path, validation=saved), tmp_path / "report.html"), width=390)
    labels = page.run(
        "return [...document.querySelectorAll('#chart-gaps text.strong')].map((one) => {"
        " const box = one.getBoundingClientRect();"
        " return [one.textContent, box.left >= 0 && box.right <= innerWidth]; })"
    )
    assert labels == [[name, True] for name in names]


def test_print_shows_whole_tables_in_light_colors(page: Page, full_page: Path) -> None:
    import base64

    page.open(full_page, dark=True)
    page.run("document.documentElement.dataset.theme = 'dark'")
    command = page.driver.execute_cdp_cmd
    command("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    command(
        "Emulation.setDeviceMetricsOverride", {"width": 720, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    )
    page.settle()
    try:
        back, ink = page.run("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
        assert back == "rgb(255, 255, 255)" and ink == "rgb(0, 0, 0)"
        hidden = page.run(
            "return [...document.querySelectorAll('nav, #theme, .tabs, #formats, .controls input')]"
            ".filter((one) => one.getBoundingClientRect().height > 0).map((one) => one.outerHTML.slice(0, 80))"
        )
        assert hidden == [], "nothing that has to be clicked"
        cut = page.run(
            "return [...document.querySelectorAll('.scroll')].filter((one) => one.scrollHeight > one.clientHeight + 2"
            " && getComputedStyle(one).overflow !== 'visible').length"
        )
        assert cut == 0
        assert page.run("return document.documentElement.scrollWidth") <= 720
        document = base64.b64decode(command("Page.printToPDF", {"printBackground": True})["data"])
        assert document.startswith(b"%PDF") and 2 <= document.count(b"/Type /Page\n") <= 14
    finally:
        command("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_memory_has_the_units_of_the_command_line(page: Page, full_page: Path) -> None:
    from narrowgauge.cli.memory import gigabytes

    page.open(full_page)
    for value in (3_200_000, 99_999_999, 100_000_000, 12_345_678_901, 151_397_597_184):
        assert page.run("return narrowgauge.bytes(arguments[0])", value) == gigabytes(value)
    assert "GiB" not in page.text("#memory")
