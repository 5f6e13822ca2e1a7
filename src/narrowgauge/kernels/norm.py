"""LayerNorm and RMSNorm beside a residual stream, forward and backward, that write FP8 themselves.

Forward, for each row of D columns, everything in FP32:

    r    = x + branch                                   the residual stream, stored in x's type
    mean = sum(r) / D                                   LayerNorm only; RMSNorm: 0
    rstd = 1 / sqrt(sum((r - mean)^2) / D + eps)
    y    = (r - mean) * rstd * weight + bias            stored as BF16, or as FP8 of y * scale

Backward, with h = (r - mean) * rstd and g = dout * weight:

    dx      = dresidual + rstd * (g - sum(g) / D - h * sum(g * h) / D)      sum(g) for LayerNorm only
    dweight = sum over rows of dout * h,   dbias = sum over rows of dout

Bytes per element with an FP32 stream, a BF16 branch and FP8 outputs: forward 4 + 2 read, 4 + 1 written; backward
2 + 4 + 4 read, 4 + 1 written. Rows stay in registers from the only read to the only write, so the variance is that of
the deviations and loses no digits.

dweight comes from partial sums, added up in a fixed order: the same bits on every run. dx_lp and its amax come from dx
before it is rounded to a 16-bit stream, so that FP8 rounds once. The kernels are in ``norm_kernels``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import FP8_MAX, direct, register, use_triton
from narrowgauge.kernels.fp8_tile import FLUSHED, quantize_reference
from narrowgauge.kernels.norm_kernels import backward_kernel, forward_kernel, sum_kernel

MAX_COLUMNS = 8192
"""Wider rows do not fit into the registers of one program."""


class Normed(NamedTuple):
    """What the forward pass leaves behind."""

    out: Tensor
    residual: Tensor | None
    """x + branch, in x's type; None where no branch was added."""
    mean: Tensor | None
    """FP32, one per row; None for RMSNorm."""
    rstd: Tensor


class Cut(NamedTuple):
    """How work is cut: rows a program holds at once, its warps, programs per multiprocessor, stages of its loads."""

    rows: int
    warps: int
    programs: int
    stages: int = 1


def forward_cut(columns: int) -> Cut:
    if _block(columns) == 1024:
        return Cut(rows=1, warps=4, programs=12)  # 0.141 ms for 65,536 rows of 768 on an H200, where _cut's took 0.151
    return _cut(columns, {1: 28, 2: 16, 4: 7, 8: 4, 16: 2})


def backward_cut(columns: int) -> Cut:
    return _cut(columns, {1: 18, 2: 10, 4: 4, 8: 2, 16: 1})


def _cut(columns: int, resident: dict[int, int]) -> Cut:
    """16 values of a row per thread, and as many programs as the registers of a multiprocessor hold of them.

    Of a block of 1024 columns two warps take 256 at a time, so that the last 256 of D = 768 are known to be empty when
    the kernel is compiled, and cost nothing; likewise with 1536 and 3072. Registers of a thread for D = 768, 2048, 4096
    and 8192, with FP8, amax and counts (Triton 3.6, ptxas, sm_90): forward 55, 72, 64, 64; backward 96, 128, 128, 128.
    """
    block = _block(columns)
    warps = min(max(block // 512, 1), 16)
    return Cut(rows=max(512 // block, 1), warps=warps, programs=resident[warps])


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    kind: str = "layer",
    branch: Tensor | None = None,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> Normed:
    """norm(x + branch) * weight + bias of [N, D] as ``dtype``; with ``scale`` as saturated FP8 of the scaled value."""
    _check(x, weight, kind, scale, dtype, counts, (branch,))
    run = _forward if direct(x, weight) else _forward_op
    out, residual, mean, rstd = run(x, weight, bias, eps, kind, branch, scale, dtype, amax, counts)
    return Normed(out, None if branch is None else residual, mean if kind == "layer" else None, rstd)


def norm_backward(
    dout: Tensor,
    residual: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    kind: str = "layer",
    dresidual: Tensor | None = None,
    has_bias: bool = False,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(dx, dx_lp, dweight, dbias) from the gradients of ``out`` and, as ``dresidual``, of the residual stream itself.

    dx_lp is a second copy of dx: FP8 where ``scale`` is given, in ``dtype`` (E5M2 unless told), or else in ``dtype``
    where that is a wider format; ``amax`` and ``counts`` are those of dx.
    """
    lp = dtype or torch.float8_e5m2
    plain = scale is None and dtype is None
    _check(residual, weight, kind, scale, residual.dtype if plain else lp, counts, (dout, dresidual))
    if (mean is None) != (kind == "rms"):
        raise UsageError(f"norm_backward: kind={kind} {'needs the' if mean is None else 'has no'} mean")
    run = _backward if direct(dout, residual, weight) else _backward_op
    dx, dx_lp, dweight, dbias = run(dout, residual, weight, mean, rstd, dresidual, has_bias, scale, lp, amax, counts)
    return dx, None if plain else dx_lp, dweight, dbias if has_bias else None


def _check(
    x: Tensor, weight: Tensor, kind: str, scale: Tensor | None, dtype: torch.dtype, counts: Tensor | None,
    others: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    if kind not in ("layer", "rms"):
        raise UsageError(f"norm: kind={kind} is unknown; expected layer or rms")
    if x.dim() != 2 or weight.shape != x.shape[1:] or not 1 <= x.shape[1] <= MAX_COLUMNS:
        raise UsageError(
            f"norm: expected rows of 1 to {MAX_COLUMNS} columns and a weight for each column, got {tuple(x.shape)} "
            f"and {tuple(weight.shape)}"
        )
    for other in others:
        if other is not None and other.shape != x.shape:
            raise UsageError(f"norm: a tensor of shape {tuple(other.shape)} does not go with one of {tuple(x.shape)}")
    if (scale is not None) != (dtype in FP8_MAX) or (counts is not None and scale is None):
        raise UsageError(f"norm: FP8 goes with a scale, and counts with both; got {dtype} and scale {scale}")


def norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str, branch: Tensor | None,
    scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, residual, mean, rstd) in plain torch; what is not there is empty, as ops return no None."""
    wide = torch.promote_types(x.dtype, torch.float32)  # doubles stay doubles
    residual = x.new_empty(0) if branch is None else (x.to(wide) + branch.to(wide)).to(x.dtype)
    r = (x if branch is None else residual).to(wide)
    mean = r.mean(-1) if kind == "layer" else r.new_empty(0)
    if kind == "layer":
        r = r - mean[:, None]
    rstd = 1 / torch.sqrt(r.square().mean(-1) + eps)
    y = r * rstd[:, None] * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return _store_reference(y, scale, dtype, amax, counts), residual, mean, rstd


def norm_backward_reference(
    dout: Tensor, residual: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dresidual: Tensor | None,
    has_bias: bool, scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dx_lp, dweight, dbias) in plain torch; what is not there is empty."""
    wide = torch.promote_types(residual.dtype, torch.float32)
    dout = dout.to(wide)
    h = (residual.to(wide) if mean is None else residual.to(wide) - mean[:, None]) * rstd[:, None]
    g = dout * weight.to(wide)
    dx = g - h * (g * h).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd[:, None]
    if dresidual is not None:
        dx = dx + dresidual.to(wide)
    copied = scale is not None or dtype not in FP8_MAX
    dx_lp = _store_reference(dx, scale, dtype if copied else dx.dtype, amax, counts)
    if not copied:
        dx_lp = dx.new_empty(0, dtype=dtype)
    dbias = dout.sum(0) if has_bias else dout.new_empty(0)
    return dx.to(residual.dtype), dx_lp, (dout * h).sum(0), dbias


def _store_reference(
    y: Tensor, scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None
) -> Tensor:
    if scale is not None:
        return quantize_reference(y, scale, dtype, amax, counts)
    if amax is not None and y.numel():
        amax.copy_(torch.maximum(amax, y.abs().amax()))  # maximum lets NaN through
    return y.to(dtype)


def _block(columns: int) -> int:
    return max(1 << (columns - 1).bit_length(), 16)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _grid(x: Tensor, cut: Cut) -> int:
    return min(-(-x.shape[0] // cut.rows), cut.programs * _multiprocessors(x.device))


def _constants(x: Tensor, cut: Cut, lp: torch.dtype) -> dict[str, Any]:
    sizes = {"D": x.shape[1], "BLOCK": _block(x.shape[1]), "ROWS": cut.rows, "STAGES": cut.stages}
    return {**sizes, "LIMIT": FP8_MAX.get(lp), "TINY": FLUSHED.get(lp), "num_warps": cut.warps}


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str, branch: Tensor | None,
    scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not use_triton(x):
        return norm_reference(x, weight, bias, eps, kind, branch, scale, dtype, amax, counts)
    out, residual, mean, rstd = _forward_fake(x, weight, bias, eps, kind, branch, scale, dtype, amax, counts)
    if x.numel():
        cut = forward_cut(x.shape[1])
        forward_kernel[(_grid(x, cut),)](
            x.contiguous(), None if branch is None else branch.contiguous(), weight, bias, scale, out,
            None if branch is None else residual, mean if kind == "layer" else None, rstd, amax, counts,
            x.shape[0], eps, **_constants(x, cut, dtype),
        )  # fmt: skip
    return out, residual, mean, rstd


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str, branch: Tensor | None,
    scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    residual = x.new_empty(x.shape if branch is not None else (0,))
    mean = x.new_empty(x.shape[0] if kind == "layer" else 0, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), residual, mean, x.new_empty(x.shape[0], dtype=torch.float32)


def _backward(
    dout: Tensor, residual: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dresidual: Tensor | None,
    has_bias: bool, scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    arguments = dout, residual, weight, mean, rstd, dresidual, has_bias, scale, dtype, amax, counts
    if not use_triton(residual):
        return norm_backward_reference(*arguments)
    dx, dx_lp, dweight, dbias = _backward_fake(*arguments)
    columns = residual.shape[1]
    cut = backward_cut(columns)
    programs = _grid(residual, cut)
    partials = [rstd.new_empty(programs, columns) for _ in range(1 + has_bias)]
    if programs:
        backward_kernel[(programs,)](
            dout.contiguous(), residual.contiguous(), weight, mean, rstd,
            None if dresidual is None else dresidual.contiguous(), scale, dx, dx_lp if dx_lp.numel() else None,
            partials[0], partials[1] if has_bias else None, amax, counts,
            residual.shape[0], **_constants(residual, cut, dtype),
        )  # fmt: skip
    for partial, total in zip(partials, (dweight, dbias), strict=False):
        # 16 columns are two whole sectors; 256 rows at once leave few trips through the latency of L2.
        sum_kernel[(-(-columns // 16),)](partial, total, programs, D=columns, ROWS=256, COLS=16, num_warps=8)
    return dx, dx_lp, dweight, dbias


def _backward_fake(
    dout: Tensor, residual: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dresidual: Tensor | None,
    has_bias: bool, scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    copied = scale is not None or dtype not in FP8_MAX
    dx_lp = residual.new_empty(residual.shape if copied else (0,), dtype=dtype)
    dbias = rstd.new_empty(residual.shape[1] if has_bias else 0)
    return residual.new_empty(residual.shape), dx_lp, rstd.new_empty(residual.shape[1]), dbias


_forward_op = register("norm", _forward, _forward_fake, ("amax", "counts"))
_backward_op = register("norm_backward", _backward, _backward_fake, ("amax", "counts"))
