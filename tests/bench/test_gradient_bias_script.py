"""bench/gradient_bias.py: errors of gradients that batches share differ from noise."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import forked

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from gradient_bias import compare

SCRIPT = Path(__file__).parents[2] / "bench" / "gradient_bias.py"
OPTIONS = ["--task", "gpt:2x64", "--steps", "2", "--batches", "2", "--device", "cpu"]


def test_noise_is_not_shared() -> None:
    """Errors: 5% of the signal along it, 10% across it, and noise three times as large as the signal in each batch."""
    torch.manual_seed(0)
    half, size = 50, 200_000
    signal, across = torch.randn(2, size)
    wanted = ({"a.0": [half * signal + 30 * torch.randn(size) for _ in range(2)]}, {"a.0": signal})
    errors = 0.05 * signal + 0.1 * across
    noise = [3 * half**0.5 * torch.randn(size) for _ in range(2)]
    sums = [one + half * errors + other for one, other in zip(wanted[0]["a.0"], noise, strict=True)]
    found = compare(({"a.0": sums}, {"a.0": signal + errors + 3 * torch.randn(size)}), wanted, half)
    assert list(found) == ["a.*", "all"] and found["a.*"] == found["all"]
    assert found["all"]["shared"] == pytest.approx((0.05**2 + 0.1**2) ** 0.5, rel=0.05)
    assert found["all"]["along"] == pytest.approx(0.05, abs=0.005)
    assert found["all"]["batch"] == pytest.approx(3, rel=0.02)
    assert found["all"]["agreed"] == pytest.approx(1, rel=0.01)


@pytest.mark.timeout(300)
def test_errors_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    runs = ["fp8[products=all]", "fp8[products=all] with *:output", "fp8[products=all] with *:grad_weight"]
    code, out, err = forked.finish_script([str(SCRIPT), *runs, *OPTIONS], 280)
    assert code == 0, err
    found = json.loads((tmp_path / "gradient-bias.json").read_text())["runs"]
    assert list(found) == runs and out.count("blocks.*.qkv.weight") == 3
    everything, backward, others = (found[run]["all"]["batch"] for run in runs)
    assert 0.01 < backward < everything < 0.3 and 0.01 < others < everything

    code, out, err = forked.finish_script([str(SCRIPT), "bf16", *OPTIONS], 280)
    assert code == 0, err
    same = json.loads((tmp_path / "gradient-bias.json").read_text())["runs"]["bf16"]
    assert {error["batch"] for error in same.values()} == {0.0}


def test_mistakes() -> None:
    for arguments, expected in [(["fp7"], "fp7"), (["fp8", "--batches", "3"], "an even number")]:
        code, _, err = forked.finish_script([str(SCRIPT), *arguments, "--device", "cpu"], 60)
        assert code == 2 and expected in err and err.count("\n") == 1
