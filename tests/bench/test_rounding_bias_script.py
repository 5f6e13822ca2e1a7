"""bench/rounding_bias.py: its roundings, and which of them leave errors that batches share."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import forked

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from rounding_bias import BACKWARD, E4M3, E5M2, FORWARD, FP8, NONE, RoundedProduct, round_to

SCRIPT = Path(__file__).parents[2] / "bench" / "rounding_bias.py"


def test_products_of_rounded_operands() -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(3, 5, 16), torch.randn(7, 16), torch.randn(3, 5, 7)

    def run(rounding):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = RoundedProduct.apply(*leaves, rounding)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    plain = [leaf.clone().requires_grad_() for leaf in (x, weight)]
    out = torch.nn.functional.linear(*plain)
    for found, wanted in zip(run(NONE), [out, *torch.autograd.grad(out, plain, grad)], strict=True):
        torch.testing.assert_close(found, wanted)
    out, grad_x, grad_weight = run(FP8._replace(grad=E5M2))
    x_lp, weight_lp, grad_lp = round_to(x, E4M3), round_to(weight, E4M3), round_to(grad, E5M2)
    torch.testing.assert_close(out, x_lp @ weight_lp.t())
    torch.testing.assert_close(grad_x, grad_lp @ weight_lp)
    torch.testing.assert_close(grad_weight, grad_lp.reshape(-1, 7).t() @ x_lp.reshape(-1, 16))
    assert 0.01 < (x_lp - x).norm() / x.norm() < 0.04 < (grad_lp - grad).norm() / grad.norm() < 0.08


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_unbiased_rounding_is_right_on_average(dtype) -> None:
    values = torch.full((2000, 64), 0.3)
    values[0, 0] = 1.0  # sets the scale
    assert abs(round_to(values, dtype)[1:].mean() - 0.3) > 0.003
    assert abs(round_to(values, dtype, unbiased=True)[1:].mean() - 0.3) < 0.0003


@pytest.mark.timeout(300)
def test_all_roundings_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    options = ["--task", "gpt:2x64", "--steps", "2", "--batches", "2", "--device", "cpu", "--reference", "fp32"]
    code, out, err = forked.finish_script([str(SCRIPT), *options], 280)
    assert code == 0, err
    errors = json.loads((tmp_path / "rounding-bias.json").read_text())["errors"]
    assert list(errors) == [*FORWARD, *BACKWARD] and all(f"{name} " in out for name in errors)
    batch = {name: error["all"]["batch"] for name, error in errors.items()}
    assert 0.001 < batch["forward: the head's input"] < batch["forward: all"] < 0.3
    assert 0.001 < batch["backward: layers in E4M3"] < batch["backward: layers in E5M2"] < 0.3
    assert errors["backward: head in E4M3"]["norm.weight"]["batch"] > 0
    assert errors["backward: layers in E5M2"]["norm.weight"]["batch"] == 0  # the head's backward comes first


def test_mistakes() -> None:
    code, _, err = forked.finish_script([str(SCRIPT), "--batches", "1", "--device", "cpu"], 60)
    assert code == 2 and "an even number" in err and err.count("\n") == 1
