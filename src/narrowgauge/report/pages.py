"""Puts a page together: data from the sources, thinned to what a page can bear, with style and script from assets/.

One file, nothing fetched: the data are JSON in a script element that is not run, with every < written as \\u003c, so
that no name of a user's can end the element. The page's own rules (Content-Security-Policy) forbid it any request.
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
from narrowgauge.report import facts, layers, sources, thin, words
from narrowgauge.report.sources import Sources
from narrowgauge.report.story import Story

NAME = "report.html"
STYLES = ("base.css", "charts.css", "panels.css", "tables.css", "instruments.css")
SCRIPTS = (
    "core.js", "numbers.js", "formats.js", "scales.js", "tabs.js", "table.js", "curves.js", "line.js", "heat.js",
    "histogram.js", "bars.js", "stack.js", "roofline.js", "explorer.js", "sections_found.js", "sections_run.js",
    "sections_tensors.js", "sections_saved.js", "page.js",
)  # fmt: skip
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
# What a page may weigh is shared out among its runs: some 12,000 columns of curves are 2.5 MB, and so on.
_ALL_COLUMNS, _ALL_CELLS, _ALL_LOOKS = 12_000, 2_000_000, 4_000
_TWINS = 400
"""Columns of a band over seeds."""


def write(paths: Sequence[Path], out: Path) -> Path:
    """Write the report of runs and saved results; ``out`` is an .html file, or a folder for one. Gives its path.

    A damaged record is reported as far as it can be read. UsageError for a path that is no run and no known JSON, and
    where the file cannot be written.
    """
    target = where(out)
    if any(files.exists(target) and files.exists(path) and target.samefile(path) for path in paths):
        raise UsageError(f"--out {target} is one of the inputs: give another name")
    files.refuse_unwritable(target, "--out")
    page = render(collect(sources.open_all(paths)))
    files.save_text(target, page, "--out")
    return target


def where(out: Path) -> Path:
    """The file that ``out`` means."""
    if files.is_folder(out) or (not files.exists(out) and out.suffix.lower() not in (".html", ".htm")):
        return out / NAME
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out} is a file that is no .html: give another, or a folder")
    return out


def collect(found: Sources) -> dict[str, Any]:
    """Everything the page shows."""
    names = name_all(found.stories)
    share = max(len(found.stories), 1)
    columns = max(200, min(thin.COLUMNS, _ALL_COLUMNS // share))
    runs = [
        {"name": name, **story.describe(columns, _ALL_CELLS // share, _ALL_LOOKS // share)}
        for story, name in zip(found.stories, names, strict=True)
    ]
    return {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "title": title(found, names),
        "told": words.tell(found, names),
        "formats": facts.formats(),
        "gpus": facts.machines(),
        "runs": runs,
        "bands": bands(found.stories, names),
        "layers": layers.join_all(found),
        "validations": found.of("validation"),
        "benches": found.of("bench"),
        "memories": found.of("memory"),
        "rooflines": found.of("roofline"),
    }


def title(found: Sources, names: list[str]) -> str:
    """What the page is about, in a line."""
    tasks = list(dict.fromkeys(_task(story) for story in found.stories))
    others = [
        f"{kind} {saved['task'] or saved['name']}"
        for kind, all_of in found.saved.items()
        if kind != "findings"
        for saved in all_of
    ]
    known = names or others or [saved["title"] or saved["name"] for saved in found.of("findings")]
    shown = ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")
    return f"{tasks[0]}: {shown}" if len(tasks) == 1 else shown


def name_all(stories: Sequence[Story]) -> list[str]:
    """What each run is called: recipe, with the task, seed or folder where that is needed to tell them apart."""
    many_tasks = len({_task(story) for story in stories}) > 1
    names = [f"{_task(story)} {story.recipe}" if many_tasks else story.recipe for story in stories]
    seeds = [f" seed {_seed(story)}" for story in stories]
    folders = [f" in {story.folder.resolve().name}" for story in stories]
    for more in (seeds, folders, [f" {story.folder}" for story in stories]):
        counts = Counter(names)
        names = [name + end if counts[name] > 1 else name for name, end in zip(names, more, strict=True)]
    return names


def _task(story: Story) -> str:
    return story.task.rpartition("/")[2]


def _seed(story: Story) -> Any:
    settings = story.configuration.get("settings")
    return settings.get("seed", 0) if isinstance(settings, dict) else 0


def bands(stories: Sequence[Story], names: Sequence[str]) -> list[dict[str, Any]]:
    """For runs that differ in their seed alone: their mean loss, the lowest and the highest, over the steps."""
    twins: dict[str, list[int]] = {}
    for index, story in enumerate(stories):
        if story.steps:
            twins.setdefault(story.twin_key, []).append(index)
    found = []
    for members in twins.values():
        if len(members) < 2:
            continue
        length = min(len(stories[index].steps) for index in members)
        if any(stories[i].steps[:length] != stories[members[0]].steps[:length] for i in members):
            continue  # one of them has gaps: nothing can be averaged step by step
        steps = np.array(stories[members[0]].steps[:length])
        curves = [thin.thin(steps, np.array(stories[i].numbers["loss"][:length]), _TWINS) for i in members]
        table = np.array([[np.nan if y is None else y for y in curve["y"]] for curve in curves], dtype=np.float64)
        first = stories[members[0]]
        found.append(
            {
                "name": f"{first.recipe}, {len(members)} seeds",
                "runs": [names[index] for index in members],
                "x": curves[0]["x"],
                "per": curves[0]["per"],
                "y": thin.shorts(table.mean(axis=0)),
                "lo": thin.shorts(table.min(axis=0)),
                "hi": thin.shorts(table.max(axis=0)),
            }
        )
    return found


def render(data: dict[str, Any], live: bool = False) -> str:
    """The page of the data; ``live``: one that asks its server for more."""
    plain = "".join(f"<li>{html.escape(line)}</li>" for line in _lines(data))
    return _filled(
        {
            "POLICY": POLICY + ("; connect-src 'self'" if live else ""),
            "TITLE": html.escape(f"{data['title']} - narrowgauge"),
            "STYLE": "\n".join(_asset(name) for name in STYLES),
            "PLAIN": f"<p>{html.escape(data['told']['headline'])}</p><ul>{plain}</ul>",
            "LIVE": "true" if live else "false",
            "DATA": as_json(data),
            "SCRIPT": "(() => {\n" + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();",
        }
    )


def as_json(data: dict[str, Any]) -> str:
    """JSON that may stand in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _lines(data: dict[str, Any]) -> list[str]:
    """The findings, for who has no JavaScript."""
    found = data["told"]["findings"]
    return [printable(f"{one['severity']}: {one['source']}: {one['detail']} {one['fix']}") for one in found]


def _asset(name: str) -> str:
    return resources.files("narrowgauge.report").joinpath("assets", name).read_text(encoding="utf-8")


def _filled(parts: dict[str, str]) -> str:
    """The template with its places filled in one pass, so that no part is searched for places itself."""
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda place: parts[place[1]], _asset("page.html"))
