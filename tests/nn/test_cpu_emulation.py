"""Emulated products: operands in 16 bits, accumulation in FP32, one rounding; forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from narrowgauge import Engine
from narrowgauge.nn import cpu_emulation
from narrowgauge.nn.cpu_emulation import EmulatedProducts

HALVES = [torch.bfloat16, torch.float16]


def rounded_once(exact, dtype):
    return exact.to(torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_products_are_the_exact_sum_rounded_once(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(24, 40).to(dtype), torch.randn(16, 40).to(dtype)
    exact = a.double() @ b.double().t()
    with EmulatedProducts():
        results = {
            "linear": F.linear(a, b),
            "mm": a @ b.t(),
            "bmm": torch.bmm(a[None], b.t()[None])[0],
            "addmm": torch.addmm(torch.zeros(16, dtype=dtype), a, b.t()),
            "mv": a @ b[0],
        }
    for name, result in results.items():
        assert result.dtype is dtype, name
        want = exact[:, 0] if name == "mv" else exact
        # FP32 accumulation may resolve a tie differently: rarely, and by at most one unit in the last place.
        off = (result.double() - rounded_once(want, dtype).double()).abs()
        assert off.max() <= want.abs().max() * torch.finfo(dtype).eps, name
        assert (off > 0).double().mean() < 0.02, name


@pytest.mark.parametrize("dtype", HALVES)
def test_convolution_and_attention_keep_their_format_in_both_directions(dtype):
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 6, 6).to(dtype).requires_grad_(), torch.randn(4, 3, 3, 3).to(dtype).requires_grad_()
    q = torch.randn(1, 2, 5, 8).to(dtype).requires_grad_()
    with EmulatedProducts():
        conv = F.conv2d(x, w, padding=1)
        attention = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        (conv.float().sum() + attention.float().square().sum()).backward()
    assert conv.dtype is attention.dtype is dtype
    assert x.grad.dtype is w.grad.dtype is q.grad.dtype is dtype
    wide = q.detach().double().requires_grad_()
    reference = F.scaled_dot_product_attention(wide, wide, wide, is_causal=True)
    reference.square().sum().backward()
    torch.testing.assert_close(attention.double(), reference, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(q.grad.double(), wide.grad, rtol=4e-2, atol=4e-2)


def test_convolutions_in_native_fp16_are_differentiated_in_fp32(monkeypatch, set_cpu_formats):
    """torch has no kernel for it, also where a CPU has FP16."""
    set_cpu_formats("fp16", "bf16")
    model = torch.nn.Conv2d(3, 4, 3)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), "fp16")
    assert not engine.step_context.emulated
    seen = []
    widen = cpu_emulation._widen
    monkeypatch.setattr(cpu_emulation, "_widen", lambda value: seen.append(value) or widen(value))
    with engine.forward():
        assert not _get_current_dispatch_mode_stack(), "torch.compile makes graphs of a mode's handler"
        loss = engine.model(torch.randn(2, 3, 6, 6)).float().square().mean()
    assert not seen
    engine.backward(loss)
    assert any(isinstance(value, torch.Tensor) and value.dtype is torch.float16 for value in seen)
    assert engine.step().applied


def test_overflow_becomes_inf_as_on_hardware():
    big = torch.full((1, 64), 300.0, dtype=torch.float16)
    with EmulatedProducts():
        assert (big @ big.t()).isinf().all()


def test_fp32_products_do_not_change():
    a = torch.randn(8, 8)
    outside = a @ a
    with EmulatedProducts():
        assert torch.equal(a @ a, outside)


def test_einsum_is_under_autocast_in_inference_mode_as_well():
    a, b = torch.randn(16, 16), torch.randn(16, 16).bfloat16()
    made = []
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with without_gradients(), torch.autocast("cpu", torch.bfloat16), EmulatedProducts():
            made.append(torch.einsum("ij,jk->ik", a, b))
    assert made[0].dtype is made[1].dtype is torch.bfloat16
    assert torch.equal(*made)
