"""A scale for each block of a layer's operands: exact products, outliers that cost one block, inf and NaN that show."""

import pytest
import torch
from test_granularity import BF16, E4M3, E5M2, find_decibels, run_layer

from narrowgauge.kernels.cast_block_scales import cast_block_scales_reference, expand_scales
from narrowgauge.nn.products.gemm import ALL_FP8, compute_grad_weight
from narrowgauge.scaling.operand import Operand

BLOCK = "fp8[products=all,granularity=block]"
ROW = "fp8[products=all,granularity=row]"


def dequantize(lp, inv_scale):
    return lp.double() * expand_scales(inv_scale, *lp.shape).double()


@pytest.mark.parametrize("gradients", [E5M2, E4M3])
@pytest.mark.parametrize("rows", [(272,), (5,), (3, 50)])
def test_products_are_exact_for_the_rounded_operands(rows, gradients):
    """Inputs and gradients have a scale for 128 values of a row or column, weights one for 128 x 128."""
    torch.manual_seed(0)
    x, grad = torch.randn(*rows, 304), torch.randn(*rows, 176)
    text = BLOCK if gradients is E5M2 else BLOCK.replace("]", ",gradients_format=e4m3]")
    (out, grad_input, grad_weight, grad_bias), layer, report = run_layer(text, x, grad)
    assert {site.granularity for site in report.scales.sites.values()} == {"block"}
    used = x.numel() // 304
    count = -(-used // 16) * 16
    padded = [torch.zeros(count, width) for width in (304, 176)]
    for whole, part in zip(padded, (x, grad.to(BF16)), strict=True):
        whole[:used] = part.reshape(-1, part.shape[-1])
    source = cast_block_scales_reference(padded[0], E4M3)
    g = cast_block_scales_reference(padded[1], gradients)
    w = cast_block_scales_reference(layer.weight.detach(), E4M3, square=True)
    assert w.inv_scale.shape == (2, 3) and source.inv_scale.shape == (count, 3) and g.inv_scale.shape == (count, 2)
    bias = layer.bias.detach().to(BF16).double()
    wanted = dequantize(source.lp, source.inv_scale) @ dequantize(w.lp, w.inv_scale).t() + bias
    torch.testing.assert_close(out.reshape(-1, 176).double(), wanted[:used], rtol=2**-8, atol=1e-4)
    wanted = dequantize(g.lp, g.inv_scale) @ dequantize(w.lp_t, w.inv_scale_t).t()
    torch.testing.assert_close(grad_input.reshape(-1, 304).double(), wanted[:used], rtol=2**-7, atol=1e-4)
    wanted = dequantize(g.lp_t, g.inv_scale_t) @ dequantize(source.lp_t, source.inv_scale_t).t()
    torch.testing.assert_close(grad_weight.double(), wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(grad_bias, grad.to(BF16).float().reshape(-1, 176).sum(0))


def test_an_outlier_costs_only_its_own_block():
    """With a scale for each row, E4M3 flushes the other values of the row; with blocks, only those near it."""
    torch.manual_seed(1)
    x, grad = torch.randn(64, 512), torch.randn(64, 96)
    x[:, 3] = 2.0**17  # a column, which a row's scale cannot follow
    found = {}
    for text in (BLOCK, ROW):
        _, _, report = run_layer(text, x, grad, bias=False)
        found[text] = int(report.scales.sites["0.input"].counts[1])
    assert 0 < found[BLOCK] < found[ROW] / 3, found
    masked = x.clone()
    masked[:, :128] = 0  # the exact product without the block of the outlier
    weight = torch.randn(96, 512)
    exact, *_ = run_layer(None, masked, grad, bias=False, weight=weight)
    plain = weight.clone()
    plain[:, :128] = 0
    made = {text: run_layer(text, x, grad, bias=False, weight=plain)[0][0] for text in (BLOCK, ROW)}
    decibels = {text: find_decibels(out, exact[0]).mean().item() for text, out in made.items()}
    assert decibels[BLOCK] > 25 > decibels[ROW] + 5, decibels


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["input", "grad", "weight"])
def test_inf_and_nan_show_in_every_product_with_their_block(where, bad):
    tensors = {"input": torch.randn(144, 160), "grad": torch.randn(144, 176), "weight": torch.randn(176, 160)}
    tensors[where][130, 4] = bad
    (out, grad_input, grad_weight), _, report = run_layer(
        BLOCK, tensors["input"], tensors["grad"], bias=False, weight=tensors["weight"]
    )
    nan = [one.isnan() for one in (out, grad_input, grad_weight)]
    if where == "input":
        assert nan[0][130].all() and nan[2][:, 4].all() and nan[0].sum() == 176 and nan[2].sum() == 176
        assert not nan[1].any()
    elif where == "grad":
        assert nan[1][130].all() and nan[2][4].all() and nan[1].sum() == 160 and nan[2].sum() == 160
        assert not nan[0].any()
    else:  # the whole block of 128 x 128
        assert nan[0][:, 128:].all() and not nan[0][:, :128].any()
        assert nan[1][:, :128].all() and not nan[1][:, 128:].any() and not nan[2].any()
    assert report.scales.find_nonfinite().any()


def test_an_operand_is_sliced_at_the_start_of_a_block():
    torch.manual_seed(0)
    made = cast_block_scales_reference(torch.randn(272, 48), E4M3)
    whole = Operand(None, made.lp, made.lp_t, made.inv_scale, made.inv_scale_t)
    grad = cast_block_scales_reference(torch.randn(272, 16), E5M2)
    grad = Operand(None, grad.lp, grad.lp_t, grad.inv_scale, grad.inv_scale_t)
    parts = [slice(0, 128), slice(128, 272)]
    product = compute_grad_weight(grad, whole, ALL_FP8)
    summed = sum(compute_grad_weight(grad.slice_rows(one), whole.slice_rows(one), ALL_FP8) for one in parts)
    torch.testing.assert_close(product, summed, rtol=1e-4, atol=1e-4)
    assert whole.slice_rows(parts[1]).inv_scale.shape == (144, 1)
    kept = Operand(None, None, made.lp_t, made.inv_scale_t).slice_rows(parts[1])  # as backward has it
    assert torch.equal(kept.transposed_inv_scale, made.inv_scale_t[:, 1:])
    with pytest.raises(AssertionError, match="begins within a block"):
        whole.slice_rows(slice(64, 128))
