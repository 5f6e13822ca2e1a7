"""bench/loss_gap.py: trains with some products in BF16, continues files of bench/equal_loss.py, and prints gaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_equal_loss_script import read, tokens

import forked

__all__ = ["tokens"]
SCRIPT = Path(__file__).parents[2] / "bench" / "loss_gap.py"
ALL = "fp8[products=all] with *:output+grad_input+grad_weight"
SOME = "fp8[products=all] with blocks.0.*:output, lm_head:grad_weight"


def run(file: Path, seconds: float, data: Path, *runs: str) -> tuple[int, str, str]:
    options = ["--data", str(data), "--task", "gpt:1x64", "--tokens", "6k", "--device", "cpu"]
    return forked.finish_script([str(SCRIPT), str(file), str(seconds), *runs, *options], 280)


@pytest.mark.timeout(300)
def test_gaps_of_runs_with_some_products_in_bf16(tmp_path: Path, tokens: Path) -> None:
    file = tmp_path / "gap.json"
    code, out, err = run(file, 250, tokens, "bf16", "fp8[products=all]", ALL)
    assert code == 0, err
    done = {one["recipe"]: one for one in read(file)["runs"]}
    assert list(done) == ["bf16", "fp8[products=all]", ALL]
    assert done["bf16"]["loss"] != done["fp8[products=all]"]["loss"]
    assert done[ALL]["loss"] == pytest.approx(done["bf16"]["loss"], rel=2e-4)  # all in BF16, in the same fused blocks
    gap = done["fp8[products=all]"]["loss"] / done["bf16"]["loss"] - 1
    assert f"{gap:+.3%}" in next(line for line in out.splitlines() if line.startswith("fp8[products=all]   "))

    code, out, _ = run(file, 250, tokens, "bf16", SOME)  # continues
    assert code == 0 and "bf16 seed 0" not in out
    assert {one["recipe"] for one in read(file)["runs"]} == {*done, SOME}
    assert len({one["loss"] for one in read(file)["runs"] if one["recipe"].startswith("fp8")}) == 3

    code, out, err = run(file, 250, tokens, "fp8[products=all]", "--stop", "3")
    assert code == 0, err
    *whole, stopped = read(file)["runs"]
    assert len(whole) == 4 and stopped["stopped"] == 3 and stopped["loss"] is None
    assert stopped["curve"] == done["fp8[products=all]"]["curve"][:1]
    line = next(line for line in out.splitlines() if line.startswith(stopped["recipe"] + "  "))
    assert "in training +" in line or "in training -" in line
    code, again, _ = run(file, 250, tokens, "fp8[products=all]", "--stop", "3")
    assert code == 0 and again.splitlines() == out.splitlines()[-len(again.splitlines()) :]  # nothing was trained


def test_mistakes_are_one_line_and_cost_no_run(tmp_path: Path, tokens: Path) -> None:
    file = tmp_path / "gap.json"
    for text, expected in [
        ("fp8 with *:forward", "a product is one of output, grad_input, grad_weight"),
        ("fp7", "fp7"),
        ("fp8 with", "fp8 with"),
        ("fp8 with blocks.0.*:output, block.*:output", "no layer has a path like block.*"),
    ]:
        code, _, err = run(file, 250, tokens, text)
        assert code == 2 and expected in err and len(err.strip().splitlines()) == 1
        assert not file.exists()
    file.write_text(json.dumps({"runs": []}))
    code, _, err = run(file, 250, tokens, "bf16")
    assert code == 2 and "name another file" in err
    file.unlink()
    code, out, _ = run(file, 0.0, tokens, "bf16")
    assert code == 0 and "too few for bf16 with seed 0" in out
    code, _, err = run(file, 250, tokens, "bf16", "--stop", "1000")
    assert code == 2 and "--stop 1000: expected a step before the last" in err
