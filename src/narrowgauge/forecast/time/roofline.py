"""Predicts a step's time with the roofline model: an operation takes as long as its FLOPs or its bytes, or its launch.

    time = max(FLOPs / rate of its format, bytes / rate of memory, launch)

with the rates of ``reachable_rates``. A product also leaves processors idle: the last wave of its tiles is seldom full,
and small products never fill one. The largest of the three is the bound of an operation. The bound of a step is that of
most of its time, or the host, where launching the kernels takes longer than running them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from narrowgauge.forecast.memory.lifetimes import Lifetimes, find_lifetimes
from narrowgauge.forecast.time import host_copies
from narrowgauge.forecast.time.reachable_rates import HOST_S, LAUNCH_S, ReachableRates
from narrowgauge.forecast.trace.flops import count_padding_bytes
from narrowgauge.forecast.trace.trace import Op, Spec
from narrowgauge.forecast.trace.trace_step import Traced
from narrowgauge.peak_fractions import get_fraction

TILE = 128
"""Approximate rows and columns of a product's tile."""
SPLIT = 2048
"""A product with few tiles is split along the summed dimension, into pieces of at least this length."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The predicted cost of one operation."""

    op: Op
    bytes: int
    """Bytes read and written in memory; values inside of fused kernels do not count."""
    seconds: float
    bound: str
    """compute, memory or launch."""
    launched: bool = True
    """Whether it is a kernel of its own; an operation that writes nothing to memory is part of another one."""

    @property
    def intensity(self) -> float:
        return self.op.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """All operations of one module and kind in one phase, over all microbatches."""

    path: str
    kind: str
    phase: str
    format: str
    count: int
    flops: float
    bytes: int
    ms: float
    bound: str

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The predicted step of a recipe."""

    recipe: str
    step_ms: float
    items_per_s: float
    mfu: float | None
    """Model FLOPs utilization: model FLOPs divided by the peak of the compute format, as in ``bench``."""
    bound: str
    device_ms: float
    host_ms: float
    flops: float
    bytes: int
    by_kind: dict[str, float] = field(default_factory=dict)
    """Milliseconds of each kind of work."""
    by_bound: dict[str, float] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the forecast assumes, for the user."""

    def cost(self, items: float, price_per_hour: float) -> float:
        """The cost of training on so many items, at a price per GPU hour."""
        return items / self.items_per_s / 3600 * price_per_hour


def predict_time(traced: Traced, rates: ReachableRates) -> Roofline:
    """Predict the time of a traced step."""
    return sum_costs(traced, [(cost, 1.0) for cost in estimate_costs(traced, rates)])


def sum_costs(traced: Traced, costs: list[tuple[Cost, float]]) -> Roofline:
    """Sum up a step from its operations and how often each runs."""
    wait_s = host_copies.predict_wait(traced, [(cost.op, cost.seconds, times) for cost, times in costs])
    device_s, host_s = wait_s + sum(cost.seconds * times for cost, times in costs), sum_host_seconds(costs)
    seconds = max(device_s, host_s)
    by_bound = {"copies": wait_s * 1e3} if wait_s else {}
    by_kind = {host_copies.SHOWN: wait_s * 1e3} if wait_s else {}
    for cost, times in costs:
        by_bound[cost.bound] = by_bound.get(cost.bound, 0.0) + cost.seconds * times * 1e3
        by_kind[cost.op.kind] = by_kind.get(cost.op.kind, 0.0) + cost.seconds * times * 1e3
    bound = "launches" if host_s > device_s else max(by_bound, key=lambda name: by_bound[name])
    items_per_s = traced.items / seconds
    return Roofline(
        recipe=str(traced.recipe),
        step_ms=seconds * 1e3,
        items_per_s=items_per_s,
        mfu=compute_mfu(traced, items_per_s),
        bound=bound,
        device_ms=device_s * 1e3,
        host_ms=host_s * 1e3,
        flops=sum(cost.op.flops * times for cost, times in costs),
        bytes=round(sum(cost.bytes * times for cost, times in costs)),
        by_kind=_largest_first(by_kind),
        by_bound=_largest_first(by_bound),
        layers=_layers(costs),
        notes=_notes(traced, by_kind, device_s * 1e3),
    )


def _notes(traced: Traced, by_kind: dict[str, float], device_ms: float) -> list[str]:
    notes = []
    share = by_kind.get("convolution", 0.0) / device_ms if device_ms else 0.0
    if share >= 0.05:
        notes.append(
            f"convolutions ({share:.0%} of the time) are an estimate: their rate follows from one published ResNet-50 "
            "on an A100 and was not measured"
        )
    if traced.balances_experts:
        notes.append("how many tokens an expert gets depends on the data: every expert was given the same number")
    return notes


def compute_mfu(traced: Traced, items_per_s: float) -> float | None:
    """Model FLOPs per second divided by the peak of the recipe's format; None where either is unknown."""
    if traced.task.flops_per_item is None or traced.recipe.compute not in traced.gpu.peaks:
        return None
    return traced.task.flops_per_item * items_per_s / traced.gpu.peak(traced.recipe.compute)


def estimate_costs(traced: Traced, rates: ReachableRates) -> list[Cost]:
    """Estimate every operation of the last traced step that runs a kernel."""
    lifetimes = find_lifetimes(traced.trace)
    tf32 = traced.recipe.compute == "tf32"
    ops = [op for op in traced.trace.of_step(traced.steps - 1) if op.kind != "view"]
    return [cost for op in ops if (cost := _cost(op, rates, lifetimes, tf32)) is not None]


def _cost(op: Op, rates: ReachableRates, lifetimes: Lifetimes, tf32: bool) -> Cost | None:
    moved = sum(piece.bytes for piece in (*op.reads, *op.writes) if piece.block not in lifetimes.dropped)
    if op.phase == "backward":
        sources = (lifetimes.recomputed.get(piece.block) for piece in op.reads)
        moved += sum(lifetimes.trace.blocks[source].bytes for source in sources if source is not None)
    if op.compiled and not moved:
        return None  # part of another kernel
    memory_s = moved / rates.memory(op.kind)
    compute_s = 0.0
    format = "tf32" if tf32 and op.format == "fp32" else op.format
    if op.kind in ("product", "convolution"):
        rate = rates.convolution(format) if op.kind == "convolution" else rates.product(format)
        rate *= 1.0 if op.kind == "convolution" else _filled(op, rates.gpu.sms)
        compute_s = op.flops / (rate if op.compiled or _is_aligned(op) else rate * get_fraction("unaligned_product"))
    elif op.kind == "attention" and op.reads:
        backend = next((name for name in ("cudnn", "flash") if name in op.name), "efficient")
        compute_s = op.flops / rates.attention(backend, format, op.reads[0].shape[-1])
    launched = not op.compiled or any(piece.block not in lifetimes.dropped for piece in op.writes)
    seconds = max(compute_s, memory_s, LAUNCH_S if launched else 0.0)
    bound = "compute" if seconds == compute_s else "memory" if seconds == memory_s else "launch"
    if op.compiled and op.kind == "product":
        seconds += 2 * count_padding_bytes(op) / rates.memory("copy")
    return Cost(op=op, bytes=moved, seconds=seconds, bound=bound, launched=launched)


def _filled(op: Op, processors: int) -> float:
    """The fraction of the processors that a product's tiles keep busy: 1 for many full waves."""
    result = op.writes[-1].shape if op.writes else ()
    if len(result) < 2:
        return 1.0
    rows, columns = result[-2:]
    tiles = math.prod(result[:-2]) * -(-rows // TILE) * -(-columns // TILE)
    summed = op.flops / (2 * math.prod(result)) if math.prod(result) else 0.0
    pieces = range(1, 2 + min(15, int(summed // SPLIT)))
    return max(tiles * count / processors / math.ceil(tiles * count / processors) for count in pieces)


def _is_aligned(op: Op) -> bool:
    """Whether the rows of a 16-bit product begin on 16 bytes, as the fast kernels require."""
    if op.kind != "product" or op.call is None or not op.writes:
        return True
    operands = [arg for arg in op.call.args if isinstance(arg, Spec) and len(arg.shape) > 1]
    if any(one.dtype.itemsize != 2 for one in operands):
        return True
    return not any(row % 8 for row in (op.writes[-1].shape[-1], *(max(one.stride[-2:]) for one in operands)))


def sum_host_seconds(costs: Iterable[tuple[Cost, float]]) -> float:
    """Seconds that the host takes to launch all kernels."""
    return sum(HOST_S * times for cost, times in costs if cost.launched)


def _largest_first(amounts: dict[str, float]) -> dict[str, float]:
    return dict(sorted(amounts.items(), key=lambda item: -item[1]))


def _layers(costs: list[tuple[Cost, float]]) -> list[Layer]:
    groups: dict[tuple[str, str, str, str], list[tuple[Cost, float]]] = {}
    for cost, times in costs:
        op = cost.op
        format = op.format if op.kind in ("product", "convolution", "attention") else ""
        groups.setdefault((op.where, op.kind, op.phase, format), []).append((cost, times))
    layers = []
    for (path, kind, phase, format), members in groups.items():
        bounds: dict[str, float] = {}
        for cost, times in members:
            bounds[cost.bound] = bounds.get(cost.bound, 0.0) + cost.seconds * times
        layers.append(
            Layer(
                path=path, kind=kind, phase=phase, format=format, count=round(sum(times for _, times in members)),
                flops=sum(cost.op.flops * times for cost, times in members),
                bytes=round(sum(cost.bytes * times for cost, times in members)),
                ms=sum(cost.seconds * times for cost, times in members) * 1e3, bound=next(iter(_largest_first(bounds))),
            )
        )  # fmt: skip
    return layers
