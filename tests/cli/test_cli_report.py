"""``narrowgauge report``: its JSON, the output path, and one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from narrowgauge import cli
from narrowgauge.runs import record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    record.write_configuration(folder, {"task": "t", "options": {}, "settings": {"recipe": "fp32", "steps": 2}})
    with record.Record(folder) as book:
        for step in (1, 2):
            book.append("step", step, loss=1.0 / step, lr=0.1, grad_norm=1.0, loss_scale=1.0, applied=True)
    return folder


def test_page_is_written_into_the_run_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"path": str(run / "report.html")}
    assert "MB" in shown.err and (run / "report.html").is_file()


def test_out_sets_the_path(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(run), "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert cli.main(["report", str(run), "--out", str(tmp_path / "folder")]) == 0
    assert (tmp_path / "new" / "page.html").is_file() and (tmp_path / "folder" / "report.html").is_file()
    assert "page.html" in capsys.readouterr().out


def test_report_of_several_runs_goes_to_the_working_directory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("run.json", "events.jsonl"):
        (other / name).write_bytes((run / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(run), str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "report.html"}


@pytest.mark.parametrize("arguments", [["gone"], ["."], ["notes.txt"], ["run", "--out", "notes.txt"]])
def test_bad_inputs_give_a_one_line_error(
    run: Path, tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    assert cli.main(["report", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("narrowgauge: ") and shown.err.count("\n") == 1


def test_missing_path_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["report"])
    assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_report_verb_does_not_import_torch(run: Path) -> None:
    code = (
        f"import sys; from narrowgauge.cli import main\nassert main(['report', {str(run)!r}]) == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
