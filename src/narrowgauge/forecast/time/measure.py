"""Measures what a forecast predicts on the installed GPU: peak rates, single operations, and whole steps.

Each distinct operation of a trace runs once with random data of the same shapes, formats and strides, so that a layer's
predicted time can be compared with its measured one. The data is random because products of zeros run faster than real
ones. A measurement above the datasheet's peak is an error.
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

from narrowgauge.bench.compare import free_memory, make_batches, make_engine_step
from narrowgauge.engine import Engine
from narrowgauge.errors import UsageError
from narrowgauge.forecast.time.reachable_rates import check_below_peak
from narrowgauge.forecast.time.roofline import Cost
from narrowgauge.forecast.trace.trace import Call, Spec
from narrowgauge.forecast.trace.trace_step import CLIP_NORM
from narrowgauge.hardware import Device, Gpu
from narrowgauge.nn.memory_plan import MemoryPlan
from narrowgauge.nn.step_context import StepContext
from narrowgauge.recipe import NAMED, Recipe
from narrowgauge.task import ModelLoader, Task, make_plain_optimizers

SQUARE = 8192
"""Rows, columns and depth of the product that measures a format's rate."""
COPIED = 1 << 30
REPEATS = 10
CACHED = 4
"""Bytes per second are compared with the bandwidth only where the bytes are so many times the L2 cache."""
_HEAD_START = 1_000_000
"""Cycles that the GPU is kept busy before a call is timed, so that it does not wait for the host."""
_STRIDE = 7919
"""A prime: multiples of it, modulo the rows of a table, reach all rows in a scattered order."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Peak memory and step time of a real run."""

    peak_bytes: int
    """The peak of every step but the first, minus what was allocated before the model was built."""
    step_ms: float


def measure_roofs(device: Device, size: int = SQUARE, copied: int = COPIED) -> dict[str, float]:
    """Measure FLOP/s of a large product in each native format, and bytes per second of a copy (``copy``)."""
    place = device.torch_device
    roofs = {"copy": 2 * copied / time_call(_copy(copied, place), device)}
    for format in device.native:
        with StepContext(NAMED[format], torch.device(place), emulated=False).backward():
            a, b = (torch.randn(size, size, device=place) for _ in range(2))
            roofs[format] = 2 * size**3 / time_call(_product(a, b, format), device)
    if device.gpu is not None:
        check_roofs(roofs, device.gpu)
    return roofs


def check_roofs(roofs: dict[str, float], gpu: Gpu) -> dict[str, float]:
    """The fraction of the datasheet that each measured rate reaches; above 1 is an error."""
    return {
        name: check_below_peak(f"rate of {name}", rate, gpu.bandwidth if name == "copy" else gpu.peak(name), gpu)
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
    """Seconds of each distinct call among the operations, run again on the device."""
    found: dict[Call, float] = {}
    for cost in costs:
        call = cost.op.call
        if call is None or call in found or cost.op.compiled:
            continue
        try:
            below = _indices_below(call)
            args = _make_tensors(call.args, device, below)
            kwargs = {name: _make_tensors(value, device, below) for name, value in call.kwargs}
            seconds = time_call(lambda call=call, args=args, kwargs=kwargs: call.func(*args, **kwargs), device)  # type: ignore[misc]
        except (RuntimeError, TypeError, ValueError) as error:  # too large on its own, or it cannot be called like this
            tell(f"{cost.op.name}: not measured on its own ({str(error).splitlines()[0][:80]})")
            found[call] = math.nan
            continue
        found[call] = seconds
        if device.gpu is not None:
            _check(cost, seconds, device.gpu)
    return found


def _check(cost: Cost, seconds: float, gpu: Gpu) -> None:
    what = f"{cost.op.name} of {cost.op.where or 'no module'}"
    if cost.op.kind in ("product", "attention", "convolution") and cost.op.format in gpu.peaks:
        check_below_peak(f"{what}, FLOPs", cost.op.flops / seconds, gpu.peak(cost.op.format), gpu)
    if cost.bytes > CACHED * gpu.l2_bytes:
        check_below_peak(f"{what}, bytes", cost.bytes / seconds, gpu.bandwidth, gpu)


def _indices_below(call: Call) -> int:
    """The upper bound of a call's indices. They should reach the whole table, as a few rows would be cached."""
    name, shapes = call.func._schema.name.rpartition("::")[2], [a.shape for a in call.args if isinstance(a, Spec)]
    if name in ("embedding", "index_select"):
        return int(shapes[0][call.args[1] if name == "index_select" else 0])
    if name == "embedding_dense_backward":
        return int(call.args[2])
    return min((shape[-1] for shape in shapes if len(shape) > 1), default=1)  # classes, most often


def _make_tensors(nest: Any, device: Device, below: int) -> Any:
    """Replace specs by tensors with random data."""
    if isinstance(nest, Spec):
        return _tensor(nest, device.torch_device, below)
    if isinstance(nest, torch.device):
        return torch.device(device.torch_device)
    return [_make_tensors(item, device, below) for item in nest] if isinstance(nest, tuple) else nest


def _tensor(spec: Spec, place: str, below: int) -> Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True) if size)
    if spec.dtype.is_floating_point:
        flat = torch.randn(extent, device=place).mul_(0.1).to(spec.dtype)
    else:
        flat = (torch.arange(extent, device=place) * _STRIDE % max(1, below)).to(spec.dtype)
    return flat.as_strided(spec.shape, spec.stride)


def time_call(work: Callable[[], Any], device: Device, repeats: int = REPEATS) -> float:
    """Seconds of a call: the median of several runs, after one that does not count."""
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
    task: Task,
    recipe: Recipe,
    device: Device,
    *,
    compile: bool = True,
    accumulate: int = 1,
    steps: int = 5,
    plan: MemoryPlan | None = None,
) -> MeasuredRun:
    """Train a few real steps on a GPU, with a memory plan if there is one; return peak memory and step time."""
    if device.kind != "cuda":
        raise UsageError("measuring a forecast needs a GPU: torch does not count what a CPU allocates")
    free_memory(device)
    torch._C._cuda_clearCublasWorkspaces()  # each run allocates its own workspaces
    batches = make_batches(task, device)
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    if isinstance(task.model, ModelLoader):
        model = task.model.load(recipe, device.torch_device)
    else:
        with torch.device(device.torch_device):
            model = task.model()
    clip = None if recipe.gradients == "released" else CLIP_NORM
    engine = Engine(
        model, make_plain_optimizers(task, model), recipe, clip_norm=clip, accumulate=accumulate, compile=compile,
        memory_budget=plan,
    )  # fmt: skip
    found = _measure_steps(
        functools.partial(_whole_step, make_engine_step(task, engine), batches, accumulate), before, steps
    )
    del engine, model
    free_memory(device)
    return found


def _whole_step(microbatch: Callable[[Any], Any], batches: list[Any], accumulate: int, index: int) -> None:
    for part in range(accumulate):
        microbatch(batches[(index + part) % len(batches)])


def _measure_steps(step: Callable[[int], None], before: int, steps: int) -> MeasuredRun:
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
    return MeasuredRun(peak_bytes=peak, step_ms=statistics.median(times))
