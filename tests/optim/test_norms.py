"""Gradient norms over FP32's whole range: huge, tiny, subnormal and nonfinite values."""

import itertools

import pytest
import torch
from torch import nn

from narrowgauge import Engine, kernels
from narrowgauge.optim.norms import compute_grad_norms, compute_total_norm

SIZES = [1e-44, 1e-40, 1e-38, 1e-25, 1e-23, 1e-19, 1.0, 1e19, 1e25, 1e36]
WAYS = [False, True] if kernels.HAVE_TRITON else [False]


def parameters_with(grads):
    parameters = [nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype)) for grad in grads]
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad
    return parameters


def norms_by(by_kernel, monkeypatch, grads):
    monkeypatch.setattr(kernels, "interpreting", by_kernel)
    return compute_grad_norms(parameters_with(grads), {}, torch.device("cpu"))


@pytest.mark.parametrize("by_kernel", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_size_that_fp32_holds(by_kernel, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    # Triton's interpreter reads subnormal BF16 numbers wrongly; tests/gpu tests them.
    sizes = SIZES[3:] if by_kernel and dtype is torch.bfloat16 else SIZES
    grads = [(torch.randn(300, generator=generator).double() * size).to(dtype) for size in sizes]
    grads.append(torch.cat(grads))  # all sizes in one gradient
    grads.append(torch.zeros(7, dtype=dtype))
    wanted = torch.stack([torch.linalg.vector_norm(grad.double()) for grad in grads])
    found = norms_by(by_kernel, monkeypatch, grads)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-45)
    total = compute_total_norm(found)
    assert total.item() == pytest.approx(torch.linalg.vector_norm(wanted).item(), rel=1e-6)


@pytest.mark.parametrize("by_kernel", WAYS)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # the interpreter's: the norm exceeds FP32
def test_nonfinite_values_are_found_anywhere(by_kernel, bad, monkeypatch):
    places = (0, 5, 16383, 16384, 19999)
    grads = []
    for place, size in itertools.product(places, (1e-40, 1.0, 1e30)):
        grads.append(torch.full((20_000,), size))
        grads[-1][place] = bad
    assert not torch.isfinite(norms_by(by_kernel, monkeypatch, grads)).any()
    beyond = torch.full((20_000,), 3e38)
    assert norms_by(by_kernel, monkeypatch, [beyond]).isinf().all(), "FP32 has no such number"


@pytest.mark.parametrize("by_kernel", WAYS)
def test_strides_and_complex_numbers(by_kernel, monkeypatch):
    torch.manual_seed(0)
    grads = [torch.randn(6, 4, 3, 5).to(memory_format=torch.channels_last), torch.randn(40, 30).t(),
             torch.randn(40, 30)[::2, ::3], torch.randn(1).expand(50), torch.randn(33, dtype=torch.cfloat),
             torch.randn(33, dtype=torch.cfloat).conj(), torch.randn(8, 8)]  # fmt: skip
    wanted = torch.stack([torch.linalg.vector_norm(grad).float() for grad in grads])
    torch.testing.assert_close(norms_by(by_kernel, monkeypatch, grads), wanted)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("size", [1e-30, 1e-25, 1e15, 1e25])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16-lean", "bf16[moments=8bit]", "bf16[gradients=released]"])
def test_an_engine_applies_gradients_of_any_size(recipe, size, clip):
    if clip is not None and "released" in recipe:
        return
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe, clip_norm=clip)
    with engine.forward():
        loss = model(torch.randn(4, 16)).float().sum() * size
    engine.backward(loss)
    report = engine.step()
    assert report.applied and 0.1 * size < report.grad_norm < 1e3 * size and engine.skipped == 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_total_norm_does_not_overflow_in_squares():
    assert compute_total_norm(torch.tensor([3e25, 4e25])).item() == pytest.approx(5e25)
    assert compute_total_norm(torch.tensor([3e-30, 4e-30])).item() == pytest.approx(5e-30)
    assert (
        compute_total_norm(torch.tensor([1.0, float("nan")])).isnan()
        and compute_total_norm(torch.tensor([float("inf")])).isinf()
    )
