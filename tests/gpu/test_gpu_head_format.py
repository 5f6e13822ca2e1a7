"""The formats of heads on a GPU: losses and gradients beside those in BF16, and the correction beside a CPU's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.nn.fused.head import compute_head_loss
from narrowgauge.nn.fused.head_correction import compute_correction
from narrowgauge.nn.products.gemm import ALL_BF16, ALL_FP8
from narrowgauge.scaling.operand import Operand
from narrowgauge.weight_copies.casts import WeightCastPlan

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from test_head_correction import make_inputs, round_weight
from test_head_format import FORMATS, compute_loss, gpt, llama, tied

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm")


def test_the_correction_is_that_of_a_cpu() -> None:
    x, weight = make_inputs(rows=3000, vocab=20000, width=256)
    rounded = round_weight(weight)
    expected = compute_correction(x, weight, rounded)
    on_gpu = Operand(None, rounded.lp.cuda(), None, rounded.inv_scale.cuda())
    found = compute_correction(x.cuda(), weight.cuda(), on_gpu).cpu()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)


def test_gradients_are_nearer_to_those_of_bf16() -> None:
    x, weight = (tensor.cuda() for tensor in make_inputs(rows=4096, vocab=20480, width=768))
    targets = torch.randint(0, 20480, (4096,), generator=torch.Generator().manual_seed(2)).cuda()
    gradients = {}
    for name, corrected, precision in (("exact", False, ALL_BF16), ("fp8", False, ALL_FP8), ("fixed", True, ALL_FP8)):
        own = weight.mul(0.05).requires_grad_()
        plan = WeightCastPlan(gradient_dtype=torch.float32, corrected=corrected)
        compute_head_loss(x, own, targets, plan=plan, precision=precision).backward()
        gradients[name] = own.grad.double()
    errors = {name: float((g - gradients["exact"]).norm()) for name, g in gradients.items()}
    assert errors["fixed"] < errors["fp8"] < 0.2 * gradients["exact"].norm()


@pytest.mark.parametrize("build", [gpt, llama, tied])
def test_models_train_in_each_format(build) -> None:
    losses = {}
    for head in FORMATS:
        torch.manual_seed(0)
        model = build().to(DEVICE)
        recipe = f"fp8[products=all,head={head}]"
        engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), recipe)
        for _ in range(8):
            with engine.forward():
                loss = compute_loss(engine, DEVICE)
            engine.backward(loss)
            assert engine.step().applied
        losses[head] = loss.item()
    for head in FORMATS:
        assert losses[head] == pytest.approx(losses["bf16"], rel=0.02)
    assert len(set(losses.values())) == len(FORMATS)
