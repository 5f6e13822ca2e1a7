"""Builds the page: data from the inputs, downsampled to a bounded size, with the styles and scripts of assets/.

The page is one file and fetches nothing. The data are JSON in a script element that is not executed, with every <
written as \\u003c, so that no user-defined name can end the element. The Content-Security-Policy forbids all requests.
"""

from __future__ import annotations

import html
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge import files
from narrowgauge.errors import UsageError, printable
from narrowgauge.report import headline, inputs, layer_table, reference_data
from narrowgauge.report.downsample import COLUMNS, downsample, round_numbers
from narrowgauge.report.inputs import Inputs
from narrowgauge.report.run_data import RunData

NAME = "report.html"
STYLES = ("base.css", "charts.css", "panels.css", "tables.css", "explorer.css")
SCRIPTS = (
    "dom.js", "number_text.js", "number_formats.js", "axes.js", "tabs.js", "table.js", "draw_curves.js",
    "line_chart.js", "heat_map.js", "exponent_histogram.js", "bar_charts.js", "memory_charts.js", "roofline_chart.js",
    "format_explorer.js", "section_findings.js", "sections_runs.js", "sections_tensors.js", "section_experts.js",
    "sections_results.js", "page.js",
)  # fmt: skip
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
# The runs of a page share a size budget: 12,000 columns of curves are about 2.5 MB.
_ALL_COLUMNS, _ALL_CELLS, _ALL_HISTOGRAMS = 12_000, 2_000_000, 4_000
_BAND_COLUMNS = 400
"""Columns of a band over seeds."""


def write(paths: Sequence[Path], out: Path) -> Path:
    """Writes the report of runs and saved results.

    A damaged record is shown as far as it can be read.

    Args:
        paths: Run folders, and JSON files of validate, bench, memory, roofline, lint or break.
        out: An .html file, or a folder in which report.html is written.

    Returns:
        The path of the written file.

    Raises:
        UsageError: If a path is neither a run nor a known JSON file, or the output cannot be written.
    """
    target = resolve_output(out)
    if any(files.exists(target) and files.exists(path) and target.samefile(path) for path in paths):
        raise UsageError(f"--out {target} is one of the inputs: choose another name")
    files.refuse_unwritable(target, "--out")
    page = render(collect(inputs.open_inputs(paths)))
    files.save_text(target, page, "--out")
    return target


def resolve_output(out: Path) -> Path:
    """The output file: ``out`` itself, or report.html in the folder ``out``."""
    if files.is_folder(out) or (not files.exists(out) and out.suffix.lower() not in (".html", ".htm")):
        return out / NAME
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out} is an existing file that is not .html: choose another file or a folder")
    return out


def collect(found: Inputs) -> dict[str, Any]:
    """All data of the page."""
    names = name_runs(found.runs)
    share = max(len(found.runs), 1)
    columns = max(200, min(COLUMNS, _ALL_COLUMNS // share))
    runs = [
        {"name": name, **run.describe(columns, _ALL_CELLS // share, _ALL_HISTOGRAMS // share)}
        for run, name in zip(found.runs, names, strict=True)
    ]
    return {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "title": make_title(found, names),
        "summary": headline.summarize(found, names),
        "formats": reference_data.describe_formats(),
        "gpus": reference_data.describe_gpus(),
        "runs": runs,
        "bands": compute_seed_bands(found.runs, names),
        "layers": layer_table.build_tables(found),
        "validations": found.of("validation"),
        "benches": found.of("bench"),
        "memories": found.of("memory"),
        "rooflines": found.of("roofline"),
    }


def make_title(found: Inputs, names: list[str]) -> str:
    """The title of the page, in one line."""
    tasks = list(dict.fromkeys(_task(run) for run in found.runs))
    others = [
        f"{kind} {saved['task'] or saved['name']}"
        for kind, all_of in found.saved.items()
        if kind != "findings"
        for saved in all_of
    ]
    known = names or others or [saved["title"] or saved["name"] for saved in found.of("findings")]
    shown = ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")
    return f"{tasks[0]}: {shown}" if len(tasks) == 1 else shown


def name_runs(runs: Sequence[RunData]) -> list[str]:
    """A distinct name for each run: its recipe, with the task, seed or folder where needed."""
    many_tasks = len({_task(run) for run in runs}) > 1
    names = [f"{_task(run)} {run.recipe}" if many_tasks else run.recipe for run in runs]
    seeds = [f" seed {_seed(run)}" for run in runs]
    folders = [f" in {run.folder.resolve().name}" for run in runs]
    for more in (seeds, folders, [f" {run.folder}" for run in runs]):
        counts = Counter(names)
        names = [name + end if counts[name] > 1 else name for name, end in zip(names, more, strict=True)]
    return names


def _task(run: RunData) -> str:
    return run.task.rpartition("/")[2]


def _seed(run: RunData) -> Any:
    settings = run.configuration.get("settings")
    return settings.get("seed", 0) if isinstance(settings, dict) else 0


def compute_seed_bands(runs: Sequence[RunData], names: Sequence[str]) -> list[dict[str, Any]]:
    """The mean, minimum and maximum loss at each step over runs that differ only in their seed."""
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        if run.steps:
            groups.setdefault(run.seedless_key, []).append(index)
    found = []
    for members in groups.values():
        if len(members) < 2:
            continue
        length = min(len(runs[index].steps) for index in members)
        if any(runs[i].steps[:length] != runs[members[0]].steps[:length] for i in members):
            continue  # a run has gaps, so the steps cannot be averaged
        steps = np.array(runs[members[0]].steps[:length])
        curves = [downsample(steps, np.array(runs[i].numbers["loss"][:length]), _BAND_COLUMNS) for i in members]
        table = np.array([[np.nan if y is None else y for y in curve["y"]] for curve in curves], dtype=np.float64)
        first = runs[members[0]]
        found.append(
            {
                "name": f"{first.recipe}, {len(members)} seeds",
                "runs": [names[index] for index in members],
                "x": curves[0]["x"],
                "per": curves[0]["per"],
                "y": round_numbers(table.mean(axis=0)),
                "lo": round_numbers(table.min(axis=0)),
                "hi": round_numbers(table.max(axis=0)),
            }
        )
    return found


def render(data: dict[str, Any], live: bool = False) -> str:
    """The HTML page of some data. With ``live`` it polls its server for updates."""
    plain = "".join(f"<li>{html.escape(line)}</li>" for line in _lines(data))
    return _fill_template(
        {
            "POLICY": POLICY + ("; connect-src 'self'" if live else ""),
            "TITLE": html.escape(f"{data['title']} - narrowgauge"),
            "STYLE": "\n".join(_read_asset(name) for name in STYLES),
            "PLAIN": f"<p>{html.escape(data['summary']['headline'])}</p><ul>{plain}</ul>",
            "LIVE": "true" if live else "false",
            "DATA": to_inline_json(data),
            "SCRIPT": "(() => {\n" + "\n".join(_read_asset(name) for name in SCRIPTS) + "\n})();",
        }
    )


def to_inline_json(data: dict[str, Any]) -> str:
    """JSON for a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _lines(data: dict[str, Any]) -> list[str]:
    """The findings as text, for browsers without JavaScript."""
    found = data["summary"]["findings"]
    return [printable(f"{one['severity']}: {one['source']}: {one['detail']} {one['fix']}") for one in found]


def _read_asset(name: str) -> str:
    return resources.files("narrowgauge.report").joinpath("assets", name).read_text(encoding="utf-8")


def _fill_template(parts: dict[str, str]) -> str:
    """Fills the template in one pass, so that placeholders within the inserted parts stay as they are."""
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], _read_asset("page.html"))
