"""Weights stored in FP8, and weights that lie next to each other: the bytes, their values, their places."""

import pytest
import torch
from torch import nn

from narrowgauge.weight_copies.adjacent import store_contiguously, view_as_one
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


def test_weights_used_as_one_move_into_one_buffer_and_stay_parameters():
    weights = [nn.Parameter(torch.randn(rows, 8)) for rows in (4, 6, 2)]
    values = [weight.detach().clone() for weight in weights]
    assert view_as_one(weights) is None
    store_contiguously(weights)
    joint = view_as_one(weights)
    assert torch.equal(joint, torch.cat(values)) and joint.data_ptr() == weights[0].data_ptr()
    assert all(torch.equal(weight, value) for weight, value in zip(weights, values, strict=True))
    places = [weight.data_ptr() for weight in weights]
    store_contiguously(weights)
    assert places == [weight.data_ptr() for weight in weights], "CUDA graphs have recorded these addresses"
    weights[1].data = weights[1].data.clone()
    assert view_as_one(weights) is None and view_as_one(weights[::-1]) is None


def test_weights_that_differ_stay_where_they_are():
    weights = [nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8).bfloat16())]
    places = [weight.data_ptr() for weight in weights]
    store_contiguously(weights)
    assert places == [weight.data_ptr() for weight in weights]
