"""``narrowgauge validate`` of tasks whose losses are 0, negative, not finite, or the same for every seed."""

import json

import pytest

from narrowgauge.cli import main

TASK = """
import torch, narrowgauge as ng
from torch import nn
from torch.nn import functional as F
def make(kind: str, seed: int = 0) -> ng.Task:
    def draw(step, split):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step + 1000 * (split == "train")))
        return x, x.sum(1, keepdim=True)
    def init():
        if kind == "seedless":
            torch.manual_seed(7)
        return nn.Linear(16, 1)
    def loss(model, pair):
        error = F.mse_loss(model(pair[0]), pair[1])
        return {"zero": 0 * error, "nan": float("nan") * error, "negative": error - 30, "seedless": error}[kind]
    return ng.Task(model=init, batch=draw, loss=loss, steps=4)
"""


@pytest.fixture
def validate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.py").write_text(TASK)

    def call(kind, *more, expect):
        command = ["validate", "odd.py:make", "--kind", kind, "--device", "cpu", "--out", "runs", "--json", *more]
        assert main(command) == expect
        captured = capsys.readouterr()
        return json.loads(captured.out), captured.err

    return call


@pytest.mark.parametrize("kind", ["zero", "nan"])
def test_losses_that_are_zero_or_not_finite_have_a_verdict(validate, kind, tmp_path):
    found, err = validate(kind, "--save", "saved.json", expect=1)
    bf16 = found["candidates"]["bf16"]
    assert bf16["verdict"] == "inconclusive" and bf16["gap"] is None and bf16["seeds_needed"] is None
    assert bf16["diverged"] == bf16["diverged_reference"] == (bf16["seeds"] if kind == "nan" else 0)
    assert "all weight gradients equal" in err and "pairs would decide" not in err and "too large" not in err
    wanted = {"zero": "with a loss of 0, and of the candidate 0", "nan": "no pair of 3 has two finite losses: 3 of"}
    assert wanted[kind] in bf16["reason"] and wanted[kind] in err
    again, _ = validate(kind, "--against", "saved.json", "--no-layers", expect=0)
    assert again["gate"]["ok"]
    assert main(["report", "saved.json", "--out", str(tmp_path / "page.html")]) == 0


def test_copies_of_one_pair_are_no_evidence(validate):
    """A task that seeds itself has the same runs for every seed: their deviation of 0 is not the noise."""
    found, err = validate("seedless", "--margin", "0.1", expect=1)
    bf16 = found["candidates"]["bf16"]
    assert bf16["verdict"] == "inconclusive" and bf16["interval"] is None and bf16["seeds"] == 3
    assert len(set(found["losses"])) == 1 and "the seed changes nothing" in err


def test_a_gate_of_copies_of_one_pair_finds_changes(validate, tmp_path):
    found, _ = validate("seedless", "--save", "saved.json", "--no-layers", expect=1)
    again, _ = validate("seedless", "--against", "saved.json", "--no-layers", expect=0)
    assert again["gate"]["rows"][0]["verdict"] == "equivalent"
    found["candidates"]["bf16"]["losses"] = [loss * 0.9 for loss in found["candidates"]["bf16"]["losses"]]
    (tmp_path / "saved.json").write_text(json.dumps(found))
    again, err = validate("seedless", "--against", "saved.json", "--no-layers", expect=1)
    assert "in each of 3 equal pairs" in err and not again["gate"]["ok"]


def test_gaps_of_negative_losses_are_positive_where_the_candidate_is_higher(validate):
    found, _ = validate("negative", "--seeds", "2", "--no-layers", expect=0)
    one = found["candidates"]["bf16"]
    assert found["losses"][0] < 0 and one["gap"] != 0
    assert one["best_gap"] == pytest.approx(one["gap"])  # the last evaluation is the only one
