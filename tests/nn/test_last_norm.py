"""The last norm of a language model runs as one kernel, if it is like the norms inside of fused blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import LANGUAGE, make_batch, without_dropout
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.nn.fused import norm
from narrowgauge.nn.module_changes import find_change

FAMILIES = {
    "llama": "model.norm", "qwen3": "model.norm", "gpt2": "transformer.ln_f", "gemma2": "model.norm", "nano": "ln_f",
    "t5": "decoder.final_layer_norm",
}  # fmt: skip


def train(family: str, recipe: str) -> tuple[float, dict[str, Tensor], torch.dtype]:
    model = without_dropout(LANGUAGE[family]())
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 0.0), recipe, fused=True)
    last = model.get_submodule(FAMILIES[family])
    assert find_change(last, norm.ConvertedNorm) is not None
    seen: list[Any] = []
    last.register_forward_hook(lambda module, arguments, output: seen.append(output.dtype))
    ids = make_batch(0, rows=2, length=32)
    for _ in range(2):
        with engine.forward():
            loss = engine.model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        engine.step()
    return loss.item(), grads, seen[0]


def compute_exact_gradients(family: str) -> dict[str, Tensor]:
    model = without_dropout(LANGUAGE[family]())
    ids = make_batch(0, rows=2, length=32)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


CASES = [(family, "fp8[products=all]") for family in FAMILIES]
CASES += [(family, ("bf16", "fp8-lean[products=all]")[number % 2]) for number, family in enumerate(FAMILIES)]


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_results_are_those_of_the_models_own_code(family, recipe, monkeypatch):
    wanted, expected, dtype = train(family, recipe)
    monkeypatch.setattr(norm, "is_on_gpu", lambda x: True)
    calls: list[Any] = []
    original = norm.run_norm
    monkeypatch.setattr(norm, "run_norm", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    loss, grads, same = train(family, recipe)
    assert len(calls) >= 2 and same is dtype
    assert loss == pytest.approx(wanted, rel=2e-4)
    exact = compute_exact_gradients(family)
    before, after = (
        {name: float((found[name].float() - value).norm()) for name, value in exact.items()}
        for found in (expected, grads)
    )
    ratios = [after[name] / before[name] for name in exact if before[name]]
    assert sum(ratios) / len(ratios) < 1.03 and max(ratios) < 1.25, ratios


class ScaledNorm(nn.Module):
    """An RMSNorm with a setting."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight, self.factor, self.eps = nn.Parameter(torch.ones(64)), factor, 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def test_a_norm_with_other_attributes_is_left_alone():
    model = LANGUAGE["llama"]()
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = ScaledNorm(1.0), ScaledNorm(1.0)
    model.model.norm = ScaledNorm(0.5)
    engine = ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "fp8[products=all]")
    assert len(engine.conversion.blocks) == 2
    assert find_change(model.model.norm, norm.ConvertedNorm) is None
    model.model.norm = ScaledNorm(1.0)
    ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "fp8[products=all]")
    assert find_change(model.model.norm, norm.ConvertedNorm) is not None


def test_a_model_without_fused_blocks_keeps_its_norm():
    model = LANGUAGE["llama"]()
    ng.Engine(model, torch.optim.AdamW(model.parameters(), 1e-3), "bf16", fused=False)
    assert find_change(model.model.norm, norm.ConvertedNorm) is None


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradients_in_fp32(kind, has_bias, offset):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator, requires_grad=True) for s in ((3, 5, 64), (64,), (64,)))
    grad = torch.randn(3, 5, 64, generator=generator)
    given = [x, weight, *([bias] if has_bias else [])]
    out = norm.run_norm(
        x, weight, 1e-5, kind, bias=bias if has_bias else None, offset=offset, dtype=torch.float32
    )  # fmt: skip
    got = torch.autograd.grad(out.view(3, 5, 64), given, grad)
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * (offset + weight)
    wanted = torch.autograd.grad(y + bias if has_bias else y, given, grad)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
