"""Chooses which of a layer's three products run in FP8: measured on the installed GPU, or predicted from the table.

FP8 at best halves a product's time, and it costs casts: the input and the gradient of the output are needed in FP8, in
two layouts where the product sums over tokens. Products share operands, so the three are chosen together: the fastest
of all eight combinations, casts included. Measurements are cached per GPU, versions and shape.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from narrowgauge.data import cache
from narrowgauge.hardware import Device, Gpu, is_assumed
from narrowgauge.kernels import cast, cast_weights
from narrowgauge.kernels.cast_block_scales import cast_block_scales
from narrowgauge.kernels.cast_row_scales import cast_row_scales
from narrowgauge.nn.products.gemm import ALL_FP8, BF16, E4M3, E5M2, FAST_DEPTH, GemmChoice, multiply_bf16, multiply_fp8
from narrowgauge.peak_fractions import get_fraction

VERSION = 4
"""Version of the measurement, increased when kernels or the method change, so that old figures are not used."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a layer's products in both formats, and of the casts to FP8."""

    bf16: tuple[float, ...]
    fp8: tuple[float, ...]
    cast_input: float
    cast_grad: float
    turn_input: float
    turn_grad: float

    def of(self, choice: GemmChoice, fused: bool) -> float:
        """The whole layer. ``fused``: the kernel that computes an operand writes one format of it at no cost."""
        total = self.products(choice)
        for kinds, price in (
            ({choice.output, choice.grad_weight}, self.cast_input),
            ({choice.grad_input, choice.grad_weight}, self.cast_grad),
        ):
            total += price if (len(kinds) == 2 if fused else "fp8" in kinds) else 0.0
        return total + (self.turn_input + self.turn_grad if choice.grad_weight == "fp8" else 0.0)

    def products(self, choice: GemmChoice) -> float:
        """The products without casts."""
        return sum((self.fp8 if kind == "fp8" else self.bf16)[i] for i, kind in enumerate(choice))


@dataclass(frozen=True)
class Decision:
    """The formats of a layer's products, and why."""

    choice: GemmChoice
    reason: str
    costs: Costs | None = None
    bf16_ms: float = 0.0
    """The layer's three products in BF16."""
    chosen_ms: float = 0.0
    """The chosen combination, casts included."""


def decide(rows: int, inputs: int, outputs: int, device: Device, fused: bool, granularity: str = "tensor") -> Decision:
    """Choose the formats of a layer. ``fused``: the kernels that compute its operands write them in FP8."""
    if device.kind == "cpu":
        return Decision(ALL_FP8, "emulated on a CPU: slow, with the numerics of the hardware")
    costs, how = measure_costs(rows, inputs, outputs, device, granularity), "measured"
    if costs is None:
        if device.gpu is None:
            return Decision(ALL_FP8, f"{device.name} is not in the table of GPUs; FP8 without a prediction")
        costs, how = predict_costs(rows, inputs, outputs, device.gpu, granularity), "predicted"
    choices = [GemmChoice(*kinds) for kinds in itertools.product(("fp8", "bf16"), repeat=3)]
    choice = min(choices, key=lambda choice: costs.of(choice, fused))
    before, after = sum(costs.bf16), costs.of(choice, fused)
    casts = after - costs.products(choice)
    reason = f"{how}: {before:.3f} ms in BF16, {after:.3f} ms as chosen, of which casts {casts:.3f}"
    return Decision(choice, reason, costs, before, after)


def predict_costs(rows: int, inputs: int, outputs: int, gpu: Gpu, granularity: str = "tensor") -> Costs:
    """Predict from peaks and bandwidth. All three products of a layer have the same number of FLOPs."""
    flops = 2.0 * rows * inputs * outputs
    bf16_ms = flops / (gpu.peak("bf16") * get_fraction("product.bf16")) * 1e3
    fp8_ms = flops / (gpu.peak("fp8") * get_fraction("product.fp8")) * 1e3
    byte_ms = 1e3 / (gpu.bandwidth * get_fraction("memory.other"))
    x, g = rows * inputs * byte_ms, rows * outputs * byte_ms
    once = 5 if granularity == "row" else 3  # 2 bytes read, 1 written; 2 more for the amax of rows
    return Costs((bf16_ms,) * 3, (fp8_ms,) * 3, once * x, once * g, x, g)  # 1 for the second layout


def measure_costs(rows: int, inputs: int, outputs: int, device: Device, granularity: str = "tensor") -> Costs | None:
    """Measure on the installed GPU, or read an earlier measurement for the same GPU; None without a GPU."""
    if device.kind != "cuda" or is_assumed() or not torch.cuda.is_available():
        return None
    key = f"{rows}x{inputs}x{outputs}" + ("" if granularity == "tensor" else f"-{granularity}")
    path = cache.get_folder() / f"products-{VERSION}-{device.name.replace(' ', '-')}-{torch.__version__}.json"
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_text())
    if key not in known:
        fine = granularity != "tensor"
        shape = rows, inputs, outputs
        known[key] = asdict(_measure_fine(*shape, granularity) if fine else _measure(*shape))
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(known))
    return Costs(**known[key])


def _measure(rows: int, inputs: int, outputs: int) -> Costs:
    """The data is random, because products of zeros run faster than real ones."""
    x = torch.randn(rows, inputs, device="cuda", dtype=BF16)
    g = torch.randn(rows, outputs, device="cuda", dtype=BF16)
    w = torch.randn(outputs, inputs, device="cuda", dtype=BF16)
    one = torch.ones((), device="cuda")
    x8, x8_t = cast.cast_transpose(x, one, E4M3)
    g8, g8_t = cast.cast_transpose(g, one, E5M2)
    w8, w8_t, inv, _ = cast_weights.cast_weight([w], E4M3)
    assert w8_t is not None
    return Costs(
        bf16=_measure_bf16(x, g, w),
        fp8=(
            timed(lambda: multiply_fp8(x8, w8, one, inv)),
            timed(lambda: multiply_fp8(g8, w8_t, one, inv, fast=outputs <= FAST_DEPTH)),
            timed(lambda: multiply_fp8(g8_t, x8_t, one, one, torch.float32, fast=False)),
        ),
        cast_input=timed(lambda: cast.cast(x, one, E4M3)),
        cast_grad=timed(lambda: cast.cast(g, one, E5M2)),
        turn_input=timed(lambda: cast.transpose(x8)),
        turn_grad=timed(lambda: cast.transpose(g8)),
    )


def _measure_fine(rows: int, inputs: int, outputs: int, granularity: str) -> Costs:
    """With a scale for each row or block. One kernel writes both layouts: the second costs what is added by it."""
    x, g, w = (
        torch.randn(shape, device="cuda", dtype=BF16) for shape in ((rows, inputs), (rows, outputs), (outputs, inputs))
    )
    cast_finely = cast_row_scales if granularity == "row" else cast_block_scales
    x8, g8 = (cast_finely(one, kind) for one, kind in ((x, E4M3), (g, E5M2)))
    w8 = cast_row_scales(w, E4M3) if granularity == "row" else cast_block_scales(w, E4M3, square=True)
    casts = [
        timed(functools.partial(cast_finely, one, kind, both))
        for one, kind in ((x, E4M3), (g, E5M2))
        for both in (False, True)
    ]
    return Costs(
        bf16=_measure_bf16(x, g, w),
        fp8=(
            timed(lambda: multiply_fp8(x8.lp, w8.lp, x8.inv_scale, w8.inv_scale)),
            timed(lambda: multiply_fp8(g8.lp, w8.lp_t, g8.inv_scale, w8.inv_scale_t, fast=outputs <= FAST_DEPTH)),
            timed(lambda: multiply_fp8(g8.lp_t, x8.lp_t, g8.inv_scale_t, x8.inv_scale_t, torch.float32, fast=False)),
        ),
        cast_input=casts[0],
        cast_grad=casts[2],
        turn_input=max(0.0, casts[1] - casts[0]),
        turn_grad=max(0.0, casts[3] - casts[2]),
    )


def _measure_bf16(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> tuple[float, float, float]:
    """The three products of an input, a gradient and a weight in BF16."""
    return (
        timed(lambda: multiply_bf16(x, w.t())),
        timed(lambda: multiply_bf16(g, w)),
        timed(lambda: multiply_bf16(g.t(), x, torch.float32)),
    )


@functools.cache
def _stream() -> torch.cuda.Stream:
    """One stream for all measurements: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream()


def timed(work: Callable[[], Any], repeat: int = 10) -> float:
    """Milliseconds on the device, measured with a CUDA graph: launching takes longer than a small product."""
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeat):
            work()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeat
