"""Rounding the gradients of logits to FP8 adds nothing to the head's gradients that has a direction."""

import torch

from narrowgauge.nn.fused.head import compute_head_loss
from narrowgauge.nn.products.gemm import ALL_BF16, ALL_FP8


def test_gradients_of_the_weight_add_up_to_zero():
    """Logits that all grow by the same amount are the same probabilities, so the sum over tokens is zero."""
    torch.manual_seed(0)
    rows, vocab, width = 4096, 1024, 128
    x = (torch.randn(1, width) + 0.02 * torch.randn(rows, width)).bfloat16()
    weight = 0.1 * torch.randn(vocab, width)
    targets = torch.multinomial(torch.softmax(x[0].float() @ weight.t(), 0), rows, replacement=True)
    found = []
    for precision in (ALL_BF16, ALL_FP8):
        own = weight.clone().requires_grad_()
        compute_head_loss(x.clone().requires_grad_(), own, targets, precision=precision).backward()
        found.append(own.grad.double())
    error = found[1] - found[0]
    assert error.norm() < 0.2 * found[0].norm()
    assert error.sum(0).norm() < 0.2 * error.norm()  # 1.4 of it with gradients rounded to the nearest
