"""Casts on the GPU match the reference bit for bit, for every BF16 value and in a thousand shapes."""

import random

import pytest
import torch

from narrowgauge.kernels.cast import (
    cast,
    cast_transpose,
    cast_transpose_packed,
    cast_transpose_packed_reference,
    cast_transpose_reference,
    max_abs,
    max_abs_reference,
    pack,
    pack_reference,
    transpose,
)

FORMATS = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])


def bits(x_lp):
    """Return the bytes of FP8 values, without the sign of NaN: torch keeps it, the hardware does not."""
    return torch.where(torch.isnan(x_lp.float()), 127, x_lp.view(torch.uint8))


def statistics():
    return torch.zeros(1, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda")


def draw(*shape, dtype=torch.bfloat16):
    x = torch.randn(shape, device="cuda") * torch.exp2(torch.randint(-24, 12, shape, device="cuda"))
    return x.clamp(-6e4, 6e4).to(dtype)


def assert_both_layouts(x_lp, x_lp_t, reference):
    assert (x_lp.dtype, x_lp_t.dtype) == (reference.dtype, reference.dtype)
    assert x_lp.is_contiguous()
    assert x_lp_t.is_contiguous()
    assert torch.equal(bits(x_lp), bits(reference))
    assert torch.equal(bits(x_lp_t), bits(reference).t())


@FORMATS
@pytest.mark.parametrize("scale", [1.0, 0.37, 4096.0])
def test_every_bf16_value(dtype, scale):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 128)
    scale = torch.tensor(scale)
    counts, counts_reference = statistics()[1], torch.zeros(2, dtype=torch.int32)
    reference, _ = cast_transpose_reference(x, scale, dtype, None, counts_reference)
    x_lp, x_lp_t = cast_transpose(x.cuda(), scale.cuda(), dtype, None, counts)
    assert_both_layouts(x_lp.cpu(), x_lp_t.cpu(), reference)
    assert torch.equal(counts.cpu(), counts_reference)
    assert torch.equal(bits(cast(x.cuda(), scale.cuda(), dtype).cpu()), bits(reference))


def test_a_thousand_shapes():
    """Triton once miscompiled transposed FP8 stores in some shapes only (torchao #4652)."""
    rng = random.Random(0)
    torch.manual_seed(0)
    for index in range(1000):
        dtype = rng.choice([torch.float8_e4m3fn, torch.float8_e5m2])
        step = rng.choice([1, 8, 16, 64])
        length, width = (step * rng.randint(1, 1 + 700 // step) for _ in range(2))
        x = draw(length, width, dtype=rng.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]))
        if index % 4 == 0 and width > 1:
            x = x[:, rng.randint(0, width // 2) :]
        scale = torch.tensor(2.0 ** rng.randint(-4, 12), device="cuda")
        (amax, counts), (amax_reference, counts_reference) = statistics(), statistics()
        reference, _ = cast_transpose_reference(x, scale, dtype, amax_reference, counts_reference)
        x_lp, x_lp_t = cast_transpose(x, scale, dtype, amax, counts)
        assert_both_layouts(x_lp, x_lp_t, reference.contiguous())
        assert torch.equal(amax, amax_reference)
        assert torch.equal(counts, counts_reference)
        assert torch.equal(bits(transpose(x_lp)), bits(x_lp_t))
        assert torch.equal(max_abs(x), max_abs_reference(x))


@FORMATS
@pytest.mark.parametrize("shape", [(4, (12, 12, 12), 1024, 64), (2, (8, 2, 2), 100, 80), (3, (6,), 128, 128)], ids=str)
def test_packed_heads(dtype, shape):
    batch, heads, time, head = shape
    flat = draw(batch, time, sum(heads), head)
    scale = torch.tensor(8.0, device="cuda")
    views = [part.transpose(1, 2) for part in flat.split(heads, dim=2)]
    for parts in (views, [part.contiguous() for part in views]):
        (amax, counts), (amax_reference, counts_reference) = statistics(), statistics()
        reference, _ = cast_transpose_packed_reference(parts, scale, dtype, amax_reference, counts_reference)
        assert_both_layouts(*cast_transpose_packed(parts, scale, dtype, amax, counts), reference)
        assert torch.equal(pack(parts), pack_reference(parts))
        assert torch.equal(amax, amax_reference)
        assert torch.equal(counts, counts_reference)


def test_nan_and_inf_reach_the_amax():
    x = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for value in (float("inf"), float("nan")):
        x[1234, 567] = value
        amax, _ = statistics()
        cast_transpose(x, torch.ones((), device="cuda"), torch.float8_e4m3fn, amax)
        torch.testing.assert_close(amax[0], torch.tensor(value, device="cuda"), equal_nan=True)
        torch.testing.assert_close(max_abs(x), torch.tensor(value, device="cuda"), equal_nan=True)


def test_more_elements_than_int32_offsets():
    """Logits of 65,536 tokens: 3.3e9 elements, so that offsets need 64 bits."""
    length, width = 65536, 50304
    x = torch.randn(1, width, device="cuda", dtype=torch.bfloat16).expand(length, width).contiguous()
    x[-1, -1] = 7777.0
    scale = torch.ones((), device="cuda")
    amax, _ = statistics()
    x_lp, x_lp_t = cast_transpose(x, scale, torch.float8_e5m2, amax)
    assert amax.item() == x[-1, -1].item()
    last = cast(x[-128:], scale, torch.float8_e5m2)
    assert torch.equal(bits(x_lp[-128:]), bits(last))
    assert torch.equal(bits(x_lp_t[:, -128:].contiguous()), bits(last).t())
    assert torch.equal(bits(transpose(x_lp)[-64:]), bits(x_lp_t[-64:]))


def test_calls_do_not_synchronize_and_can_be_captured():
    x, scale = draw(1024, 768), torch.ones((), device="cuda")
    amax, counts = statistics()
    parts = [draw(2, 4, 512, 64) for _ in range(3)]

    def calls():
        cast_transpose_packed(parts, scale, torch.float8_e5m2, amax, counts)
        return cast_transpose(x, scale, torch.float8_e4m3fn, amax, counts)

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x_lp, x_lp_t = calls()
    x.copy_(draw(1024, 768))
    graph.replay()
    assert_both_layouts(x_lp, x_lp_t, cast_transpose_reference(x, scale, torch.float8_e4m3fn)[0])
    assert amax.item() >= x.abs().max().item()


def test_compiles_to_one_graph():
    def step(x, scale, amax, counts):
        y = x * 2 + 1
        x_lp, x_lp_t = cast_transpose(y, scale, torch.float8_e4m3fn, amax, counts)
        return y, x_lp, x_lp_t

    x, scale, (amax, counts) = draw(512, 256), torch.ones((), device="cuda"), statistics()
    y, x_lp, x_lp_t = torch.compile(step, fullgraph=True)(x, scale, amax, counts)
    assert_both_layouts(x_lp, x_lp_t, cast_transpose_reference(y, scale, torch.float8_e4m3fn)[0])
    assert amax.item() == y.abs().max().item()
