"""Which of a layer's three products pay in FP8: measured on the GPU at hand, or predicted from the table of GPUs.

FP8 halves a product's time at best, and costs casts: the input and the gradient of the output must be written in FP8,
in two layouts where the product sums over tokens. A product is worth it if it saves more than the casts that only it
needs. Measurements are kept per GPU, torch version and shape, so that a model is measured once.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.data import cache
from narrowgauge.hardware import Device, Gpu
from narrowgauge.kernels import cast
from narrowgauge.nn.gemm import ALL_FP8, BF16, E4M3, E5M2, GemmChoice, product_bf16, product_fp8

PRODUCTS = ("output", "grad_input", "grad_weight")
REACHED = {"bf16": 0.70, "fp8": 0.55, "copy": 0.80}
"""Shares of the datasheet's peaks that training shapes are assumed to reach; bench/kernels.py is to measure them."""


@dataclass(frozen=True)
class Gain:
    """Milliseconds of one product in BF16 and in FP8, the casts that it alone needs included."""

    bf16_ms: float
    fp8_ms: float

    @property
    def pays(self) -> bool:
        return self.fp8_ms < self.bf16_ms


@dataclass(frozen=True)
class Decision:
    """The formats of a layer's products, and why."""

    choice: GemmChoice
    reason: str
    gains: dict[str, Gain]


def decide(rows: int, inputs: int, outputs: int, device: Device, fused: bool) -> Decision:
    """Choose for a layer of a shape. ``fused``: its operands are written in FP8 by their producers, free of charge."""
    if device.kind == "cpu":
        return Decision(ALL_FP8, "emulated on a CPU: slow, with the numbers of the hardware", {})
    gains = measured(rows, inputs, outputs, device, fused)
    how = "measured"
    if gains is None:
        if device.gpu is None:
            return Decision(ALL_FP8, f"{device.name} is not in the table of GPUs; FP8 without a forecast", {})
        gains, how = predicted(rows, inputs, outputs, device.gpu, fused), "predicted"
    choice = GemmChoice(*("fp8" if gains[name].pays else "bf16" for name in PRODUCTS))
    before = sum(gain.bf16_ms for gain in gains.values())
    after = sum(min(gain.bf16_ms, gain.fp8_ms) for gain in gains.values())
    return Decision(choice, f"{how}: {before:.3f} ms in BF16, {after:.3f} ms as chosen", gains)


def predicted(rows: int, inputs: int, outputs: int, gpu: Gpu, fused: bool) -> dict[str, Gain]:
    """From peaks and bandwidth. Every product of a layer has the same number of operations."""
    flops = 2.0 * rows * inputs * outputs
    bf16_ms = flops / (gpu.peak("bf16") * REACHED["bf16"]) * 1e3
    fp8_ms = flops / (gpu.peak("fp8") * REACHED["fp8"]) * 1e3
    per_byte_ms = 1e3 / (gpu.bandwidth * REACHED["copy"])
    read, written, again = (0 if fused else 2), (0 if fused else 1), 1
    casts = {
        "output": rows * inputs * (read + written) * per_byte_ms,
        "grad_input": rows * outputs * (read + written) * per_byte_ms,
        "grad_weight": rows * (inputs + outputs) * again * per_byte_ms,  # the second layout of both
    }
    return {name: Gain(bf16_ms, fp8_ms + casts[name]) for name in PRODUCTS}


def measured(rows: int, inputs: int, outputs: int, device: Device, fused: bool) -> dict[str, Gain] | None:
    """On the GPU at hand, or from an earlier measurement on one like it; None where there is none."""
    if device.kind != "cuda" or not torch.cuda.is_available():
        return None
    key = f"{rows}x{inputs}x{outputs}{'-fused' if fused else ''}"
    path = cache.folder() / f"products-{device.name.replace(' ', '-')}-{torch.__version__}.json"
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_text())
    if key not in known:
        known[key] = {name: [g.bf16_ms, g.fp8_ms] for name, g in _measure(rows, inputs, outputs, fused).items()}
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(known))
    return {name: Gain(*known[key][name]) for name in PRODUCTS}


def _measure(rows: int, inputs: int, outputs: int, fused: bool) -> dict[str, Gain]:
    """Random numbers, because products of zeros run faster than real ones do."""
    x = torch.randn(rows, inputs, device="cuda", dtype=BF16)
    g = torch.randn(rows, outputs, device="cuda", dtype=BF16)
    w = torch.randn(outputs, inputs, device="cuda", dtype=BF16)
    one = torch.ones((), device="cuda")
    x8, x8_t = cast.cast_transpose(x, one, E4M3)
    g8, g8_t = cast.cast_transpose(g, one, E5M2)
    w8, w8_t, inv = cast.cast_weight(w, E4M3)

    def timed(work: Any) -> float:
        for _ in range(3):
            work()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(10):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 10

    second = timed(lambda: cast.transpose(x8)) + timed(lambda: cast.transpose(g8))
    first_x = 0.0 if fused else timed(lambda: cast.cast(x, one, E4M3))
    first_g = 0.0 if fused else timed(lambda: cast.cast(g, one, E5M2))
    return {
        "output": Gain(timed(lambda: product_bf16(x, w.t())), timed(lambda: product_fp8(x8, w8, one, inv)) + first_x),
        "grad_input": Gain(
            timed(lambda: product_bf16(g, w)), timed(lambda: product_fp8(g8, w8_t, one, inv, fast=False)) + first_g
        ),
        "grad_weight": Gain(
            timed(lambda: product_bf16(g.t(), x, torch.float32)),
            timed(lambda: product_fp8(g8_t, x8_t, one, one, torch.float32, fast=False)) + second,
        ),
    }
