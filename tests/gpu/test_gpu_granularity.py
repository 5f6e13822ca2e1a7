"""A scale for each row or block on a GPU: kernels match their references, products match FP64, training matches fp8."""

import copy

import pytest
import torch
from torch import nn

from narrowgauge import Engine
from narrowgauge.hardware import detect
from narrowgauge.kernels.block_product import can_multiply_blocks, multiply_blocks
from narrowgauge.kernels.cast_block_scales import cast_block_scales, cast_block_scales_reference, expand_scales
from narrowgauge.kernels.cast_row_scales import cast_row_scales, cast_row_scales_reference
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama import Llama, LlamaConfig
from narrowgauge.nn.convert import convert
from narrowgauge.nn.products import choose_formats, gemm
from narrowgauge.nn.products.gemm import multiply_fp8

pytestmark = pytest.mark.filterwarnings(
    "ignore:Synchronization debug mode", "ignore::narrowgauge.errors.SlowRecipeWarning"
)
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
ROW = "fp8[products=all,granularity=row]"
FINE = pytest.mark.parametrize("text", [ROW, "fp8[products=all,granularity=block]"], ids=["row", "block"])


def draw_rows(*shape, dtype=BF16):
    """Return rows of very different sizes, one of zeros, one with inf and one with NaN."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-30, 30, (shape[0], 1), generator=generator))
    x[0] = 0
    x[1, 1], x[2, 2] = torch.inf, torch.nan
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("of", [BF16, torch.float32])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", [(16, 16), (144, 208), (1040, 24), (4096, 768), (2048, 4096)])
def test_kernels_match_the_reference_to_the_bit(shape, transposed, of, dtype):
    x = draw_rows(*shape, dtype=of)
    wanted = cast_row_scales_reference(x, dtype, transposed, 1)
    assert_same_bits(cast_row_scales(x.cuda(), dtype, transposed, 1), wanted)
    for square in (False, True):
        wanted = cast_block_scales_reference(x, dtype, transposed, 1, square)
        assert_same_bits(cast_block_scales(x.cuda(), dtype, transposed, 1, square), wanted)


def assert_same_bits(made, wanted):
    for name, mine, theirs in zip(made._fields, made, wanted, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
        if name in ("lp", "lp_t"):
            mine, theirs = mine.cpu(), theirs
            nan = theirs.float().isnan()
            assert torch.equal(mine.float().isnan(), nan), name
            same = mine.view(torch.uint8) == theirs.view(torch.uint8)
            assert (same | nan).all(), f"{name}: {(~same & ~nan).sum()} of {mine.numel()} bytes differ"
        else:
            torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=0, equal_nan=True, msg=name)


def test_repeated_casts_are_equal_and_rows_may_be_strided():
    x = draw_rows(4096, 1024).cuda()
    first = cast_row_scales(x, E4M3)
    wide = torch.zeros(4096, 1040, dtype=BF16, device="cuda")
    wide[:, 8:1032] = x
    for again in (
        cast_row_scales(x, E4M3),
        cast_row_scales(wide[:, 8:1032], E4M3),
        cast_row_scales(x.t().contiguous().t(), E4M3),
    ):
        for a, b in zip(first, again, strict=True):
            a, b = (t.view(torch.uint8) if t.dtype is E4M3 else t for t in (a, b))
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def dequantize(lp, inv_scale):
    return lp.double() * inv_scale.double()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("out", [BF16, torch.float32])
@pytest.mark.parametrize("pair", ["row-row", "row-tensor", "tensor-row"])
def test_products_match_fp64(pair, out, kind, fast, native, monkeypatch):
    """Also where torch's kernel writes 16 bits only, and FP32 results are scaled afterwards."""
    if not native:
        if out is BF16:
            pytest.skip("the same as native")
        monkeypatch.setattr(gemm, "can_return_fp32", lambda device: False)
    torch.manual_seed(0)
    rows = torch.exp2(torch.randint(-8, 8, (1024, 1), device="cuda"))
    a = cast_row_scales(torch.randn(1024, 2048, device="cuda") * rows, kind)
    b = cast_row_scales(torch.randn(512, 2048, device="cuda") * rows[:512], E4M3)
    scale = torch.tensor(0.125, device="cuda")
    inverses = [one.inv_scale if name == "row" else scale for one, name in zip((a, b), pair.split("-"), strict=True)]
    wanted = dequantize(a.lp, inverses[0]) @ dequantize(b.lp, inverses[1]).t()
    made = multiply_fp8(a.lp, b.lp, *inverses, out, fast)
    assert made.dtype is out
    noise = 10 * torch.log10(wanted.square().sum(1) / (made.double() - wanted).square().sum(1))
    least = (45 if out is BF16 else 50) if fast else (48 if out is BF16 else 65)
    assert noise.min() > least, f"{noise.min():.1f} dB in the worst row"
    if out is BF16:
        bias = torch.randn(512, device="cuda", dtype=BF16)
        into = torch.empty_like(made)
        assert multiply_fp8(a.lp, b.lp, *inverses, fast=fast, bias=bias, into=into) is into
        torch.testing.assert_close(
            into.double(), wanted + bias.double(), rtol=2**-6, atol=float(wanted.abs().max()) * 1e-3
        )


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("out", [BF16, torch.float32])
@pytest.mark.parametrize("scales", ["square", "blocks", "tensor"])
@pytest.mark.parametrize("shape", [(1024, 512, 2048), (16, 144, 400), (4096, 768, 768), (272, 2304, 1040)])
def test_products_of_blocks_match_fp64(shape, scales, out, kind):
    """Also with a depth that is not a multiple of 128, nor of 512: rows of square blocks would need padding."""
    torch.manual_seed(0)
    rows, columns, depth = shape
    sizes = torch.exp2(torch.randint(-8, 8, (1, depth), device="cuda"))
    a = cast_block_scales(torch.randn(rows, depth, device="cuda") * sizes, kind)
    b = cast_block_scales(torch.randn(columns, depth, device="cuda") / sizes, E4M3, square=scales == "square")
    inv_b = torch.tensor(0.125, device="cuda") if scales == "tensor" else b.inv_scale
    assert can_multiply_blocks(a.lp.device)
    first, second = (
        one.double() * expand_scales(inverse, *one.shape) for one, inverse in ((a.lp, a.inv_scale), (b.lp, inv_b))
    )
    wanted = first @ second.t()
    made = multiply_fp8(a.lp, b.lp, a.inv_scale, inv_b, out)
    assert made.dtype is out and made.shape == (rows, columns)
    noise = 10 * torch.log10(wanted.square().sum(1) / (made.double() - wanted).square().sum(1))
    assert noise.min() > (48 if out is BF16 else 60), f"{noise.min():.1f} dB in the worst row"
    if out is BF16:
        bias = torch.randn(columns, device="cuda", dtype=BF16)
        made = multiply_blocks(a.lp, b.lp, a.inv_scale, inv_b, BF16, bias)
        size = float(wanted.abs().max())
        torch.testing.assert_close(made.double(), wanted + bias.double(), rtol=2**-6, atol=size * 1e-3)


def test_a_row_with_inf_or_nan_shows_in_products():
    x, w = draw_rows(64, 128).cuda(), torch.randn(32, 128, device="cuda")
    a, b = cast_row_scales(x, E4M3), cast_row_scales(w, E4M3)
    for out in (BF16, torch.float32):
        made = multiply_fp8(a.lp, b.lp, a.inv_scale, b.inv_scale, out)
        assert made[1:3].isnan().all() and not made[0].any() and torch.isfinite(made[3:]).all()


def find_decibels(value, exact):
    return (10 * torch.log10(exact.square().sum(-1) / (value.double().cpu() - exact).square().sum(-1))).mean().item()


@FINE
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gradients", ["e5m2", "e4m3"])
def test_a_layer_is_as_accurate_as_its_emulation(gradients, bias, text):
    torch.manual_seed(0)
    layer = nn.Linear(512, 768, bias=bias)
    x, grad = torch.randn(1000, 512), torch.randn(1000, 768)
    x[3], grad[5] = x[3] * 1e4, grad[5] * 1e4
    exact = copy.deepcopy(layer).double()
    wide = x.double().requires_grad_()
    output = exact(wide)
    output.backward(grad.double())
    wanted = output.detach(), wide.grad, exact.weight.grad
    found = {}
    for device in ("cpu", "cuda"):
        model = nn.Sequential(copy.deepcopy(layer)).to(device)
        convert(model, text.replace("]", f",gradients_format={gradients}]"))
        given = x.to(device, BF16).requires_grad_()
        out = model(given)
        out.backward(grad.to(device, BF16))
        made = out.detach(), given.grad, model[0].weight.grad
        found[device] = [find_decibels(a, b) for a, b in zip(made, wanted, strict=True)]
        if bias:
            assert find_decibels(model[0].bias.grad, exact.bias.grad) > 40
    assert found["cuda"] == pytest.approx(found["cpu"], abs=0.3)
    assert min(found["cuda"]) > (24 if gradients == "e5m2" else 27), found


def gpt():
    return GPT(GPTConfig(layers=2, width=256, heads=4, vocab=512, context=128))


def llama():
    return Llama(LlamaConfig(layers=2, width=256, heads=4, kv_heads=2, hidden=384, vocab=512, context=128))


def make(recipe, build=gpt, **options):
    torch.manual_seed(0)
    model = build().cuda()
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), recipe, **options)


def train(engine, steps=12):
    tokens = torch.randint(0, 512, (8, 129), generator=torch.Generator().manual_seed(0)).cuda()
    losses = []
    for _ in range(steps):
        with engine.forward():
            loss = engine.model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        engine.backward(loss)
        assert engine.step().applied
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("build", [gpt, llama])
@pytest.mark.parametrize("fields", ["", ",gradients_format=e4m3", ",checkpoint=full", ",master=split,moments=8bit"])
def test_training_is_near_that_of_one_scale_per_tensor(build, fields):
    tensor, *fine = (
        train(make(f"fp8[products=all,{one}{fields}]", build))
        for one in ("scaling=current", "granularity=row", "granularity=block")
    )
    plain = train(make("bf16", build))
    for losses in fine:
        assert losses[-1] < losses[0] - 0.3
        assert losses == pytest.approx(tensor, rel=0.02) and losses == pytest.approx(plain, rel=0.03)


# Raised by torch._dynamo itself, at the graph break before the fused head: it hides this warning, but not where
# warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@FINE
def test_lean_and_compiled_models_train(text):
    plain = train(make(text))
    assert train(make(text.replace("fp8[", "fp8-lean["))) == pytest.approx(plain, rel=0.02)
    assert train(make(text, compile=True)) == pytest.approx(plain, rel=0.01)


@FINE
def test_a_step_does_not_wait_for_the_gpu(text):
    engine = make(text)
    train(engine, 3)
    tokens = torch.randint(0, 512, (8, 129), device="cuda")
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with engine.forward():
            loss = engine.model(inputs, targets)
        engine.backward(loss)
        engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_costs_are_measured_for_each_granularity(capsys):
    device = detect("cuda")
    for rows, inputs, outputs in ((65536, 768, 3072), (16384, 4096, 14336)):
        for granularity in ("tensor", "row", "block"):
            costs = choose_formats.measure_costs(rows, inputs, outputs, device, granularity)
            assert costs is not None and min(*costs.bf16, *costs.fp8, costs.cast_input, costs.cast_grad) > 0
            with capsys.disabled():
                fp8 = ", ".join(f"{ms:.3f}" for ms in costs.fp8)
                casts = (
                    f"{costs.cast_input:.3f} + {costs.turn_input:.3f}, {costs.cast_grad:.3f} + {costs.turn_grad:.3f}"
                )
                print(f"\n{rows}x{inputs}x{outputs} {granularity}: products {fp8} ms, casts {casts} ms", end="")
