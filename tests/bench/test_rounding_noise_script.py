"""bench/rounding_noise.py: what is rounded, and how much noise in gradients it makes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import forked

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from rounding_bias import E4M3, round_to
from rounding_noise import ReadRounded, Rule, all_but_largest, around_mean, compare, list_variants, to_bits, to_e4m3

SCRIPT = Path(__file__).parents[2] / "bench" / "rounding_noise.py"


def run(rule: Rule) -> list[torch.Tensor]:
    torch.manual_seed(0)
    leaves = torch.randn(4, 16, requires_grad=True), torch.randn(6, 16, requires_grad=True)
    out = ReadRounded.apply(*leaves, rule)
    return [out, *torch.autograd.grad(out, leaves, torch.randn(4, 6))]


def test_backward_reads_what_forward_read() -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(4, 16), torch.randn(6, 16), torch.randn(4, 6)
    x_lp, weight_lp = round_to(x, E4M3), round_to(weight, E4M3)
    out, grad_x, grad_weight = run(Rule("*", to_e4m3, to_e4m3))
    torch.testing.assert_close(out, x_lp @ weight_lp.t())
    torch.testing.assert_close(grad_x, grad @ weight_lp)
    torch.testing.assert_close(grad_weight, grad.t() @ x_lp)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_third_of_the_outputs(part: int) -> None:
    one, exact, rounded = run(Rule("*", to_e4m3, to_e4m3, part)), run(Rule("*")), run(Rule("*", to_e4m3, to_e4m3))
    for third, columns in enumerate(one[0].split(2, -1)):
        wanted = rounded if third == part else exact
        torch.testing.assert_close(columns, wanted[0].split(2, -1)[third])
    torch.testing.assert_close(one[1], exact[1])


def test_roundings() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    x[:, 3] *= 50
    error = (all_but_largest(1)(x) - x).abs()
    assert error[:, 3].max() == 0 and error[:, 4:].max() > 0
    assert all_but_largest(99)(x).equal(x)
    shifted = torch.randn(64, 32) * 0.01 + 5
    assert (around_mean(shifted) - shifted).abs().max() < 0.1 * (to_e4m3(shifted) - shifted).abs().max()
    for bits in (3, 5):
        relative = ((to_bits(bits)(x) - x) / x).abs().max()
        assert 0.8 * 2.0 ** -(bits + 1) < relative <= 2.0 ** -(bits + 1)


def test_noise_is_an_energy() -> None:
    wanted = [{"blocks.0.up.weight": torch.full((4,), 2.0), "norm.weight": torch.ones(1)}]
    found = [{"blocks.0.up.weight": torch.full((4,), 2.02), "norm.weight": torch.ones(1)}]
    noise = compare(found, wanted)
    assert noise["up.weight"] == pytest.approx(1.0, rel=1e-4) and noise["norm.weight"] == 0
    assert noise["all"] == pytest.approx(1e4 * 4 * 0.02**2 / 17, rel=1e-4)


@pytest.mark.timeout(300)
def test_a_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    options = ["--task", "gpt:2x64", "--after", "1,3", "--device", "cpu", "--batch", "2", "--context", "32"]
    code, out, err = forked.finish_script([str(SCRIPT), *options, "--reference", "fp32"], 280)
    assert code == 0, err
    after = json.loads((tmp_path / "rounding-noise.json").read_text())["after"]
    assert list(after) == ["1", "3"] and "after 3 steps" in out
    for noise in after.values():
        assert list(noise) == list(list_variants(2))
        assert 0 < noise["qkv of block 1"]["all"] < noise["everything"]["all"] < 1000
        assert noise["qkv: 5 mantissa bits"]["all"] < noise["qkv: 3 mantissa bits"]["all"]


@pytest.mark.parametrize("options", [["--after", "0"], ["--after", "x"], ["--task", "cnn"]])
def test_bad_arguments(options: list[str]) -> None:
    code, _, err = forked.finish_script([str(SCRIPT), *options, "--device", "cpu"], 100)
    assert code == 2 and err.startswith("rounding_noise: ") and err.count("\n") == 1
