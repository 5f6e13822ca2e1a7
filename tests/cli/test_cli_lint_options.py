"""Options of ``narrowgauge lint`` that linters usually have: selection, failure, baseline, stdin, configuration."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from narrowgauge import cli

SERIOUS = """import torch
def step(model, optimizer, scaler, loss):
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
ADVICE = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
BUG = "import torch\nscaler = torch.amp.GradScaler('cuda', init_scale=1.0)\n"
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("serious.py", SERIOUS), ("advice.py", ADVICE), ("bug.py", BUG)):
        Path(name).write_text(text)
    return tmp_path


def lint(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], dict[str, Any]]:
    code = cli.main(["lint", "--json", *arguments])
    data = json.loads(capsys.readouterr().out)
    return code, [finding["rule"] for finding in data["findings"]], data


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["lint", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("narrowgauge: ") and error.count("\n") == 1
    return error


ALL = ["deprecated-amp", "scale-settings", "clip-before-unscale"]


def test_the_current_folder_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    code, rules, data = lint(capsys)
    assert (code, rules, data["checked"]) == (1, ALL, {".": "folder"})


def test_fail_on(capsys: pytest.CaptureFixture[str]) -> None:
    codes = {
        (name, level): lint(capsys, f"{name}.py", *(["--fail-on", level] if level else []))[0]
        for name in ("serious", "advice", "bug")
        for level in ("", "serious", "warning", "note")
    }
    assert [name for name, code in codes.items() if code == 0] == [
        ("advice", ""),
        ("advice", "serious"),
        ("bug", "serious"),
    ]


def test_select_and_ignore(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(capsys, ".", "--select", "deprecated-amp,scale-settings")[1] == ALL[:2]
    assert lint(capsys, ".", "--select", "clip-*", "--select", "deprecated-amp")[1] == [ALL[0], ALL[2]]
    assert lint(capsys, ".", "--ignore", "clip-before-unscale, scale-settings")[:2] == (0, ALL[:1])
    assert "did you mean clip-before-unscale?" in refused(capsys, ".", "--select", "clip-before-unscal")
    assert "there is no rule 'zzz'" in refused(capsys, ".", "--ignore", "zzz")


def test_exclude(capsys: pytest.CaptureFixture[str]) -> None:
    Path("old/deep").mkdir(parents=True)
    Path("old/deep/a.py").write_text(SERIOUS)
    assert len(lint(capsys, ".")[1]) == 4
    for pattern in ("old", "old/", "old/*", "deep", "*/deep", "a.py", "./old"):
        assert lint(capsys, ".", "--exclude", pattern)[1] == ALL
    code, rules, data = lint(capsys, "advice.py", "serious.py", "--exclude", "serious.py")
    assert (code, rules, data["checked"]["serious.py"]) == (0, ALL[:1], "excluded")


def test_configuration_in_pyproject(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    table = "[tool.narrowgauge.lint]\n"
    Path("pyproject.toml").write_text(f'{table}ignore = ["clip-*"]\nexclude = ["bug.py"]\nfail-on = "warning"\n')
    assert lint(capsys)[:2] == (1, ALL[:1])
    assert lint(capsys, "--ignore", "deprecated-amp")[1] == ALL[2:]
    assert lint(capsys, "--fail-on", "serious")[0] == 0
    Path("inner").mkdir()
    monkeypatch.chdir("inner")
    assert lint(capsys, "../serious.py")[:2] == (0, [])
    for line, reason in (
        ("selct = []", "'selct' in [tool.narrowgauge.lint] is unknown"),
        ('ignore = "clip"', "expected a list of strings"),
        ("fail-on = 1", "expected a string"),
        ('fail-on = "error"', "'error' is unknown"),
        ('select = ["zzz"]', "there is no rule 'zzz'"),
        ("x = ", "is not valid TOML"),
    ):
        Path("pyproject.toml").write_text(f"{table}{line}\n")
        assert reason in refused(capsys, "../serious.py")
    Path("pyproject.toml").write_text("[project]\nname = 'a'\n")  # without the table: the one above counts
    assert lint(capsys, "../serious.py")[:2] == (0, [])


def test_a_file_that_cannot_be_read_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text("def f(:\n")
    Path("config.json").write_text("{}")
    code, rules, data = lint(capsys, "broken.py", "absent.py", "config.json", "serious.py")
    assert code == 1 and sorted(rules) == ["clip-before-unscale", "syntax", "syntax", "syntax"]
    assert data["checked"]["absent.py"] == "unreadable" and data["checked"]["serious.py"] == "script"
    assert "and 2 more that cannot be read" in refused(capsys, "broken.py", "absent.py", "config.json")
    assert "is JSON, but not a notebook" in refused(capsys, "config.json")
    assert "no file or folder 'absent.ipynb'" in refused(capsys, "absent.ipynb")


def test_baseline_hides_known_findings_until_there_are_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(capsys, ".", "--write-baseline", "known.json")[:2] == (0, ALL)
    assert lint(capsys, ".", "--baseline", "known.json")[:2] == (0, [])
    Path("serious.py").write_text("# a new line\n" + SERIOUS)
    assert lint(capsys, ".", "--baseline", "known.json")[:2] == (0, [])
    assert lint(capsys, str(Path.cwd()), "--baseline", "known.json")[:2] == (0, [])
    Path("serious.py").write_text(SERIOUS + SERIOUS)
    assert lint(capsys, ".", "--baseline", "known.json")[:2] == (1, ["clip-before-unscale"])
    Path("pyproject.toml").write_text('[tool.narrowgauge.lint]\nbaseline = "known.json"\n')
    assert lint(capsys, "advice.py", "--fail-on", "note")[:2] == (0, [])
    for text in ("[]", "{", '{"version": 2}', '{"version": 1, "findings": [{}]}'):
        Path("known.json").write_text(text)
        assert "known.json" in refused(capsys, ".")
    assert "cannot read" in refused(capsys, ".", "--baseline", "absent.json")


def test_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    give(SERIOUS)
    code, rules, data = lint(capsys, "-")
    assert (code, rules) == (1, ["clip-before-unscale"])
    assert data["findings"][0]["where"] == "<stdin>:4" and data["checked"] == {"-": "stdin"}
    give(SERIOUS)
    assert lint(capsys, "--stdin", "--stdin-filename", "src/a.py")[2]["findings"][0]["where"] == "src/a.py:4"
    give(json.dumps({"cells": [{"cell_type": "code", "source": SERIOUS}]}))
    found = lint(capsys, "--stdin-filename", "a.ipynb")[2]["findings"]
    assert found[0]["where"] == "a.ipynb:cell 1:4"
    give("def f(:")
    assert "<stdin>:1 is not valid Python" in refused(capsys, "--stdin")
    assert "cannot be combined" in refused(capsys, "--stdin", "serious.py")


@pytest.mark.parametrize(
    ("arguments", "code"), [(["-"], 1), (["--stdin"], 1), ([], 1), (["serious.py"], 1), (["gpt-tiny"], 2)]
)
def test_without_torch(arguments: list[str], code: int) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\nfrom narrowgauge.cli import main\n"
        f"sys.exit(main(['lint', *{arguments!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=SERIOUS, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == code and "Traceback" not in done.stderr
    assert ("clip-before-unscale" in done.stdout) == (code == 1)


def test_the_pre_commit_hook_accepts_the_files_that_it_gets(capsys: pytest.CaptureFixture[str]) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["language"] == "python" and hook["types_or"] == ["python", "jupyter"]
    program, verb = hook["entry"].split()
    assert program == "narrowgauge" and lint(capsys, "advice.py", "bug.py")[0] == 1
    assert cli.make_parser().parse_args([verb, "a.py", "b.ipynb"]).targets == ["a.py", "b.ipynb"]
