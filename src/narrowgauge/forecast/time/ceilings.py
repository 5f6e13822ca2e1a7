"""How much of a GPU's datasheet training reaches: measured shares, each with its source, in one table.

All were measured on one H200; other GPUs are taken to reach the same shares of their own peaks, and a forecast for them
says so ("from an H200's shares"). ``hardware.toml`` has the peaks. Shares, not rates: a share above 1 cannot be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.hardware import Gpu

PRODUCT = {"bf16": 0.72, "fp16": 0.72, "fp8": 0.69, "tf32": 0.72, "fp32": 0.80}
"""Matrix products inside of whole training steps: the step's FLOPs over the time of its GEMM kernels in a profile. BF16
730, 698 and 702 TFLOP/s of 989 at 124M, 8x4096 and 24x2048; FP8 1,328, 1,346 and 1,413 of 1,979. FP16 and TF32 are
taken to reach what BF16 does; FP32 is what is left of gpt2-124m's FP32 step (1,126 ms) when the rest is predicted:
these three are not measured by themselves."""

SQUARE = {"bf16": 0.780, "fp8": 0.706}
"""A product of 8192 x 8192 x 8192 by itself: 772 and 1,398 TFLOP/s. Where a GPU's own was measured, training is taken
to reach as much of it as on the H200; formats without a figure here, as BF16."""

ATTENTION = {"cudnn": 0.240, "flash": 0.157, "efficient": 0.082}
"""Forward and backward together, heads of 64, causal, BF16, of the BF16 peak: 1.52, 2.33 and 4.45 ms for 361 GFLOP
(docs/results.md, "Attention")."""
ATTENTION_128 = 1.57
"""Heads of 128 reach so much more: 372 TFLOP/s in the profiles of 8x4096 and 24x2048, where heads of 64 reach 237. The
exponentials are per score, the products per score and head element; between 64 and 128 it is interpolated."""
ATTENTION_FP32 = 0.35
"""Of the FP32 peak, in FP32 and TF32: what is left of gpt2-124m's TF32 step (369 ms), not measured by itself."""

MEMORY = {"activation": 0.72, "optimizer": 0.76}
MEMORY_ELSE = 0.80
"""Share of the datasheet's bandwidth. Kernels by their bytes (docs/results.md, "What was tried" and "An optimizer's
step"): norm 0.141 ms for 553 MB = 0.82, casts 0.054 ms for 201 MB = 0.78, packing 0.167 ms for 604 MB = 0.75, GELU and
its backward 0.257 and 0.365 ms for 805 and 1,409 MB = 0.65 and 0.80; AdamW 10.75 ms (torch) and 9.16 ms (ours) for
36.7 GB = 0.71 and 0.83, with 8-bit moments 5.06 ms for 18.6 GB = 0.77."""
COPY = 0.873
"""A plain copy, which nothing exceeds: 4.19 of 4.8 TB/s."""

LAUNCH_S = 3e-6
"""The least a kernel takes on the device, and one waits for the next. Not measured by itself."""
HOST_S = 1e-5
"""What the host takes to start one, uncompiled: where the device is faster than that, the host is the bound. Not
measured by itself."""


@dataclass(frozen=True)
class Ceilings:
    """What a GPU reaches in FLOP/s and bytes per second: predicted from the table, or measured on it."""

    gpu: Gpu
    rates: dict[str, float] = field(default_factory=dict)
    """Measured: FLOP/s of products by format, and bytes per second of ``copy``; empty where nothing was."""

    @property
    def source(self) -> str:
        if self.rates:
            return "measured on this GPU"
        return "measured on an H200" if self.gpu.name == "H200" else "from an H200's shares of the peak"

    def product(self, format: str) -> float:
        """FLOP/s of large matrix products in training."""
        if format in self.rates:
            known = format if format in SQUARE else "bf16"
            return self.rates[format] * PRODUCT[known] / SQUARE[known]
        return self._peak(format) * PRODUCT[format]

    def attention(self, backend: str, format: str, head: int) -> float:
        """FLOP/s of a fused attention kernel."""
        if format in ("fp32", "tf32"):
            return self._peak("fp32") * ATTENTION_FP32
        wide = min(max(head, 32), 128) / 64
        gain = ATTENTION_128 ** (wide - 1) if wide > 1 else wide
        return self._peak(format) * ATTENTION[backend] * gain

    def memory(self, kind: str = "") -> float:
        """Bytes per second of kernels that are bound by memory."""
        share = MEMORY.get(kind, MEMORY_ELSE)
        return self.rates["copy"] * share / COPY if "copy" in self.rates else self.gpu.bandwidth * share

    def _peak(self, format: str) -> float:
        """The format's peak, or that of the next wider one the GPU has."""
        wider = {"fp8": "bf16", "bf16": "fp32", "fp16": "fp32", "tf32": "fp32"}
        while format not in self.gpu.peaks:
            format = wider[format]
        return self.gpu.peaks[format]


def check_below_roof(what: str, rate: float, roof: float, gpu: Gpu) -> float:
    """The share of a roof that a measurement reached. Above it something is wrong, and that is an error."""
    if rate > roof:
        raise NarrowgaugeError(
            f"{what}: {rate:.4g} per second was measured on {gpu.name}, above the {roof:.4g} of its datasheet "
            f"({gpu.source}), which cannot be: the clock, the count or the table is wrong"
        )
    return rate / roof
