"""LayerNorm and RMSNorm with a residual stream, forward and backward, with FP8 output.

Forward, for each row of D columns, everything in FP32:

    r    = x + branch                                   the residual stream, stored in x's type
    mean = sum(r) / D                                   LayerNorm only; RMSNorm: 0
    rstd = 1 / sqrt(sum((r - mean)^2) / D + eps)
    y    = (r - mean) * rstd * weight + bias            stored as BF16, or as FP8 of y * scale

Backward, with h = (r - mean) * rstd and g = grad_output * weight:

    grad_input  = grad_residual + rstd * (g - sum(g) / D - h * sum(g * h) / D)      sum(g) for LayerNorm only
    grad_weight = sum over rows of grad_output * h,   grad_bias = sum over rows of grad_output

Bytes per element with an FP32 stream, a BF16 branch and FP8 outputs: forward 4 + 2 read, 4 + 1 written; backward
2 + 4 + 4 read, 4 + 1 written. Rows stay in registers from the only read to the only write, so the variance is computed
from the deviations and loses no digits.

For backward, forward can also write h in BF16, ``normalized``. Then the FP32 stream need not be kept: h appears only in
products with means and in sums over rows, so its rounding changes grad_input by less than -60 dB. Backward can write y
in FP8 again, so that it need not be kept either. Bytes: forward writes 2 more; backward reads 2 less and writes 1 more.

grad_weight comes from partial sums, added in a fixed order: the same bits on every run. grad_input_lp and its amax come
from grad_input before it is rounded to a 16-bit stream, so that FP8 rounds once. The kernels are in ``norm_kernels``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.errors import UsageError
from narrowgauge.kernels import can_bypass_op, register, use_triton
from narrowgauge.kernels.fp8_formats import FP8_MAX, get_format_name
from narrowgauge.kernels.fp8_tile import quantize_reference
from narrowgauge.kernels.launch import launch_kernel
from narrowgauge.kernels.norm_kernels import backward_kernel, forward_kernel, sum_kernel

REGISTERS = 65536
"""Registers of a multiprocessor."""
MAX_COLUMNS = 8192
"""Wider rows do not fit in the registers of one program."""


class NormOutput(NamedTuple):
    """Results of the forward pass."""

    out: Tensor
    residual: Tensor | None
    """x + branch, in x's type; None without a branch."""
    mean: Tensor | None
    """FP32, one per row; None for RMSNorm."""
    rstd: Tensor
    normalized: Tensor | None = None
    """(r - mean) * rstd in BF16, if it was asked for."""


class LaunchConfig(NamedTuple):
    """Rows per program and iteration, warps per program, programs per multiprocessor, stages of its loads."""

    rows: int
    warps: int
    programs: int
    stages: int = 1


def choose_forward_launch(columns: int, more: bool = False) -> LaunchConfig:
    """Return the launch of forward; ``more``: it adds a bias, or keeps normalized rows, which takes registers."""
    if _block_size(columns) == 1024:
        # Without more: H200, 65,536 rows of 768: 0.141 ms, 0.151 by the rule.
        return LaunchConfig(1, 4, 10 if more else 12)
    return _choose_launch(columns, {1: 24, 4: 7, 8: 3, 16: 1} if more else {1: 28, 4: 7, 8: 4, 16: 2})


def choose_backward_launch(columns: int, bias: bool = False) -> LaunchConfig:
    """Return the launch of backward; ``bias``: it also sums the gradient of a bias."""
    if 768 < columns <= 1024:
        return LaunchConfig(1, 2, 7 if bias else 8)
    return _choose_launch(columns, {1: 16, 2: 10, 4: 3, 8: 2, 16: 1} if bias else {1: 18, 2: 10, 4: 4, 8: 2, 16: 1})


def _choose_launch(columns: int, resident: dict[int, int]) -> LaunchConfig:
    """Give a thread 16 values of a row, and a multiprocessor as many programs as its registers allow: what does not
    fit would start when the others have ended, and run alone.

    Two warps handle 256 of a block's 1024 columns at a time. The last 256 of D = 768 are then known to be empty when
    the kernel is compiled, and cost nothing; likewise for 1536 and 3072. Registers per thread for D = 768, 1024, 2048,
    4096 and 8192, with FP8, amax and counts (Triton 3.6, ptxas, sm_90): forward 40, 40, 70, 64, 64, with a bias 48, 48,
    72, 80, 94; backward 96, 128, 128, 128, 128, with a bias 96, 142, 141, 143, 128.
    """
    block = _block_size(columns)
    warps = min(max(block // 512, 1), 16)
    return LaunchConfig(rows=max(512 // block, 1), warps=warps, programs=resident[warps])


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
    keep: bool = False,
    later: torch.dtype | None = None,
) -> NormOutput:
    """Return norm(x + branch) * weight + bias of [N, D] as ``dtype``; with ``scale`` as scaled, saturated FP8.

    With ``later``, an FP8 format, ``dtype`` is a wider one, and ``scale``, ``amax`` and ``counts`` are those of a cast
    to that format which follows later, such as in backward.
    """
    if later is not None and dtype in FP8_MAX:
        raise UsageError(f"norm: its output is in {dtype} already; it cannot be cast to {later} later")
    _check(x, weight, kind, scale, later or dtype, counts, (branch,))
    run = _forward if can_bypass_op(x, weight) else _forward_op
    normalized = x.new_empty(x.shape, dtype=torch.bfloat16) if keep else None
    out, residual, mean, rstd = run(
        x, weight, bias, eps, kind, branch, scale, dtype, amax, counts, normalized, later
    )  # fmt: skip
    return NormOutput(out, None if branch is None else residual, mean if kind == "layer" else None, rstd, normalized)


def norm_backward(
    grad_output: Tensor,
    residual: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    kind: str = "layer",
    grad_residual: Tensor | None = None,
    has_bias: bool = False,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    stream_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return (grad_input, grad_input_lp, grad_weight, grad_bias).

    ``grad_output`` is the gradient of ``out``, ``grad_residual`` that of the residual stream. grad_input_lp is a second
    copy of grad_input: with ``scale`` in FP8 (``dtype``, by default E5M2), without it in ``dtype`` if that is a wider
    format. ``amax`` and ``counts`` are those of grad_input. ``stream_dtype`` is its dtype, by default that of
    ``residual``.
    """
    if (mean is None) != (kind == "rms"):
        raise UsageError(f"norm_backward: kind={kind} {'needs the' if mean is None else 'has no'} mean")
    lp = dtype or torch.float8_e5m2
    plain = scale is None and dtype is None
    _check(residual, weight, kind, scale, residual.dtype if plain else lp, counts, (grad_output, grad_residual))
    run = _backward if can_bypass_op(grad_output, residual, weight) else _backward_op
    grad_input, grad_input_lp, grad_weight, grad_bias = run(
        grad_output, residual, weight, mean, rstd, grad_residual, has_bias, scale, lp, amax, counts, "", stream_dtype,
        None, None, None,
    )  # fmt: skip
    return grad_input, None if plain else grad_input_lp, grad_weight, grad_bias if has_bias else None


def norm_backward_normalized(
    grad_output: Tensor,
    normalized: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rstd: Tensor,
    stream_dtype: torch.dtype,
    *,
    kind: str = "layer",
    grad_residual: Tensor | None = None,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    forward_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Return what ``norm_backward`` does, from ``normalized`` in place of the residual stream of ``stream_dtype``.

    With ``forward_scale`` the last is forward's output in E4M3, computed again from ``normalized``.
    """
    lp = dtype or torch.float8_e5m2
    plain = scale is None and dtype is None
    _check(normalized, weight, kind, scale, stream_dtype if plain else lp, counts, (grad_output, grad_residual))
    run = _backward if can_bypass_op(grad_output, normalized, weight) else _backward_op
    again = None if forward_scale is None else torch.empty_like(normalized, dtype=torch.float8_e4m3fn)
    has_bias = bias is not None
    grad_input, grad_input_lp, grad_weight, grad_bias = run(
        grad_output, normalized, weight, None, rstd, grad_residual, has_bias, scale, lp, amax, counts, kind,
        stream_dtype, bias, again, forward_scale,
    )  # fmt: skip
    return grad_input, None if plain else grad_input_lp, grad_weight, grad_bias if has_bias else None, again


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
            raise UsageError(
                f"norm: a tensor of shape {tuple(other.shape)} does not match one of shape {tuple(x.shape)}"
            )
    if (scale is not None) != (dtype in FP8_MAX) or (counts is not None and scale is None):
        raise UsageError(f"norm: FP8 output needs a scale, and counts need FP8 output; got {dtype} and scale {scale}")


def norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str, branch: Tensor | None,
    scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None,
    normalized: Tensor | None = None, later: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (out, residual, mean, rstd) in plain torch; a missing one is empty, as an op cannot return None."""
    wide = torch.promote_types(x.dtype, torch.float32)  # FP64 stays FP64
    residual = x.new_empty(0) if branch is None else (x.to(wide) + branch.to(wide)).to(x.dtype)
    r = (x if branch is None else residual).to(wide)
    mean = r.mean(-1) if kind == "layer" else r.new_empty(0)
    if kind == "layer":
        r = r - mean[:, None]
    rstd = 1 / torch.sqrt(r.square().mean(-1) + eps)
    if normalized is not None:
        normalized.copy_(r * rstd[:, None])
    y = r * rstd[:, None] * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    out = _store_reference(y, scale, later or dtype, amax, counts)
    return out if later is None else y.to(dtype), residual, mean, rstd


def norm_backward_reference(
    grad_output: Tensor, residual: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
    grad_residual: Tensor | None,
    has_bias: bool, scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None,
    normalized_kind: str = "", stream_dtype: torch.dtype | None = None, bias: Tensor | None = None,
    again: Tensor | None = None, forward_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (grad_input, grad_input_lp, grad_weight, grad_bias) in plain torch; a missing one is empty.

    With ``normalized_kind`` the second argument is normalized, by a norm of that kind.
    """
    wide = torch.promote_types(residual.dtype, torch.float32)
    grad_output = grad_output.to(wide)
    h = residual.to(wide)
    if not normalized_kind:
        h = (h if mean is None else h - mean[:, None]) * rstd[:, None]
    if again is not None and forward_scale is not None:
        y = h * weight.to(wide)
        again.copy_(quantize_reference(y if bias is None else y + bias.to(wide), forward_scale, again.dtype))
    g = grad_output * weight.to(wide)
    grad_input = g - h * (g * h).mean(-1, keepdim=True)
    if mean is not None or normalized_kind == "layer":
        grad_input = grad_input - g.mean(-1, keepdim=True)
    grad_input = grad_input * rstd[:, None]
    if grad_residual is not None:
        grad_input = grad_input + grad_residual.to(wide)
    copied = scale is not None or dtype not in FP8_MAX
    grad_input_lp = _store_reference(grad_input, scale, dtype if copied else grad_input.dtype, amax, counts)
    if not copied:
        grad_input_lp = grad_input.new_empty(0, dtype=dtype)
    grad_bias = grad_output.sum(0) if has_bias else grad_output.new_empty(0)
    return grad_input.to(stream_dtype or residual.dtype), grad_input_lp, (grad_output * h).sum(0), grad_bias


def _store_reference(
    y: Tensor, scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None
) -> Tensor:
    if scale is not None:
        return quantize_reference(y, scale, dtype, amax, counts)
    if amax is not None and y.numel():
        amax.copy_(torch.maximum(amax, y.abs().amax()))  # maximum propagates NaN
    return y.to(dtype)


def _block_size(columns: int) -> int:
    return max(1 << (columns - 1).bit_length(), 16)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _count_programs(x: Tensor, config: LaunchConfig) -> int:
    return min(-(-x.shape[0] // config.rows), config.programs * _multiprocessors(x.device))


def _launch_constants(x: Tensor, config: LaunchConfig, lp: torch.dtype, more: bool) -> dict[str, Any]:
    """Return the constants of a launch; with ``more`` registers in use, the compiler receives a limit."""
    limit = {"maxnreg": min(255, REGISTERS // (32 * config.warps * config.programs) // 8 * 8)} if more else {}
    sizes = {"D": x.shape[1], "BLOCK": _block_size(x.shape[1]), "ROWS": config.rows, "STAGES": config.stages}
    return {**sizes, "FORMAT": get_format_name(lp), "num_warps": config.warps, **limit}


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str, branch: Tensor | None,
    scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None,
    normalized: Tensor | None, later: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if not use_triton(x):
        return norm_reference(x, weight, bias, eps, kind, branch, scale, dtype, amax, counts, normalized, later)
    out, residual, mean, rstd = _forward_fake(x, weight, bias, eps, kind, branch, scale, dtype, amax, counts, None)
    if x.numel():
        more = bias is not None or normalized is not None
        config = choose_forward_launch(x.shape[1], more)
        launch_kernel(
            forward_kernel, (_count_programs(x, config),),
            x.contiguous(), None if branch is None else branch.contiguous(), weight, bias, scale, out,
            None if branch is None else residual, mean if kind == "layer" else None, rstd, amax, counts,
            normalized, x.shape[0], eps, **_launch_constants(x, config, later or dtype, more),
            IN_FP8=dtype in FP8_MAX,
        )  # fmt: skip
    return out, residual, mean, rstd


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str, branch: Tensor | None,
    scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None,
    normalized: Tensor | None, later: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    residual = x.new_empty(x.shape if branch is not None else (0,))
    mean = x.new_empty(x.shape[0] if kind == "layer" else 0, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), residual, mean, x.new_empty(x.shape[0], dtype=torch.float32)


def _backward(
    grad_output: Tensor, residual: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
    grad_residual: Tensor | None,
    has_bias: bool, scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None,
    normalized_kind: str, stream_dtype: torch.dtype | None, bias: Tensor | None, again: Tensor | None,
    forward_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    arguments = (
        grad_output, residual, weight, mean, rstd, grad_residual, has_bias, scale, dtype, amax, counts,
        normalized_kind, stream_dtype, bias, again, forward_scale,
    )  # fmt: skip
    if not use_triton(residual):
        return norm_backward_reference(*arguments)
    grad_input, grad_input_lp, grad_weight, grad_bias = _backward_fake(*arguments)
    columns = residual.shape[1]
    config = choose_backward_launch(columns, has_bias)
    programs = _count_programs(residual, config)
    partials = [rstd.new_empty(programs, columns) for _ in range(1 + has_bias)]
    if programs:
        launch_kernel(
            backward_kernel, (programs,),
            grad_output.contiguous(), residual.contiguous(), weight, mean, rstd,
            None if grad_residual is None else grad_residual.contiguous(), scale, grad_input,
            grad_input_lp if grad_input_lp.numel() else None,
            partials[0], partials[1] if has_bias else None, amax, counts, bias, again, forward_scale,
            residual.shape[0], **_launch_constants(residual, config, dtype, has_bias), NORMALIZED=bool(normalized_kind),
            LAYER=mean is not None or normalized_kind == "layer",
        )  # fmt: skip
    for partial, total in zip(partials, (grad_weight, grad_bias), strict=False):
        # 16 columns are two whole sectors. 256 rows at once mean few waits for L2.
        launch_kernel(
            sum_kernel, (-(-columns // 16),), partial, total, programs, D=columns, ROWS=256, COLS=16, num_warps=8
        )
    return grad_input, grad_input_lp, grad_weight, grad_bias


def _backward_fake(
    grad_output: Tensor, residual: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor,
    grad_residual: Tensor | None,
    has_bias: bool, scale: Tensor | None, dtype: torch.dtype, amax: Tensor | None, counts: Tensor | None,
    normalized_kind: str, stream_dtype: torch.dtype | None, bias: Tensor | None, again: Tensor | None,
    forward_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    copied = scale is not None or dtype not in FP8_MAX
    grad_input_lp = residual.new_empty(residual.shape if copied else (0,), dtype=dtype)
    grad_bias = rstd.new_empty(residual.shape[1] if has_bias else 0)
    grad_input = residual.new_empty(residual.shape, dtype=stream_dtype or residual.dtype)
    return grad_input, grad_input_lp, rstd.new_empty(residual.shape[1]), grad_bias


_forward_op = register("norm", _forward, _forward_fake, ("amax", "counts", "normalized"))
_backward_op = register("norm_backward", _backward, _backward_fake, ("amax", "counts", "again"))
