"""``--optimizer muon`` of train and validate: trains, resumes to the bit, and says what is wrong in one line."""

import dataclasses
import json
import shutil

import pytest

import narrowgauge as ng
from narrowgauge import tasks
from narrowgauge.cli import main
from narrowgauge.report.run_data import RunData
from narrowgauge.runs import record
from narrowgauge.runs.checkpoints import checkpoint
from narrowgauge.task import make_plain_optimizers

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


TWO = """
import torch
from narrowgauge import Task

def make(returns: str = "two"):
    def optimizer(model, rate):
        if returns == "nothing":
            return None
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        return [torch.optim.SGD(matrices, lr=0.2, momentum=0.9), torch.optim.AdamW(vectors, lr=rate)]

    def batch(step, split):
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))

    def make_model():
        return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))

    return Task(name="two", model=make_model, batch=batch, loss=lambda m, x: m(x).square().mean(), optimizer=optimizer)
"""


@pytest.mark.parametrize("recipe", ["fp32", "bf16-lean"])
def test_a_task_may_have_two_optimizers(recipe, tmp_path, capsys):
    (tmp_path / "two.py").write_text(TWO)
    task = f"{tmp_path / 'two.py'}:make"
    common = ["--device", "cpu", "--recipe", recipe, "--steps", "6", "--checkpoint-every", "3", "--log", "none"]
    assert train(capsys, task, *common, "--out", str(tmp_path / "whole"))[0] == 0
    part = shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(checkpoint.make_path(part, 6))
    record.truncate_after(part, 3)
    assert train(capsys, "--resume", str(part))[0] == 0
    assert read_losses(part) == read_losses(tmp_path / "whole")
    listed = json.loads((part / "run.json").read_text())["optimizers"]
    assert [line.split(",")[0] for line in listed] == ["SGD", "AdamW"]


def test_a_task_with_two_optimizers_is_linted_and_forecast(tmp_path, capsys):
    (tmp_path / "two.py").write_text(TWO)
    task = f"{tmp_path / 'two.py'}:make"
    assert main(["lint", task]) == 0
    assert main(["memory", task, "--recipes", "bf16-lean", "--gpu", "h200"]) == 0
    assert "bf16-lean" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["train", "memory", "lint"])
def test_a_task_whose_optimizer_is_none(verb, tmp_path, capsys):
    (tmp_path / "two.py").write_text(TWO)
    code = main(
        [verb, f"{tmp_path / 'two.py'}:make", "--returns", "nothing", *(["--device", "cpu"] * (verb == "train"))]
    )
    assert code == 2
    expected = "task two: optimizer made a NoneType; expected a torch optimizer, or a list of them"
    assert expected in capsys.readouterr().err


VALIDATE = ["validate", "gpt:2x64", "--context", "16", "--batch", "4", "--device", "cpu", "--seeds", "2", "--json"]


def test_validate_trains_with_muon(tmp_path, capsys):
    found = {}
    common = [*VALIDATE, "--steps", "4", "--no-layers", "--out", str(tmp_path / "runs")]
    for name in ("adamw", "muon"):
        assert main([*common, "--optimizer", name, "--save", str(tmp_path / f"{name}.json")]) in (0, 1)
        found[name] = json.loads(capsys.readouterr().out)
        assert found[name]["optimizer"] == name
    assert found["adamw"]["losses"] != found["muon"]["losses"]
    used = [json.loads(file.read_text())["optimizers"][0] for file in tmp_path.glob("runs/*/run.json")]
    assert sorted(line.partition(",")[0] for line in used) == ["AdamW"] * 4 + ["Muon (muon)"] * 4
    assert main(["validate", "--against", str(tmp_path / "muon.json"), "--no-layers", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["losses"] == found["muon"]["losses"]


def test_validate_chooses_the_length_for_the_optimizer(tmp_path):
    task = tasks.find("gpt:2x64", context=16, batch=4)
    for name in ("adamw", "muon"):
        small = dataclasses.replace(task, steps=3)
        ng.validate(lambda seed, task=small: task, seeds=1, optimizer=name, budget_s=60, device="cpu", out=tmp_path)
    assert len(list(tmp_path.glob("length-*"))) == 2


@pytest.mark.parametrize("verb", [VALIDATE, ["bench", "gpt:2x64", "--device", "cpu"]])
def test_an_unknown_optimizer_is_one_line(verb, tmp_path, capsys):
    code = main([*verb, "--out", str(tmp_path), "--optimizer", "sophia"])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and "--optimizer sophia: expected adamw or muon" in lines[-1] and len(lines) <= 2, lines


@pytest.fixture
def stepped(monkeypatch):
    """The names of the optimizers of all steps that are measured."""
    from narrowgauge.bench import compare

    names = []

    def make(task, model):
        found = make_plain_optimizers(task, model)
        names.append("+".join(type(one).__name__ for one in found))
        return found

    monkeypatch.setattr(compare, "make_plain_optimizers", make)
    return names


def test_speed_at_equal_loss_is_measured_with_muon(stepped, tmp_path, capsys):
    command = [*VALIDATE, "--steps", "6", "--no-layers", "--out", str(tmp_path), "--optimizer", "muon", "--time"]
    assert main(command) in (0, 1)
    assert json.loads(capsys.readouterr().out)["candidates"]["bf16"]["speed"]["step_ratio"] > 0
    assert stepped == ["Muon"] * 3


def test_bench_steps_with_muon(stepped, tmp_path, capsys):
    common = ["bench", "gpt:2x64", "--context", "16", "--batch", "2", "--device", "cpu", "--json"]
    once = ["--steps", "1", "--rounds", "1", "--peers", "torch"]
    path = tmp_path / "muon.json"
    assert main([*common, *once, "--recipes", "fp32", "--optimizer", "muon", "--save", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer"] == "muon" and stepped == ["Muon"] * 2
    assert main(["bench", "--against", str(path), "--rounds", "1", "--device", "cpu", "--json"]) in (0, 1)
    assert stepped == ["Muon"] * 4, "a saved benchmark is repeated with its optimizer"
    capsys.readouterr()
    assert main(["bench", "--against", str(path), "--optimizer", "adamw", "--device", "cpu"]) == 2
    assert "was measured with optimizer muon, not adamw" in capsys.readouterr().err
    old = json.loads(path.read_text())
    del old["optimizer"]
    path.write_text(json.dumps(old))
    assert main(["bench", "--against", str(path), "--optimizer", "muon", "--device", "cpu"]) == 2
    assert "was measured with optimizer adamw, not muon" in capsys.readouterr().err


def test_validate_refuses_muon_for_a_candidate_with_its_own_optimizer(tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    candidate = f"bf16@{tmp_path / 'two.py'}:make"
    with pytest.raises(ng.UsageError, match="--optimizer muon: task two makes its own optimizer"):
        ng.validate("gpt:2x64", [candidate], optimizer="muon", device="cpu", out=tmp_path)
