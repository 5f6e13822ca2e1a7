"""Attention that runs in no fused kernel is noticed."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from narrowgauge.errors import SlowRecipeWarning
from narrowgauge.nn.plain_attention import NoticesPlainAttention

# On a CPU, torch has no fused kernel with dropout.


def test_plain_attention_is_said_once():
    x = torch.randn(1, 2, 8, 16)
    with NoticesPlainAttention(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    assert [one.category for one in said] == [SlowRecipeWarning]
    assert "no fused kernel supports queries [1, 2, 8, 16] and keys [1, 2, 8, 16] in float32" in str(said[0].message)


def test_the_line_describes_the_mask():
    x, mask = torch.randn(1, 2, 8, 16), torch.zeros(8, 8).t()
    for args, kwargs in (((mask, 0.5), {}), ((), {"attn_mask": mask, "dropout_p": 0.5})):
        with NoticesPlainAttention(), pytest.warns(SlowRecipeWarning, match=r"mask \[8, 8\] \(strides \[1, 8\]\)"):
            F.scaled_dot_product_attention(x, x, x, *args, **kwargs)


def test_fused_attention_under_autocast_is_not_mentioned():
    x, mask = torch.randn(1, 2, 8, 16, requires_grad=True), torch.zeros(8, 8)
    with NoticesPlainAttention(), torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error", SlowRecipeWarning)
        F.scaled_dot_product_attention(x, x, x.bfloat16().float(), mask).sum().backward()
    assert x.grad is not None
