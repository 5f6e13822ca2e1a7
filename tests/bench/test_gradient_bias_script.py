"""bench/gradient_bias.py: the reference has no bias to itself, and rounded products have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import forked

SCRIPT = Path(__file__).parents[2] / "bench" / "gradient_bias.py"
FP8 = "fp8[products=all,first_forward=fp8]"
EXACT = f"{FP8} with *:output+grad_input+grad_weight"
SMALL = ["--task", "gpt:1x64", "--steps", "4", "--of", "8", "--batches", "4", "--batch", "4", "--device", "cpu"]


@pytest.mark.timeout(300)
def test_biases_of_rounded_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    code, out, err = forked.finish_script([str(SCRIPT), "bf16", FP8, EXACT, "rounded weights", *SMALL], 280)
    assert code == 0, err
    found = json.loads((tmp_path / "gradient-bias.json").read_text())["runs"]
    assert found["bf16"]["all"]["bias"] == found["bf16"]["all"]["noise"] == 0
    assert found[EXACT]["all"]["noise"] < 0.2 * found[FP8]["all"]["noise"]
    for text in (FP8, "rounded weights"):
        one = found[text]
        assert 0.001 < one["all"]["bias"] < 1 and 0.01 < one["all"]["noise"] < 0.3
        assert {"blocks.N.qkv.weight", "tok.weight", "norm.weight"} < one.keys()
        gradients = [group["gradient"] for name, group in one.items() if name != "all"]
        assert one["all"]["gradient"] == pytest.approx(sum(g**2 for g in gradients) ** 0.5, rel=1e-3)
    assert out.count("blocks.N.qkv.weight") == 4


def test_mistakes_are_one_line() -> None:
    code, _, err = forked.finish_script([str(SCRIPT), "fp7", *SMALL], 60)
    assert code == 2 and "fp7" in err and len(err.strip().splitlines()) == 1
