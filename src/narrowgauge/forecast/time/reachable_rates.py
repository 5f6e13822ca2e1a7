"""What a GPU reaches in training: its datasheet's peaks times measured fractions of them, or its own measurements.

The fractions come from one H200 (``peak_fractions.toml``). Other GPUs are assumed to reach the same fractions of their
own peaks, and a forecast for them says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.hardware import Gpu
from narrowgauge.peak_fractions import get_fraction

WIDE_HEAD_GAIN = 1.57
"""How much faster attention with heads of 128 is than with heads of 64: 372 and 237 TFLOP/s in the profiles of
gpt:8x4096 and gpt-1.3b on an H200. The exponentials are per score, the products per score and head element; between 64
and 128 it is interpolated."""

LAUNCH_S = 3e-6
"""The least time a kernel takes on the device, its start included. Not measured on its own."""
HOST_S = 1e-5
"""What the host takes to launch one kernel in eager mode: where the device is faster, the host is the bound. Not
measured on its own."""


@dataclass(frozen=True)
class ReachableRates:
    """FLOP/s and bytes per second that a GPU reaches: predicted from the tables, or measured on it."""

    gpu: Gpu
    measured: dict[str, float] = field(default_factory=dict)
    """FLOP/s of square products by format, and bytes per second of ``copy``; empty where nothing was measured."""

    @property
    def source(self) -> str:
        """A description of where the rates come from."""
        if self.measured:
            return "measured on this GPU"
        return "measured on an H200" if self.gpu.name == "H200" else "from an H200's shares of the peak"

    def product(self, format: str) -> float:
        """FLOP/s of large matrix products in training.

        Where the GPU's own square product was measured, training is assumed to reach as much of it as on the H200.
        Formats without a measured square product there are taken as BF16.
        """
        if format in self.measured:
            known = format if format in ("bf16", "fp8") else "bf16"
            return self.measured[format] * get_fraction(f"product.{known}") / get_fraction(f"square_product.{known}")
        return self._peak(format) * get_fraction(f"product.{format}")

    def convolution(self, format: str) -> float:
        """FLOP/s of convolutions, forward and backward together: an estimate from one published figure."""
        return self.product(format) * get_fraction("convolution")

    def attention(self, backend: str, format: str, head: int) -> float:
        """FLOP/s of a fused attention kernel; ``head`` is the size of a head."""
        if format in ("fp32", "tf32"):
            return self._peak("fp32") * get_fraction("attention.fp32")
        wide = min(max(head, 32), 128) / 64
        gain = WIDE_HEAD_GAIN ** (wide - 1) if wide > 1 else wide
        return self._peak(format) * get_fraction(f"attention.{backend}") * gain

    def memory(self, kind: str = "") -> float:
        """Bytes per second of kernels of a kind that are bound by memory."""
        share = get_fraction(f"memory.{kind}" if kind in ("activation", "optimizer") else "memory.other")
        if "copy" in self.measured:
            return self.measured["copy"] * share / get_fraction("memory.plain_copy")
        return self.gpu.bandwidth * share

    def _peak(self, format: str) -> float:
        """The format's peak, or that of the next wider one the GPU has."""
        wider = {"fp8": "bf16", "bf16": "fp32", "fp16": "fp32", "tf32": "fp32"}
        while format not in self.gpu.peaks:
            format = wider[format]
        return self.gpu.peaks[format]


def check_below_peak(what: str, rate: float, peak: float, gpu: Gpu) -> float:
    """The fraction of a peak that a measurement reached.

    Raises:
        NarrowgaugeError: The measurement is above the datasheet's peak, which is impossible.
    """
    if rate > peak:
        raise NarrowgaugeError(
            f"{what}: measured {rate:.4g} per second on {gpu.name}, above the datasheet's {peak:.4g} ({gpu.source}). "
            "That is impossible: the clock, the count or the table is wrong"
        )
    return rate / peak
