"""The formats of heads on a GPU: losses and gradients beside those in BF16."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from narrowgauge import Engine
from narrowgauge.nn.fused.head import compute_head_loss
from narrowgauge.nn.products.gemm import ALL_BF16, ALL_FP8

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from test_head_format import FORMATS, compute_loss, gpt, llama, tied

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm")


def test_gradients_of_the_weight_add_up_to_zero() -> None:
    """Their sum over tokens is zero. What the rounding of logits' gradients adds must not have a direction.

    Errors that are independent add up to about the norm of all of them, those of rounding to the nearest to 4 times it.
    """
    torch.manual_seed(0)
    rows, vocab, width = 16384, 4096, 256
    x = (torch.randn(1, width) + 0.02 * torch.randn(rows, width)).bfloat16().to(DEVICE)
    weight = 0.1 * torch.randn(vocab, width, device=DEVICE)
    targets = torch.multinomial(torch.softmax(x[0].float() @ weight.t(), 0), rows, replacement=True)
    found = []
    for precision in (ALL_BF16, ALL_FP8):
        own = weight.clone().requires_grad_()
        compute_head_loss(x.clone().requires_grad_(), own, targets, precision=precision).backward()
        found.append(own.grad.double())
    error = found[1] - found[0]
    assert error.norm() < 0.3 * found[0].norm()
    assert error.sum(0).norm() < 2 * error.norm()


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
