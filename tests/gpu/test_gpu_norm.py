"""Norms on a GPU: bit-exact FP8, deterministic results, no synchronization, and more than 2^31 elements."""

import pytest
import torch
import torch.nn.functional as F

from narrowgauge.kernels.fp8_tile import quantize_reference
from narrowgauge.kernels.norm import norm, norm_backward, norm_backward_reference, norm_reference

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
KINDS = ["layer", "rms"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(4096, 768), (1000, 2048), (515, 4096), (130, 8192), (77, 1600), (513, 128), (33, 100), (9, 7), (1, 1)]


def draw(rows, columns, dtype=torch.float32, seed=0, offset=0.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator, device="cuda") + offset).to(dtype)


def watched():
    return {"amax": torch.zeros(1, device="cuda"), "counts": torch.zeros(2, dtype=torch.int64, device="cuda")}


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_bf16_value_is_cast_like_torch(kind, dtype):
    """Rows of +-1 have a mean of 0 and an rstd of 1 exactly at eps 0, so the output is the weights."""
    patterns = torch.arange(65536, device="cuda").to(torch.int16).view(torch.bfloat16).reshape(8, 8192)
    signs = torch.ones(3, 8192, device="cuda")
    signs[:, ::2] = -1
    signs[1] *= -1
    for scale in (1.0, 2.0**-5, 2.0**9):
        factor = torch.tensor([scale], device="cuda")
        for weight in patterns:
            got, expected = watched(), watched()
            out = norm(signs, weight, eps=0.0, kind=kind, scale=factor, dtype=dtype, **got).out
            reference = quantize_reference(signs * weight.float(), factor, dtype, **expected)
            finite = ~weight.isnan()
            assert same_bits(out[:, finite].contiguous(), reference[:, finite].contiguous())
            assert out.float()[:, ~finite].isnan().all()
            torch.testing.assert_close(got["amax"], expected["amax"], rtol=0, atol=0, equal_nan=True)
            assert got["counts"].tolist() == expected["counts"].tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_matches_the_reference(kind, shape):
    x, branch = draw(*shape, offset=3.0), draw(*shape, torch.bfloat16, 1)
    weight, bias = 1 + 0.1 * draw(1, shape[1], seed=2)[0], draw(1, shape[1], seed=3)[0]
    for b in (None, bias):
        got = norm(x, weight, b, eps=1e-5, kind=kind, branch=branch, dtype=torch.float32)
        out, residual, mean, rstd = norm_reference(
            x.double(), weight, b, 1e-5, kind, branch, None, torch.float64, None, None
        )
        torch.testing.assert_close(got.out.double(), out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.residual, residual.float())
        torch.testing.assert_close(got.rstd.double(), rstd, rtol=1e-5, atol=1e-6)
        if kind == "layer":
            torch.testing.assert_close(got.mean.double(), mean, rtol=1e-6, atol=1e-6)
        scale, watch = torch.tensor([50.0], device="cuda"), watched()
        lp = norm(x, weight, b, eps=1e-5, kind=kind, branch=branch, scale=scale, dtype=E4M3, **watch)
        assert same_bits(lp.out, quantize_reference(got.out, scale, E4M3))
        assert watch["amax"].item() == got.out.abs().max().item()
        later = watched()
        options = {"kind": kind, "branch": branch, "scale": scale, "dtype": torch.bfloat16, "later": E4M3}
        wide = norm(x, weight, b, eps=1e-5, **options, **later)
        assert same_bits(wide.out, got.out.bfloat16())
        assert all(torch.equal(later[name], watch[name]) for name in watch)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_matches_the_reference(kind, shape):
    x, grad_output, grad_residual = draw(*shape, offset=1.0), draw(*shape, torch.bfloat16, 1), draw(*shape, seed=2)
    weight, scale = 1 + 0.1 * draw(1, shape[1], seed=3)[0], torch.tensor([2.0**14], device="cuda")
    _, _, mean, rstd = norm_reference(x, weight, None, 1e-2, kind, None, None, torch.float32, None, None)
    mean = mean if kind == "layer" else None
    for has_bias in (False, True):
        watch, expected = watched(), watched()
        arguments = {"kind": kind, "grad_residual": grad_residual, "has_bias": has_bias}
        grad_input, grad_input_lp, grad_weight, grad_bias = norm_backward(
            grad_output, x, weight, mean, rstd, **arguments, scale=scale, **watch
        )
        wide = None if mean is None else mean.double()
        ddx, _, ddweight, ddbias = norm_backward_reference(
            grad_output, x.double(), weight, wide, rstd.double(), grad_residual, has_bias, None, E5M2, None, None
        )
        torch.testing.assert_close(grad_input.double(), ddx, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grad_weight.double(), ddweight, rtol=1e-4, atol=1e-4 * shape[0] ** 0.5)
        if has_bias:
            torch.testing.assert_close(grad_bias.double(), ddbias, rtol=1e-4, atol=1e-4 * shape[0] ** 0.5)
        assert same_bits(grad_input_lp, quantize_reference(grad_input, scale, E5M2, **expected))
        assert watch["amax"].item() == expected["amax"].item()
        assert watch["counts"].tolist() == expected["counts"].tolist()


def test_grad_weight_has_the_same_bits_on_every_run():
    x, grad_output, weight = draw(20000, 768), draw(20000, 768, torch.bfloat16, 1), torch.ones(768, device="cuda")
    normed = norm(x, weight, eps=1e-5)
    runs = [norm_backward(grad_output, x, weight, normed.mean, normed.rstd, has_bias=True) for _ in range(5)]
    for grad_input, _, grad_weight, grad_bias in runs[1:]:
        assert torch.equal(grad_input, runs[0][0])
        assert torch.equal(grad_weight, runs[0][2])
        assert torch.equal(grad_bias, runs[0][3])


def test_bf16_stream():
    x, branch = draw(300, 768, torch.bfloat16), draw(300, 768, torch.bfloat16, 1)
    weight = torch.ones(768, device="cuda", dtype=torch.bfloat16)
    got = norm(x, weight, eps=1e-5, branch=branch)
    assert torch.equal(got.residual, x + branch)
    torch.testing.assert_close(got.out, F.layer_norm((x + branch).float(), (768,)).bfloat16(), rtol=2**-7, atol=1e-5)


def test_more_elements_than_32_bit_offsets():
    rows, columns = 2**18 + 3, 8192
    x = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-3:] = draw(3, columns, torch.bfloat16)
    weight, scale = torch.ones(columns, device="cuda"), torch.ones(1, device="cuda")
    got = norm(x, weight, eps=1e-5, scale=scale, dtype=E4M3)
    small = norm(x[-3:].contiguous(), weight, eps=1e-5, scale=scale, dtype=E4M3)
    assert same_bits(got.out[-3:], small.out)
    assert not got.out[:100].view(torch.uint8).any()
    grad_input, grad_input_lp, _, _ = norm_backward(x, x, weight, got.mean, got.rstd, scale=scale)
    last = norm_backward(x[-3:], x[-3:], weight, got.mean[-3:], got.rstd[-3:], scale=scale)
    assert torch.equal(grad_input[-3:], last[0])
    assert same_bits(grad_input_lp[-3:], last[1])


def test_no_synchronization_and_cuda_graph_capture():
    x, branch, weight = draw(4096, 768), draw(4096, 768, torch.bfloat16, 1), torch.ones(768, device="cuda")
    scale, watch = torch.tensor([16.0], device="cuda"), watched()

    def both():
        normed = norm(x, weight, eps=1e-5, branch=branch, scale=scale, dtype=E4M3, **watch)
        gradients = norm_backward(branch, normed.residual, weight, normed.mean, normed.rstd, scale=scale, **watch)
        return normed.out, *gradients[:3]

    expected = both()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(captured, expected, strict=True):
        assert torch.equal(ours.float(), theirs.float())


def test_compiled_with_its_step_context():
    x, weight = draw(512, 768), torch.ones(768, device="cuda")
    amax = torch.zeros(1, device="cuda")

    def step(x, weight):
        return norm(x * 2, weight, eps=1e-5, amax=amax, dtype=torch.float32).out + 1

    eager = step(x, weight)
    seen = amax.clone()
    amax.zero_()
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(x, weight), eager)
    assert torch.equal(amax, seen)
