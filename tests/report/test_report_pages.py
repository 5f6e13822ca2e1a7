"""The page is one safe file of bounded size that needs neither torch nor a network."""

from __future__ import annotations

import html.parser
import json
import re
import subprocess
import sys
from pathlib import Path

import example_results
import example_run
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from narrowgauge.errors import UsageError
from narrowgauge.report import pages, write
from narrowgauge.report.inputs import open_inputs

ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["nan", "inf"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KINDS = ("step", "eval", "look", "finding", "prediction", "end", "sample", "checkpoint", "resume", "capture", "odd")
FIELDS = ("step", "loss", "readings", "loss_scale", "applied", "text", "path", "interrupted", "findings", "breaks",
          "detail", "severity", "parameters", "time", "k", "e")  # fmt: skip
EVENTS = st.builds(
    lambda kind, fields: {"step": 3, "kind": kind, **fields},
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=4),
)
SETTINGS = st.dictionaries(st.sampled_from(["task", "options", "settings", "facts", "versions", "began"]), ODD)


class Scripts(html.parser.HTMLParser):
    """Parses a page as a browser would, and keeps the contents of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.held: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in self.held:
            self.held[tag].append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in self.held and self.held[self.tags[-1]]:
            self.held[self.tags[-1]][-1] += data


def test_page_is_self_contained(tmp_path: Path) -> None:
    run = example_run.write_run(tmp_path / "run", 300, tensors=6, every=30)
    path = write([run, *example_results.save_all(tmp_path)], tmp_path / "out")
    assert path == tmp_path / "out" / "report.html"
    text = path.read_text()
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", text) and "@import" not in text and "url(http" not in text
    assert "default-src 'none'" in text and "connect-src" not in text
    page = Scripts(text)
    assert page.tags.count("script") == 2 and page.tags.count("link") == 1
    data = json.loads(page.held["script"][0])
    assert [run["name"] for run in data["runs"]] == ["fp16"]
    assert data["title"] == "gpt:12x768: fp16"
    assert all(data[kind] for kind in ("validations", "benches", "memories", "rooflines", "formats", "gpus"))
    assert data["layers"][0]["rows"] and data["summary"]["findings"]


def test_names_cannot_inject_html(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--{{DATA}}&amp;\u2028\ud800"
    run = example_run.write_run(tmp_path / "run", 20, tensors=2, every=5, recipe=evil)
    text = write([run], tmp_path / "page.html").read_text()
    page = Scripts(text)
    assert page.tags.count("script") == 2, "a name ended an element"
    assert "alert(1)</script>" not in text and text.count("<!--") == 0
    data = json.loads(page.held["script"][0])
    assert (
        data["runs"][0]["recipe"] == evil
        and example_run.EVIL in data["runs"][0]["heat"]["kinds"]["gradient"]["modules"]
    )


def test_page_size_does_not_grow_with_the_run(tmp_path: Path) -> None:
    short, long = (
        write(
            [example_run.write_run(tmp_path / str(steps), steps, tensors=4, every=steps // 40)],
            tmp_path / f"{steps}.html",
        )
        for steps in (4000, 16_000)
    )
    assert long.stat().st_size < 1.15 * short.stat().st_size < 1_000_000


def test_many_runs_share_the_size_budget(tmp_path: Path) -> None:
    runs = [example_run.write_run(tmp_path / f"run{i}", 600, tensors=4, every=50, seed=i) for i in range(12)]
    data = pages.collect(open_inputs(runs))
    assert len({run["name"] for run in data["runs"]}) == 12
    assert data["runs"][0]["name"] == "fp16 seed 0"
    assert max(len(run["curves"]["loss"]["x"]) for run in data["runs"]) <= 1000
    assert len(pages.render(data)) < 8_000_000


def test_runs_that_differ_only_in_seed_form_a_band(tmp_path: Path) -> None:
    runs = [example_run.write_run(tmp_path / f"run{i}", 900, seed=i) for i in range(3)]
    other = example_run.write_run(tmp_path / "other", 900, seed=0, recipe="bf16")
    data = pages.collect(open_inputs([*runs, other]))
    [band] = data["bands"]
    assert band["name"] == "fp16, 3 seeds" and len(band["runs"]) == 3 and len(band["x"]) == 400
    inside = [lo <= y <= hi for lo, y, hi in zip(band["lo"], band["y"], band["hi"], strict=True) if y is not None]
    assert all(inside) and len(inside) >= 399
    apart = example_run.write_run(tmp_path / "apart", 900, seed=4, learning_rate=5.0)
    assert len(pages.collect(open_inputs([runs[0], apart]))["bands"]) == 0


def test_run_names_are_distinct(tmp_path: Path) -> None:
    folders = [example_run.write_run(tmp_path / name / "x", 5) for name in ("a", "b")]
    runs = open_inputs(folders).runs
    assert pages.name_runs(runs[:1]) == ["fp16"]
    assert pages.name_runs(runs) == [f"fp16 seed 0 in x {folder}" for folder in folders]
    other = example_run.write_run(tmp_path / "c", 5, seed=3)
    assert pages.name_runs(open_inputs([folders[0], other]).runs) == ["fp16 seed 0", "fp16 seed 3"]
    narrow = example_run.write_run(tmp_path / "d", 5, recipe="fp8")
    assert pages.name_runs(open_inputs([folders[0], other, narrow]).runs) == ["fp16 seed 0", "fp16 seed 3", "fp8"]


@pytest.mark.parametrize("exists", [True, False])
def test_out_is_a_file_or_a_folder(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "v1.5"
    if exists:
        folder.mkdir()
    assert pages.resolve_output(folder) == folder / "report.html"
    assert pages.resolve_output(tmp_path / "a.html") == tmp_path / "a.html"
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UsageError, match=r"not \.html"):
        pages.resolve_output(tmp_path / "notes.txt")


def test_unwritable_output_is_refused(tmp_path: Path) -> None:
    run = example_run.write_run(tmp_path / "run", 5)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write([run], tmp_path / "file" / "page.html")
    [page] = example_results.save(tmp_path, bench=example_results.bench())
    target = page.rename(tmp_path / "bench.html")
    with pytest.raises(UsageError, match="one of the inputs"):
        write([target], target)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SETTINGS, st.lists(EVENTS, max_size=6))
@example({}, [{"step": 3, "kind": "prediction", "breaks": 1}])
def test_any_record_gives_a_page(tmp_path: Path, configuration: dict, events: list[dict]) -> None:
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(configuration))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    data = pages.collect(open_inputs([folder]))
    json.loads(pages.to_inline_json(data))


def test_empty_run_gives_a_page(tmp_path: Path) -> None:
    example_run.configure(tmp_path / "run", 10)
    assert "no steps recorded yet" in write([tmp_path / "run"], tmp_path).read_text()


def test_report_does_not_import_torch(tmp_path: Path) -> None:
    run = example_run.write_run(tmp_path / "run", 20, tensors=2, every=5)
    code = (
        "import sys; from pathlib import Path; from narrowgauge.report import write, live\n"
        f"write([Path({str(run)!r})], Path({str(tmp_path)!r}))\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
