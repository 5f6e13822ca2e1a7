"""Weights stored in FP8, and weights that lie next to each other: the bytes, their values, their places."""

import pytest
import torch

from narrowgauge.weight_copies.stored import E4M3, make_stored, quantize_to_scale, read_stored, widen_bytes

CODES = torch.arange(256, dtype=torch.uint8)
FINITE = CODES[(CODES & 0x7F) != 0x7F]


@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 0.003])
def test_every_code_is_stored_and_read_without_a_change(scale):
    scale = torch.tensor(scale)
    values = widen_bytes(FINITE, scale, torch.float32)
    assert torch.equal(values, FINITE.view(E4M3).float() * scale)
    assert torch.equal(quantize_to_scale(values, scale), FINITE)


@pytest.mark.parametrize("largest", [464.1, torch.inf, torch.nan])
def test_values_that_do_not_fit_a_scale_are_refused(largest):
    scale = torch.tensor(0.5)
    assert quantize_to_scale(torch.tensor([1.0, 463.9]) * scale, scale) is not None
    assert quantize_to_scale(torch.tensor([1.0, largest]) * scale, scale) is None


@pytest.mark.parametrize("adjacent", [False, True])
def test_stacked_weights_share_a_scale(adjacent):
    torch.manual_seed(0)
    weights = [torch.randn(32, 16), 5 * torch.randn(48, 16)]
    stored, scale = make_stored(weights)
    assert stored.dtype is torch.uint8 and stored.shape == (80, 16)
    torch.testing.assert_close(widen_bytes(stored, scale, torch.float32), torch.cat(weights), rtol=2**-4, atol=1e-2)
    parts = stored.split([32, 48])
    operand = read_stored(parts if adjacent else [part.clone() for part in parts], scale, transposed=True)
    assert torch.equal(operand.lp.view(torch.uint8), stored) and operand.inv_scale is scale
    assert torch.equal(operand.lp_t.view(torch.uint8), stored.t())
    assert (operand.lp.data_ptr() == stored.data_ptr()) == adjacent, "adjacent weights are read without a copy"
