"""``narrowgauge validate``: verdicts on real runs, kept and extended, and bad input in one line."""

import json
from pathlib import Path

import pytest

from narrowgauge.cli import main
from narrowgauge.cli.validate import split_recipes
from narrowgauge.errors import UsageError

TASK = f"{Path(__file__).resolve().parents[2] / 'bench' / 'small_tasks.py'}:regression"


def validate(capsys, tmp_path, *more):
    code = main(
        ["validate", TASK, "--device", "cpu", "--steps", "60", "--out", str(tmp_path / "store"), "--json", *more]
    )
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_verdicts_and_what_is_kept(capsys, tmp_path):
    """A recipe against itself is equivalent, one that cannot learn is worse; asking again trains nothing."""
    arguments = ("--candidates", "fp32[checkpoint=none],fp16[loss_scale=1e-6]", "--seeds", "3", "--margin", "0.05")
    code, data, err = validate(capsys, tmp_path, *arguments)
    assert code == 1
    same, bad = data["candidates"]["fp32"], data["candidates"]["fp16[loss_scale=1e-06]"]
    assert same["verdict"] == "equivalent" and same["gap"] == 0 and same["losses"] == data["losses"]
    assert bad["verdict"] == "worse" and bad["gap"] > 0.05 and bad["interval"][0] > 0.05
    assert {"verdict", "gap", "interval", "margin", "detectable", "diverged"} <= set(bad)
    assert "6 of 9" in err and "(known)" in err  # fp32 against fp32 is the same run
    code, again, err = validate(capsys, tmp_path, *arguments)
    assert again == data and "s left" not in err


def test_one_seed_proves_nothing(capsys, tmp_path):
    code, data, _ = validate(capsys, tmp_path, "--candidates", "bf16", "--seeds", "1")
    assert code == 1 and data["candidates"]["bf16"]["verdict"] == "inconclusive"
    assert data["candidates"]["bf16"]["seeds_needed"] == 3


def test_recipes_with_commas():
    assert split_recipes("bf16, fp8[history=4,margin=1] ,fp16") == ["bf16", "fp8[history=4,margin=1]", "fp16"]
    with pytest.raises(UsageError, match="at least one"):
        split_recipes(" , ")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--seeds", "0"], "--seeds 0"),
        (["--seeds", "many"], "expected auto"),
        (["--margin", "2"], "--margin 2.0"),
        (["--candidates", "bf17"], "unknown recipe"),
        (["--candidates", "tf32"], "tensor cores"),
    ],
)
def test_bad_input_is_one_line(capsys, argv, text):
    assert main(["validate", TASK, "--device", "cpu", *argv]) == 2
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == 1
