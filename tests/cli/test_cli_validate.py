"""``narrowgauge validate``: verdicts on real runs, cached runs, and one-line errors."""

import json
import resource
import subprocess
from pathlib import Path

import pytest

import forked
from narrowgauge.cli import main
from narrowgauge.recipe import split

TASK = f"{Path(__file__).resolve().parents[2] / 'bench' / 'small_tasks.py'}:regression"


def validate(capsys, tmp_path, *more):
    code = main(
        ["validate", TASK, "--device", "cpu", "--steps", "60", "--out", str(tmp_path / "store"), "--json", *more]
    )
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_verdicts_and_cached_runs(capsys, tmp_path):
    """A recipe compared with itself is equivalent, one that cannot learn is worse; repeating it trains nothing."""
    arguments = ("--candidates", "fp32[checkpoint=none],fp16[loss_scale=1e-6]", "--seeds", "3", "--margin", "0.05")
    code, data, err = validate(capsys, tmp_path, *arguments)
    assert code == 1
    same, bad = data["candidates"]["fp32[checkpoint=none]"], data["candidates"]["fp16[loss_scale=1e-6]"]
    assert (same["recipe"], bad["recipe"]) == ("fp32", "fp16[loss_scale=1e-06]")
    assert same["verdict"] == "equivalent" and same["gap"] == 0 and same["losses"] == data["losses"]
    assert bad["verdict"] == "worse" and bad["gap"] > 0.05 and bad["interval"][0] > 0.05
    assert {"verdict", "gap", "interval", "margin", "detectable", "diverged"} <= set(bad)
    assert "6 of 9" in err and "(cached)" in err  # fp32 compared with fp32 is the same run
    code, again, err = validate(capsys, tmp_path, *arguments)
    assert data.pop("seconds") > again.pop("seconds") and again == data and "s left" not in err


def test_one_seed_is_inconclusive(capsys, tmp_path):
    code, data, _ = validate(capsys, tmp_path, "--candidates", "bf16", "--seeds", "1")
    assert code == 1 and data["candidates"]["bf16"]["verdict"] == "inconclusive"
    assert data["candidates"]["bf16"]["seeds_needed"] == 3


@pytest.fixture
def task_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text((Path(__file__).resolve().parents[1] / "validate" / "faulty_tasks.py").read_text())
    return path


def test_comparison_with_a_saved_validation(capsys, tmp_path, task_file):
    saved = tmp_path / "saved.json"
    command = ["validate", f"{task_file}:healthy", "--device", "cpu", "--steps", "10", "--seeds", "3", "--json"]
    arguments = ["--candidates", "bf16", "--margin", "0.02", "--save", str(saved), "--out", str(tmp_path)]
    assert main([*command, *arguments]) == 0
    capsys.readouterr()
    assert main(["validate", "--against", str(saved), "--device", "cpu", "--json"]) == 0
    gate = json.loads(capsys.readouterr().out)["gate"]
    assert gate["ok"] and gate["rows"][0]["gap"] == 0 and gate["rows"][0]["verdict"] == "equivalent"
    assert gate["rows"][0]["decibels_before"] == gate["rows"][0]["decibels_now"] > 40

    text = task_file.read_text()
    rounded = "model(x).to(torch.float8_e5m2).float()"  # a rounding in the loss that only affects the candidate
    spoilt = text.replace("model(x).float()", f"({rounded} if model(x).dtype is torch.bfloat16 else model(x).float())")
    assert spoilt != text
    task_file.write_text(spoilt)
    assert main(["validate", "--against", str(saved), "--device", "cpu", "--json"]) == 1
    captured = capsys.readouterr()
    assert not json.loads(captured.out)["gate"]["ok"] and "weight gradients dropped from" in captured.err


@pytest.fixture
def saved(capsys, tmp_path, task_file, monkeypatch):
    """A validation of runs of 10 steps, saved with a margin of 2%."""
    monkeypatch.chdir(tmp_path)
    command = ["validate", f"{task_file}:healthy", "--device", "cpu", "--steps", "10", "--seeds", "3", "--no-layers"]
    assert main([*command, "--margin", "0.02", "--save", "saved.json", "--out", "runs"]) == 0
    capsys.readouterr()
    return "saved.json"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([TASK], f"task {TASK}: saved.json has "),
        (["gpt-tiny"], "task gpt-tiny: saved.json has "),
        (["mine.py:healthy", "--steps", "11"], "--steps 11: saved.json has 10, and losses of different trainings"),
        (["--reference", "bf16", "--candidates", "bf16"], "--reference bf16: saved.json has fp32"),
        (["--lr", "0.5"], "--lr 0.5: saved.json has none"),
        (["--optimizer", "muon"], "--optimizer muon: saved.json has adamw"),
        (["--data", "mine.py"], "mine.py: saved.json has none"),
        (["--margin", "2"], "--margin 2.0: expected a fraction"),
    ],
)
def test_another_training_is_not_compared_with_a_saved_one(arguments, text, capsys, saved):
    assert main(["validate", *arguments, "--against", saved, "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == 1


def test_the_margin_of_a_comparison_with_a_saved_validation(capsys, saved):
    data = json.loads(Path(saved).read_text())
    data["candidates"]["bf16"]["losses"] = [loss * 0.99 for loss in data["candidates"]["bf16"]["losses"]]
    Path(saved).write_text(json.dumps(data))
    for margin, wanted in (([], 0.02), (["--margin", "0.0001"], 0.0001)):
        command = ["validate", "mine.py:healthy", "--against", saved, "--device", "cpu", "--no-layers", "--json"]
        code = main([*command, *margin])
        found = json.loads(capsys.readouterr().out)
        assert found["margin"] == found["candidates"]["bf16"]["margin"] == wanted
        assert (code, found["gate"]["rows"][0]["verdict"]) == ((1, "worse") if margin else (0, "equivalent"))


def test_data_of_a_saved_validation(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one.txt", "two.txt", "other/one.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("abcdefghij\n" * 400)
    common = ["--device", "cpu", "--no-layers", "--out", "runs"]
    command = ["validate", "gpt:1x64", "--context", "16", "--batch", "2", "--steps", "2", "--seeds", "1", *common]
    assert main([*command, "--vocab", "256", "--data", "one.txt", "--save", "saved.json"]) in (0, 1)
    assert main(["validate", "--against", "saved.json", "--data", "other/one.txt", *common]) == 0
    capsys.readouterr()
    assert main(["validate", "--against", "saved.json", "--data", "two.txt", *common]) == 2
    assert "two.txt: saved.json has " in capsys.readouterr().err
    Path("one.txt").write_text("abcdefghij\n" * 401)
    assert main(["validate", "--against", "saved.json", *common]) == 2
    assert "one.txt: it has 4,411 bytes, and had 4,400 in saved.json" in capsys.readouterr().err


def test_a_lower_rate_of_shorter_runs_is_saved(tmp_path, task_file, monkeypatch):
    """Without ``--steps`` runs may be shorter than the task's, with a lower learning rate: new runs have it, too."""
    monkeypatch.setattr("narrowgauge.validate.run.choose_steps", lambda *arguments: 10)
    saved = tmp_path / "saved.json"
    common = ["--device", "cpu", "--no-layers", "--out", str(tmp_path / "runs"), "--seeds", "2"]
    assert main(["validate", f"{task_file}:healthy", *common, "--save", str(saved)]) in (0, 1)
    before = json.loads(saved.read_text())
    assert before["steps"] == 10 and before["options"]["lr"] is not None
    assert main(["validate", "--against", str(saved), *common, "--save", str(saved)]) == 0
    assert json.loads(saved.read_text())["losses"] == before["losses"]


def test_invalid_saved_validation_is_refused(capsys, tmp_path):
    for name, text, said in [("no", None, "No such file"), ("bad", "{", "not JSON"), ("other", "[1]", "not a saved")]:
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        assert main(["validate", "--against", str(path)]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1


def test_comparison_of_finished_runs(capsys, tmp_path):
    for side, shift in (("fp32", 0.0), ("bf16", 0.0002), ("bad", 0.1)):
        for seed in range(4):
            path = tmp_path / side / f"seed{seed}.jsonl"
            path.parent.mkdir(exist_ok=True)
            lines = [{"step": step, "eval_loss": 2 + 1 / step + 0.01 * seed + shift} for step in range(1, 60)]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fp32, bf16, bad = (str(tmp_path / side) for side in ("fp32", "bf16", "bad"))
    assert main(["validate", "--curves", fp32, bf16, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["candidates"][bf16]
    assert found["verdict"] == "equivalent" and found["gap"] == pytest.approx(1e-4, rel=0.02)
    assert main(["validate", "--curves", fp32, bad, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["candidates"][bad]["verdict"] == "worse"
    assert main(["validate", "--curves", fp32, str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_comparison_of_finished_runs_names_the_values(capsys, tmp_path):
    for side in ("fp32", "bf16"):
        rows = [{"step": step, "loss": 1.0, "eval_accuracy": 0.5} for step in range(20)]
        (tmp_path / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["validate", "--curves", *(str(tmp_path / f"{side}.jsonl") for side in ("fp32", "bf16"))]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "fp32.jsonl: 'loss' by step 0 to 19" in out and "bf16.jsonl: 'loss' by step 0 to 19" in out
    assert "count as better" not in out
    assert main([*command, "--tag", "eval_accuracy"]) == 1
    assert "lower values of 'eval_accuracy' count as better" in capsys.readouterr().out


def test_recipes_with_commas():
    assert split("bf16, fp8[history=4,margin=1] ,fp16") == ["bf16", "fp8[history=4,margin=1]", "fp16"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--candidates", " , "], "at least one"),
        (["--seeds", "0"], "--seeds 0"),
        (["--seeds", "many"], "expected auto"),
        (["--margin", "2"], "--margin 2.0"),
        (["--candidates", "bf17"], "unknown recipe"),
        (["--candidates", "tf32"], "tensor cores"),
    ],
)
def test_bad_input_gives_a_one_line_error(capsys, argv, text):
    assert main(["validate", TASK, "--device", "cpu", *argv]) == 2
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == 1


def run_limited(argv):
    """Run the command line with files of at most 3 kB, which fails like a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, resource.RLIM_INFINITY))
    return main(argv)


@pytest.mark.parametrize("length", [["--steps", "60"], []], ids=["run", "pilot run"])
def test_a_file_that_cannot_be_written(length, tmp_path):
    command = ["validate", TASK, *length, "--seeds", "1", "--no-layers", "--device", "cpu", "--out", str(tmp_path)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forked.start(run_limited, command, **streams) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.count("\n") == 1, err
    assert "File too large; raise the file size limit (ulimit -f), then repeat the validation; what was" in err


def test_data_that_is_not_finite(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom narrowgauge import Task\n"
        "def task():\n"
        "    return Task(model=lambda: torch.nn.Linear(4, 4), name='mine', steps=3,\n"
        "                batch=lambda step, split: torch.full((2, 4), float('nan') if step else 1.0),\n"
        "                loss=lambda model, x: model(x).square().mean())\n"
    )
    command = ["validate", f"{tmp_path / 'mine.py'}:task", "--seeds", "1", "--no-layers", "--device", "cpu"]
    assert main([*command, "--steps", "3", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("NaN or infinite values; fix the data, then repeat the validation\n")
