"""``train --optimizer muon``: trains, resumes to the bit, and says what is wrong in one line."""

import json
import shutil

import pytest

from narrowgauge.cli import main
from narrowgauge.report.run_data import RunData
from narrowgauge.runs import record
from narrowgauge.runs.checkpoints import checkpoint

TASK = [
    "gpt:2x64",
    "--context",
    "16",
    "--batch",
    "8",
    "--device",
    "cpu",
    "--log",
    "none",
    "--watch",
    "0",
    "--lr",
    "0.01",
]


def train(capsys, *arguments):
    code = main(["train", *arguments])
    return code, capsys.readouterr()


def read_losses(folder):
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if "loss" in event]


@pytest.mark.parametrize("recipe", ["fp32", "bf16-lean", "fp8-lean[products=all]"])
def test_a_run_resumes_to_the_bit(recipe, tmp_path, capsys):
    common = [*TASK, "--recipe", recipe, "--optimizer", "muon", "--steps", "6", "--checkpoint-every", "3"]
    assert train(capsys, *common, "--out", str(tmp_path / "whole"))[0] == 0
    part = shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(checkpoint.make_path(part, 6))
    record.truncate_after(part, 3)
    assert train(capsys, "--resume", str(part))[0] == 0
    assert read_losses(part) == read_losses(tmp_path / "whole")
    assert json.loads((part / "run.json").read_text())["settings"]["optimizer"] == "muon"
    code, said = train(capsys, "--resume", str(part), "--optimizer", "adamw")
    assert code == 2 and "--optimizer adamw differs from the setting" in said.err


def test_muon_learns_as_adamw_does(tmp_path, capsys):
    ends = {}
    for name in ("adamw", "muon"):
        folder = tmp_path / name
        assert (
            train(capsys, *TASK, "--recipe", "fp32", "--optimizer", name, "--steps", "20", "--out", str(folder))[0] == 0
        )
        ends[name] = read_losses(folder)[-1]
    assert ends["muon"] < ends["adamw"] + 0.2


def test_other_names_and_tasks_are_refused(tmp_path, capsys):
    code, said = train(capsys, *TASK, "--optimizer", "sophia", "--out", str(tmp_path / "a"))
    assert code == 2 and "--optimizer sophia: expected adamw or muon" in said.err
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom narrowgauge import Task\n"
        "def task():\n"
        "    return Task(model=lambda: torch.nn.Linear(4, 4), batch=lambda step, split: torch.randn(2, 4),\n"
        "                name='mine',\n"
        "                loss=lambda model, x: model(x).square().mean(),\n"
        "                optimizer=lambda model, rate: torch.optim.SGD(model.parameters(), rate))\n"
    )
    arguments = [f"{tmp_path / 'mine.py'}:task", "--device", "cpu", "--optimizer", "muon", "--out", str(tmp_path / "b")]
    code, said = train(capsys, *arguments)
    assert code == 2 and "makes its own optimizer" in said.err


def test_the_report_shows_the_settings_of_both_rules(tmp_path, capsys):
    folder = tmp_path / "run"
    common = [*TASK, "--recipe", "bf16-lean", "--optimizer", "muon", "--steps", "1", "--out", str(folder)]
    assert train(capsys, *common)[0] == 0
    run = RunData(folder)
    run.update()
    shown = run.describe(100, 100, 10)["settings"]
    assert shown["optimizer"] == "muon"
    first, second = shown["optimizer, group 1"], shown["optimizer, group 2"]
    assert first.startswith("Muon (muon), 98,304 parameters: weight_decay 0.1, momentum 0.95, nesterov")
    assert all(text in first for text in ("adjust_lr_fn match_rms_adamw", "master split", "moments 8bit"))
    assert "betas" not in first and "betas (0.9, 0.95)" in second and "ns_steps" not in second


def test_a_step_of_muon_is_captured_and_replayed(tmp_path, capsys):
    folder = tmp_path / "run"
    common = [*TASK, "--recipe", "bf16-lean", "--optimizer", "muon", "--steps", "3", "--out", str(folder)]
    assert train(capsys, *common, "--capture", "3")[0] == 0
    capture = next((folder / "captures").iterdir())
    code = main(["replay", str(capture), "--json", "--device", "cpu"])
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 3 and found["exact"], found
    assert code == 0 or not found["found"]
