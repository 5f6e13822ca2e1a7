"""``narrowgauge validate`` and ``train --predict`` with a user's own files: odd widths, tokens, saved validations."""

import json
import re

import numpy
import pytest

from narrowgauge.cli import main

TASK = """
import torch, narrowgauge as ng
from torch import nn
def make(width: int = 32, batch: int = 8, seed: int = 0, broken: int = 0) -> ng.Task:
    def draw(step, split):
        x = torch.randn(batch, 16, generator=torch.Generator().manual_seed(step + 1000 * seed * (split == "train")))
        sign = torch.tensor(-1.0 if step < broken and split == "train" else 1.0)  # its root is NaN
        return x, (x.sum(1) > 0).long(), sign
    return ng.Task(
        model=lambda: nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)),
        batch=draw,
        loss=lambda model, pair: nn.functional.cross_entropy(model(pair[0]), pair[1]) * pair[2].sqrt(),
        items_per_batch=batch,
        steps=3,
    )
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_task.py").write_text(TASK)
    return "own_task.py:make"


def run(capsys, *argv):
    code = main([*argv, "--device", "cpu"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_format_that_no_layer_runs_in_is_not_tested(capsys, spec):
    wanted = ["validate", spec, "--candidates", "nvfp4", "--seeds", "2", "--out", "runs", "--no-layers", "--json"]
    code, out, err = run(capsys, *wanted, "--width", "37")
    found = json.loads(out)["candidates"]["emulated-nvfp4"]
    assert code == 1 and found["verdict"] == "equivalent" and found["format_share"] == 0
    assert found["answer"].startswith("Would it train in NVFP4? not tested: no layer ran in it")
    assert "NVFP4 (emulated) in 0% of the multiplied parameters" in err
    _, out, _ = run(capsys, *wanted, "--margin", "0.5")
    found = json.loads(out)["candidates"]["emulated-nvfp4"]
    assert "NVFP4 in 100% of the multiplied parameters" in found["answer"] and found["format_share"] == 1
    code, out, _ = run(capsys, *wanted, "--margin", "0.5")  # the runs are cached, and know it
    assert code == 0 and json.loads(out)["candidates"]["emulated-nvfp4"]["answer"] == found["answer"]


def test_predictions_say_why_a_format_is_missing(capsys, spec):
    code, out, _ = run(capsys, "train", spec, "--recipe", "bf16", "--predict", "--width", "37", "--out", "odd")
    assert code == 0
    for name, block in (("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16)):
        assert f"  {name:<12}not measured: no linear layer that it would round" in out
        assert f"multiples of {block})" in out
    assert "fp8         nothing of the model would run in FP8: 37 outputs are not a multiple of 16" in out
    _, out, _ = run(capsys, "train", spec, "--recipe", "bf16", "--predict", "--out", "even")
    assert "fp8         would work" in out
    assert "nvfp4       18 operands" in out or "nvfp4       12 operands" in out
    _, out, _ = run(capsys, "train", spec, "--recipe", "fp8", "--predict", "--out", "fp8")
    assert "predicted   nothing: other formats are predicted from a run in fp32, tf32 or bf16" in out


def test_skipped_updates_predict_nothing(capsys, spec):
    """What is NaN in the run's own format says nothing about another: the run "would work" in FP16, it said."""
    train = ["train", spec, "--recipe", "fp32", "--predict", "--watch", "1"]
    code, out, _ = run(capsys, *train, "--broken", "3", "--out", "all")
    assert code == 1 and "predicted   nothing: no update that was read was applied" in out
    assert "would work" not in out and "would fail" not in out
    _, out, _ = run(capsys, *train, "--broken", "1", "--out", "first")
    assert "fp16        would work up to update 3" in out and "a block has inf or NaN" not in out


def test_candidates_that_were_not_saved_are_refused(capsys, spec):
    assert run(capsys, "validate", spec, "--seeds", "2", "--no-layers", "--out", "runs", "--save", "v.json")[0] == 0
    code, _, err = run(capsys, "validate", "--against", "v.json", "--candidates", "bf16,fp8")
    assert code == 2 and err.count("\n") == 1 and "--candidates fp8: v.json has bf16; omit --candidates" in err


def test_tokens_of_another_vocabulary(capsys, spec, tmp_path):
    numpy.random.default_rng(0).integers(0, 1000, 4000).astype("<u2").tofile(tmp_path / "tokens.bin")
    wanted = ["validate", "gpt:1x64", "--data", "tokens.bin", "--steps", "1", "--seeds", "1", "--no-layers"]
    wanted += ["--batch", "1", "--context", "8", "--out", "runs"]
    code, _, err = run(capsys, *wanted)
    assert code == 2 and re.search(r"give --vocab \d+ or more", err)
    code, _, err = run(capsys, *wanted, "--vocab", "1024", "--json")
    assert code == 1 and "1 of 2: fp32 seed 0: loss 6.9" in err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--candidates", "bf16@"], "--candidates bf16@: expected RECIPE@TASK, such as bf16@my_task.py:make"),
        (["--steps", "0"], "--steps 0: expected a whole number of at least 1"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(capsys, spec, argv, text):
    code, out, err = run(capsys, "validate", spec, *argv)
    assert code == 2 and err == f"narrowgauge: {text}\n" and "comparing one step" not in out


def test_a_field_without_data_is_refused(capsys, spec):
    code, _, err = run(capsys, "validate", "gpt:1x64", "--field", "text", "--seeds", "1", "--no-layers")
    assert code == 2 and err.endswith("hf:NAME), but there is no --data\n")


def test_interrupt_while_the_task_is_imported(capsys, spec, tmp_path):
    (tmp_path / "slow_task.py").write_text("raise KeyboardInterrupt")
    code, _, err = run(capsys, "train", "slow_task.py:make")
    assert code == 130 and err == "narrowgauge: interrupted\n"


def test_a_task_in_a_candidate_is_not_taken_for_the_task(capsys, spec):
    """The options of the command line are those of the task that is compared."""
    argv = ["validate", "digits", "--candidates", f"fp32@{spec}", "--steps", "2", "--seeds", "1", "--no-layers"]
    code, out, err = run(capsys, *argv, "--out", "runs", "--json")
    assert code in (0, 1), err
    assert json.loads(out)["task"] == "digits"
    with pytest.raises(SystemExit, match="2"):  # digits has no width, and own_task.py has
        run(capsys, *argv, "--width", "8")
