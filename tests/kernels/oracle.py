"""Helpers for kernel tests on the CPU: hardware rounding in Triton's interpreter, and comparisons of FP8 codes.

The interpreter (3.9) truncates instead of carrying into the exponent (127.4 becomes 64), has no NaN in E4M3, loses
subnormals and truncates BF16. ``hardware_rounding`` rounds with ml_dtypes to nearest even, as the GPU does, so that
tests can be bit-exact.
"""

import numpy as np
import pytest
import torch

from narrowgauge import kernels
from narrowgauge.kernels import HAVE_TRITON

KERNEL = pytest.mark.skipif(
    not HAVE_TRITON or torch.cuda.is_available(), reason="needs Triton's interpreter; on a GPU tests/gpu has the same"
)


@pytest.fixture
def hardware_rounding(monkeypatch):
    if not HAVE_TRITON or torch.cuda.is_available():
        yield
        return
    import ml_dtypes
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    formats = {
        tl.float8e4nv: (ml_dtypes.float8_e4m3fn, np.uint8),
        tl.float8e5: (ml_dtypes.float8_e5m2, np.uint8),
        tl.bfloat16: (ml_dtypes.bfloat16, np.uint16),
    }

    def convert_as_hardware(input, input_dtype, output_dtype, rounding_mode):
        if input_dtype == tl.float32 and output_dtype in formats:
            low, raw = formats[output_dtype]
            return np.asarray(input).view(np.float32).astype(low).view(raw)
        return convert(input, input_dtype, output_dtype, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert_as_hardware)
    with np.errstate(all="ignore"):  # a GPU does not warn about overflow either
        yield


def codes(x_lp):
    """Map FP8 values to integers in ascending order, without gaps; every NaN is 127."""
    raw = x_lp.view(torch.uint8).int()
    return torch.where(torch.isnan(x_lp.float()), 127, torch.where(raw > 127, 128 - raw, raw))


def assert_same(x_lp, reference, steps=0):
    assert (x_lp.shape, x_lp.dtype) == (reference.shape, reference.dtype)
    assert x_lp.is_contiguous()
    if x_lp.numel():
        assert (codes(x_lp) - codes(reference)).abs().max() <= steps


def assert_transposed(x_lp_t, x_lp):
    assert x_lp_t.is_contiguous()
    assert x_lp_t.dtype == x_lp.dtype
    assert torch.equal(x_lp_t.view(torch.uint8), x_lp.view(torch.uint8).t())


def statistics():
    return torch.zeros(1), torch.zeros(2, dtype=torch.int32)


def draw(*shape, dtype=torch.bfloat16, lowest=-24, highest=12):
    """Return random values over many binades, so that some saturate and some are flushed."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp2(torch.randint(lowest, highest, shape, generator=generator))).to(dtype)


def losses(make_engine, by_kernel, monkeypatch):
    """Return the losses of four steps of a small language model; only its updates use our kernels, or torch."""
    monkeypatch.setattr(kernels, "interpreting", False)
    torch.manual_seed(0)
    engine, found = make_engine(), []
    for _ in range(4):
        tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))
        with engine.forward():
            loss = engine.model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        monkeypatch.setattr(kernels, "interpreting", by_kernel)
        engine.step()
        monkeypatch.setattr(kernels, "interpreting", False)
        found.append(loss.item())
    return found
