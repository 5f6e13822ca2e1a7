"""``narrowgauge lint``: scripts, folders and tasks; findings decide the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from narrowgauge import cli
from narrowgauge.lint.rules import RULES

SCRIPTS = Path(__file__).parent.parent / "lint" / "scripts"
TASK = """
import torch
from torch import nn
import torch.nn.functional as F
import narrowgauge as ng

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 130)
        self.last = nn.Linear(130, 16)

    def forward(self, x):
        weights = torch.exp(self.first(x))
        return self.last(weights / weights.sum(-1, keepdim=True))

def make(optimizer="AdamW"):
    return ng.Task(
        model=Net,
        batch=lambda step, split: torch.zeros(8, 64),
        loss=lambda model, x: model(x).sum(),
        optimizer=lambda model, lr: getattr(torch.optim, optimizer)(model.parameters(), lr=lr),
    )

def stubborn():
    return ng.Task(model=lambda: nn.Linear(int(torch.ones(()).item()) * 64, 64), batch=None, loss=None)

def broken():
    return ng.Task(model=lambda: nn.Linear(64, "a"), batch=None, loss=None)

def no_optimizer():
    return ng.Task(model=Net, batch=None, loss=None, optimizer=lambda model, lr: 1 / 0)
"""


def lint(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["lint", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["lint", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("narrowgauge: ") and error.count("\n") == 1
    return error


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "my_task.py"
    path.write_text(TASK)
    return path


def test_json_output_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    path = SCRIPTS / "planted" / "clip_before_unscale.py"
    code, data = lint(capsys, str(path))
    assert code == 1
    (finding,) = data["findings"]
    assert {"rule", "where", "detail", "fix", "severity", "why", "path", "line"} == set(finding)
    assert finding["rule"] == "clip-before-unscale" and finding["where"] == f"{path}:{finding['line']}"
    assert data["checked"] == {str(path): "script"}


def test_text_output_has_location_reason_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", str(SCRIPTS / "planted" / "scaler_with_bf16.py")]) == 1
    text = capsys.readouterr().out
    assert "scaler_with_bf16.py:15  warning  scaler-with-bf16" in text
    assert "why   BF16 has FP32's range" in text and "fix   remove the scaler" in text
    assert text.splitlines()[-1].startswith("1 warning: ")


def test_clean_scripts_and_notes_exit_with_zero(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    clean = str(SCRIPTS / "clean" / "nanogpt_style.py")
    assert lint(capsys, clean, str(SCRIPTS / "clean" / "gan_style.py"))[0] == 0
    note = tmp_path / "note.py"
    note.write_text("import torch\nfrom torch import nn\nlayer = nn.Linear(500, 512)\n")
    code, data = lint(capsys, str(note), "--recipe", "bf16")
    assert code == 0 and [finding["severity"] for finding in data["findings"]] == ["note"]


def test_a_folder_and_several_files_in_one_call(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    clean = SCRIPTS / "clean" / "hf_style.py"
    code, data = lint(capsys, str(SCRIPTS / "planted"), str(clean), str(tmp_path))
    assert code == 1
    assert data["checked"] == {str(SCRIPTS / "planted"): "folder", str(clean): "script", str(tmp_path): "folder"}
    assert {"unscale-twice", "manual-attention", "syntax"} <= {finding["rule"] for finding in data["findings"]}


def test_a_task_is_checked_with_its_model_optimizer_and_file(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    code, data = lint(capsys, f"{task}:make", "--recipe", "fp16")
    assert code == 1
    places = {(finding["rule"], finding["where"]) for finding in data["findings"]}
    assert places == {("off-multiple", "first"), ("off-multiple", "last"), ("manual-softmax", f"{task}:15")}
    assert data["checked"] == {f"{task}:make": "task under fp16"}
    assert {finding["line"] for finding in data["findings"]} == {15, 17}  # modules: the line of the task's function


def test_models_that_fail_on_the_meta_device_are_built_on_the_cpu(
    capsys: pytest.CaptureFixture[str], task: Path
) -> None:
    code, data = lint(capsys, f"{task}:stubborn", "--recipe", "bf16[keep=nothing]")
    assert code == 1
    assert {finding["rule"] for finding in data["findings"]} == {"keep-names-nothing", "manual-softmax"}


def test_built_in_tasks_have_no_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(capsys, "gpt-tiny", "--recipe", "fp8") == (
        0,
        {"findings": [], "checked": {"gpt-tiny": "task under fp8"}, "sarif": None},
    )


def test_without_arguments_an_empty_folder_checks_the_default_task(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, data = lint(capsys, "--device", "cpu")
    assert code == 0 and list(data["checked"]) == ["gpt-tiny"]
    assert "fp32" not in data["checked"]["gpt-tiny"]


def test_sarif_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "deep" / "lint.sarif"
    code, data = lint(capsys, str(SCRIPTS / "planted" / "half_loss.py"), "--sarif", str(target))
    assert code == 1 and data["sarif"] == str(target)
    log = json.loads(target.read_text())
    assert [result["ruleId"] for result in log["runs"][0]["results"]] == ["half-loss"]


def test_sarif_has_line_and_module_path_for_tasks(task: Path, tmp_path: Path) -> None:
    target = tmp_path / "lint.sarif"
    assert cli.main(["lint", f"{task}:make", "--recipe", "bf16", "--sarif", str(target)]) == 1
    results = json.loads(target.read_text())["runs"][0]["results"]
    place = next(result["locations"][0] for result in results if result["ruleId"] == "off-multiple")
    assert place["logicalLocations"][0]["fullyQualifiedName"] == "first"
    assert place["physicalLocation"]["region"]["startLine"] == 17


def test_rules_option_lists_all_rules(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = lint(capsys, "--rules")
    assert code == 0 and [rule["name"] for rule in data["rules"]] == list(RULES)
    assert cli.main(["lint", "--rules"]) == 0
    assert "clip-before-unscale" in capsys.readouterr().out


def test_bad_input_gives_a_one_line_error(capsys: pytest.CaptureFixture[str], task: Path, tmp_path: Path) -> None:
    assert "no file or folder 'absent.py'" in failure(capsys, "absent.py")
    assert "no file or folder 'some/where'" in failure(capsys, "some/where")
    assert "did you mean gpt-tiny" in failure(capsys, "gpt-tin")
    assert "has no function 'nothing'; it has" in failure(capsys, f"{task}:nothing")
    assert "there is no file" in failure(capsys, f"{tmp_path}/absent.py:make")
    assert "unknown recipe 'fp7'" in failure(capsys, str(task), "--recipe", "fp7")
    assert "its model cannot be created: TypeError" in failure(capsys, f"{task}:broken")
    assert "its optimizer cannot be created: ZeroDivisionError" in failure(capsys, f"{task}:no_optimizer")
    (tmp_path / "broken.py").write_text("x = (\n")
    assert "broken.py:1 is not valid Python" in failure(capsys, str(tmp_path / "broken.py"))
    assert "cannot write" in failure(capsys, str(task), "--sarif", str(task / "x.sarif"))


def test_scripts_are_checked_without_importing_torch() -> None:
    script = SCRIPTS / "planted" / "half_model.py"
    code = (
        "import sys; from narrowgauge.cli import main\n"
        f"assert main(['lint', {str(script)!r}, '--recipe', 'fp16']) == 1\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
