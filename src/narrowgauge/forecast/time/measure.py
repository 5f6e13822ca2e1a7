"""Holds a forecast against the device at hand: its roofs, every traced operation by itself, and whole steps.

Operations are done again one by one with random data of the same shapes, formats and strides, each distinct call once,
so that a layer's predicted time can be set beside its own measured one. Random, because products of zeros run faster
than real ones do. A measurement above its roof is an error, not a success.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.bench.contest import engine_step, free, make_batches
from narrowgauge.engine import Engine
from narrowgauge.errors import UsageError
from narrowgauge.forecast.time.ceilings import check_below_roof
from narrowgauge.forecast.time.roofline import Cost
from narrowgauge.forecast.trace.trace import Call, Spec
from narrowgauge.forecast.trace.trace_step import CLIP_NORM, make_optimizer
from narrowgauge.hardware import Device, Gpu
from narrowgauge.nn.step_context import StepContext
from narrowgauge.recipe import NAMED, Recipe
from narrowgauge.task import Task

SQUARE = 8192
"""Rows, columns and depth of the product that a format's roof is measured with."""
COPIED = 1 << 30
REPEATS = 10
CACHED = 4
"""Bytes are held against the roof of memory only where they are so many times the L2 cache."""
_HEAD_START = 1_000_000
"""Cycles the GPU is kept busy for before a call is timed, so that it does not wait for the host in between."""
_STRIDE = 7919
"""A prime: indices so far apart, modulo the rows of a table, come to all of them, and not in their order."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A real run's peak and step."""

    peak_bytes: int
    """Most allocated in a step but the first, beyond what stood before the model was built."""
    step_ms: float


def measure_roofs(device: Device, size: int = SQUARE, copied: int = COPIED) -> dict[str, float]:
    """FLOP/s of a large product in each native format, and bytes per second of a copy (``copy``)."""
    place = device.torch_device
    roofs = {"copy": 2 * copied / seconds_of(_copy(copied, place), device)}
    for format in device.native:
        with StepContext(NAMED[format], torch.device(place), emulated=False).backward():
            a, b = (torch.randn(size, size, device=place) for _ in range(2))
            roofs[format] = 2 * size**3 / seconds_of(_product(a, b, format), device)
    if device.gpu is not None:
        check_roofs(roofs, device.gpu)
    return roofs


def check_roofs(roofs: dict[str, float], gpu: Gpu) -> dict[str, float]:
    """The share of the datasheet that each measured roof reaches; above 1 is an error."""
    return {
        name: check_below_roof(f"roof of {name}", rate, gpu.bandwidth if name == "copy" else gpu.peak(name), gpu)
        for name, rate in roofs.items()
    }


def _copy(size: int, place: str) -> Callable[[], Tensor]:
    values = torch.randn(size // 4, device=place)
    into = torch.empty_like(values)
    return lambda: into.copy_(values)


def _product(a: Tensor, b: Tensor, format: str) -> Callable[[], Tensor]:
    if format == "fp8":
        low, one = torch.float8_e4m3fn, torch.ones((), device=a.device)
        a_lp, b_lp = a.to(low), b.to(low)
        return lambda: torch._scaled_mm(a_lp, b_lp.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(format, torch.float32)
    a_hp, b_hp = a.to(dtype), b.to(dtype)
    return lambda: a_hp @ b_hp


def measure_calls(
    costs: Iterable[Cost], device: Device, tell: Callable[[str], None] = lambda line: None
) -> dict[Call, float]:
    """Seconds of each distinct call among the operations, done again on the device."""
    found: dict[Call, float] = {}
    for cost in costs:
        call = cost.op.call
        if call is None or call in found or cost.op.compiled:
            continue
        try:
            below = _indices_below(call)
            args = _made(call.args, device, below)
            kwargs = {name: _made(value, device, below) for name, value in call.kwargs}
            seconds = seconds_of(lambda call=call, args=args, kwargs=kwargs: call.func(*args, **kwargs), device)  # type: ignore[misc]
        except (RuntimeError, TypeError, ValueError) as error:  # too large by itself, or not made to be called so
            tell(f"{cost.op.name}: not measured by itself ({str(error).splitlines()[0][:80]})")
            found[call] = math.nan
            continue
        found[call] = seconds
        if device.gpu is not None:
            _check(cost, seconds, device.gpu)
    return found


def _check(cost: Cost, seconds: float, gpu: Gpu) -> None:
    what = f"{cost.op.name} of {cost.op.where or 'no module'}"
    if cost.op.kind in ("product", "attention", "convolution") and cost.op.format in gpu.peaks:
        check_below_roof(f"{what}, FLOPs", cost.op.flops / seconds, gpu.peak(cost.op.format), gpu)
    if cost.bytes > CACHED * gpu.l2_bytes:
        check_below_roof(f"{what}, bytes", cost.bytes / seconds, gpu.bandwidth, gpu)


def _indices_below(call: Call) -> int:
    """What a call's indices must stay below. They should reach all of a table: a few rows of it would be cached."""
    name, shapes = call.func._schema.name.rpartition("::")[2], [a.shape for a in call.args if isinstance(a, Spec)]
    if name in ("embedding", "index_select"):
        return int(shapes[0][call.args[1] if name == "index_select" else 0])
    if name == "embedding_dense_backward":
        return int(call.args[2])
    return min((shape[-1] for shape in shapes if len(shape) > 1), default=1)  # classes, most often


def _made(nest: Any, device: Device, below: int) -> Any:
    """Tensors of random data for specs."""
    if isinstance(nest, Spec):
        return _tensor(nest, device.torch_device, below)
    if isinstance(nest, torch.device):
        return torch.device(device.torch_device)
    return [_made(item, device, below) for item in nest] if isinstance(nest, tuple) else nest


def _tensor(spec: Spec, place: str, below: int) -> Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True) if size)
    if spec.dtype.is_floating_point:
        flat = torch.randn(extent, device=place).mul_(0.1).to(spec.dtype)
    else:
        flat = (torch.arange(extent, device=place) * _STRIDE % max(1, below)).to(spec.dtype)
    return flat.as_strided(spec.shape, spec.stride)


def seconds_of(work: Callable[[], Any], device: Device, repeats: int = REPEATS) -> float:
    """Seconds of a call: the median of some repeats, after one that does not count."""
    work()
    if device.kind == "cuda":
        times = []
        for _ in range(repeats):
            torch.cuda._sleep(_HEAD_START)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) / 1e3)
        return statistics.median(times)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_run(
    task: Task, recipe: Recipe, device: Device, *, compile: bool = True, accumulate: int = 1, steps: int = 5
) -> Measured:
    """Train for a few real steps on a GPU: the peak and the time of a step."""
    if device.kind != "cuda":
        raise UsageError("measuring a forecast takes a GPU: what a CPU allocates is not counted")
    free(device)
    torch._C._cuda_clearCublasWorkspaces()  # each run allocates its own
    batches = make_batches(task, device)
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device(device.torch_device):
        model = task.model()
    clip = None if recipe.gradients == "released" else CLIP_NORM
    engine = Engine(model, make_optimizer(task, model), recipe, clip_norm=clip, accumulate=accumulate, compile=compile)
    found = _measure_steps(
        functools.partial(_whole_step, engine_step(task, engine), batches, accumulate), before, steps
    )
    del engine, model
    free(device)
    return found


def _whole_step(microbatch: Callable[[Any], Any], batches: list[Any], accumulate: int, index: int) -> None:
    for part in range(accumulate):
        microbatch(batches[(index + part) % len(batches)])


def _measure_steps(step: Callable[[int], None], before: int, steps: int) -> Measured:
    step(0)
    torch.cuda.reset_peak_memory_stats()
    for index in range(2):
        step(index)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    times = []
    for round_index in range(3):
        start = time.perf_counter()
        for index in range(steps):
            step(round_index + index)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / steps)
    return Measured(peak_bytes=peak, step_ms=statistics.median(times))
