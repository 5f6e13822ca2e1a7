"""Attention of packed documents: the reference against a mask, and the call of FlashAttention without values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.kernels.document_attention import attend_by_flash, attend_documents, can_attend

ROWS, LENGTH, SIZE = 2, 12, 8
BOUNDS = torch.tensor([0, 5, 6, 12, 12, 20, 24, 24, 24], dtype=torch.int32)
"""Two rows of 12 tokens; some documents are empty."""


def make_parts(heads: int, keys: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """Return queries, keys and values as a fused block has them: views of the projections' output."""
    torch.manual_seed(0)
    qkv = torch.randn(ROWS, LENGTH, (heads + 2 * keys) * SIZE, dtype=dtype, device=device)
    parts = qkv.split([heads * SIZE, keys * SIZE, keys * SIZE], -1)
    return [part.view(ROWS, LENGTH, -1, SIZE).transpose(1, 2).detach().requires_grad_() for part in parts]


def make_mask() -> Tensor:
    number = torch.searchsorted(BOUNDS[1:], torch.arange(ROWS * LENGTH), right=True).view(ROWS, LENGTH)
    return (number[:, None, :, None] == number[:, None, None]) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


@pytest.mark.parametrize("keys", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_reference_computes_what_a_mask_says(
    keys: int, scale: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    parts = make_parts(4, keys, dtype)
    expected = F.scaled_dot_product_attention(*parts, make_mask(), scale=scale, enable_gqa=True)
    found = attend_documents(*parts, BOUNDS, 8, scale=scale)
    assert found.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn(found.shape, dtype=dtype)
    grads = zip(*(torch.autograd.grad(output, parts, grad) for output in (found, expected)), strict=True)
    for one, two in grads:
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


def test_dropout_drops_weights() -> None:
    parts = make_parts(4, 2)
    whole = attend_documents(*parts, BOUNDS, 8)
    torch.manual_seed(1)
    assert not torch.equal(attend_documents(*parts, BOUNDS, 8, dropout=0.5), whole)


def test_a_length_that_is_too_small_is_an_error() -> None:
    with pytest.raises(AssertionError, match="a document of 8 tokens"):
        attend_documents(*make_parts(4, 2), BOUNDS, 7)


def test_flash_attention_takes_views_and_returns_gradients_of_heads() -> None:
    """On tensors without values: arguments, shapes and layouts are those of torch's op."""
    parts = make_parts(4, 2, torch.bfloat16, "meta")
    output = attend_by_flash(*parts, BOUNDS.to("meta"), 8, 0.0, None)
    assert output.shape == (ROWS, 4, LENGTH, SIZE) and output.transpose(1, 2).is_contiguous()
    for part, grad in zip(parts, torch.autograd.grad(output, parts, torch.empty_like(output)), strict=True):
        assert grad.shape == part.shape


def test_where_documents_can_be_attended_to() -> None:
    assert can_attend(torch.device("cpu"), torch.float32, 20)
    assert not can_attend(torch.device("meta"), torch.bfloat16, 64)
    assert not can_attend(torch.device("cuda"), torch.float32, 64)
    assert not can_attend(torch.device("cuda"), torch.bfloat16, 256)
    assert not can_attend(torch.device("cuda"), torch.bfloat16, 20)
