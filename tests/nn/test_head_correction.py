"""The head's correction: logits whose mean error is taken back, in the loss of every kind of model."""

import pytest
import torch
from test_head_format import compute_loss, get_head, gpt, llama, make, tied

import narrowgauge as ng
from narrowgauge.kernels import compute_scale
from narrowgauge.kernels.fp8_formats import FP8_MAX
from narrowgauge.nn.fused import head_correction
from narrowgauge.nn.fused.head import compute_head_loss
from narrowgauge.nn.fused.head_correction import compute_correction
from narrowgauge.nn.products.gemm import ALL_BF16, ALL_FP8, E4M3
from narrowgauge.scaling.operand import Operand
from narrowgauge.weight_copies.casts import WeightCastPlan


def round_weight(weight):
    scale = compute_scale(weight.abs().max(), FP8_MAX[E4M3])
    return Operand(None, (weight.float() * scale).to(E4M3), None, scale.reciprocal())


def make_inputs(rows=64, vocab=272, width=32, shared=2.0):
    """Inputs with something in common, as those of a head."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator) + shared * torch.randn(width, generator=generator)
    return x.bfloat16(), torch.randn(vocab, width, generator=generator)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [17, 100, 8192])
def test_the_correction_is_the_mean_of_the_error(kind, step, monkeypatch):
    monkeypatch.setattr(head_correction, "STEP", step)
    x, weight = make_inputs()
    weight = weight.to(kind)
    rounded = round_weight(weight)
    found = compute_correction(x, weight, rounded)
    wide = rounded.lp.double() * rounded.inv_scale.double()
    expected = (x.double() @ (weight.double() - wide).t()).mean(0)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=1e-3)
    corrected = x.double() @ wide.t() + found.double()
    errors = [(logits - x.double() @ weight.double().t()) for logits in (x.double() @ wide.t(), corrected)]
    assert errors[1].mean(0).abs().max() < 0.05 * errors[0].mean(0).abs().max()
    assert errors[1].norm() < 0.6 * errors[0].norm()


def test_any_mean_is_valid_also_of_few_rows_and_beside_bad_ones(monkeypatch):
    monkeypatch.setattr(head_correction, "MOST_ROWS", 8)
    x, weight = make_inputs()
    rounded = round_weight(weight)
    few = compute_correction(x, weight, rounded).double()
    wide = rounded.lp.double() * rounded.inv_scale.double()
    error = x.double() @ (wide - weight.double()).t()
    assert (error + few).norm() < 0.7 * error.norm()
    x[0] = torch.nan
    x[8] = torch.inf
    assert compute_correction(x, weight, rounded).isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
def test_the_loss_is_nearer_to_that_of_bf16(bias):
    x, weight = make_inputs(rows=512)
    targets = torch.randint(0, 272, (512,), generator=torch.Generator().manual_seed(2))
    added = torch.randn(272, generator=torch.Generator().manual_seed(3)) if bias else None
    losses, gradients = {}, {}
    for name, corrected, precision in (("exact", False, ALL_BF16), ("fp8", False, ALL_FP8), ("fixed", True, ALL_FP8)):
        own = weight.clone().requires_grad_()
        plan = WeightCastPlan(gradient_dtype=torch.float32, corrected=corrected)
        loss = compute_head_loss(x, own, targets, plan=plan, precision=precision, bias=added)
        loss.backward()
        losses[name], gradients[name] = loss.item(), own.grad.double()
    errors = {name: (g - gradients["exact"]).norm() for name, g in gradients.items()}
    assert errors["fixed"] < errors["fp8"] < 0.2 * gradients["exact"].norm()
    assert abs(losses["fixed"] - losses["exact"]) < abs(losses["fp8"] - losses["exact"]) + 1e-3


@pytest.mark.parametrize("build", [gpt, llama, tied])
def test_models_train_with_it(build):
    losses = {}
    for head in ("fp8", "corrected", "bf16"):
        engine = make(build, head)
        with torch.no_grad():
            get_head(engine.inner).weight.mul_(4)
        for _ in range(6):
            with engine.forward():
                loss = compute_loss(engine)
            engine.backward(loss)
            assert engine.step().applied
        losses[head] = loss.item()
    assert losses["corrected"] != losses["fp8"]
    assert losses["corrected"] == pytest.approx(losses["bf16"], rel=0.02)


def test_lean_recipes_have_it():
    recipe = ng.recipe("fp8-lean[products=all,head=corrected]")
    assert recipe.head == "corrected"
    engine = ng.Engine(model := gpt(), torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    for _ in range(3):
        with engine.forward():
            loss = compute_loss(engine)
        engine.backward(loss)
        assert engine.step().applied
