"""Measures training steps side by side: recipes of the engine, and baselines that run the same step in plain PyTorch.

A recipe and its baselines are in memory together and take turns, round after round, so that other influences (clock
speed, other processes, heat) affect all of them equally. Results are ratios within one run; the noise is estimated from
the rounds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from narrowgauge.bench.baselines import Baseline, Step, make_baselines
from narrowgauge.bench.energy import measure_joules_per_step, open_counter
from narrowgauge.bench.fit_memory import settle_memory
from narrowgauge.bench.fused_report import describe_conversion
from narrowgauge.engine import Engine
from narrowgauge.engine.step_function import StepFunction
from narrowgauge.errors import NarrowgaugeError, UsageError
from narrowgauge.hardware import Device
from narrowgauge.nn.step_context import settle_attention_order
from narrowgauge.recipe import Recipe, refusal
from narrowgauge.task import Task, make_plain_optimizers

CLIP_NORM = 1.0
BATCHES = 4
"""The number of different batches, so that a step does not find its data in the caches."""
MOST = 8
"""With a stop rule, the maximum number of rounds as a multiple of the requested rounds."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of a recipe or a baseline."""

    name: str
    recipe: str
    tokens_per_s: float
    step_ms: float
    """The median over rounds of the mean step time of a round."""
    step_ms_low: float
    step_ms_high: float
    """The fastest and the slowest round."""
    peak_bytes: int | None
    """Peak memory of a step, without memory that was allocated before; None on a CPU."""
    mfu: float | None
    """Model FLOPs relative to the device's dense peak in the compute format; None if either is unknown."""
    loss: float
    """The loss after the last step. A recipe and its baselines have the same initial weights and data."""
    times_ms: tuple[float, ...]
    """The mean step time of each round. A recipe and its baselines take turns, so equal indices form pairs."""
    cpu_ms: tuple[float, ...]
    """The same in CPU time, which ignores other processes; empty on a GPU, or if that clock is too coarse."""
    ratio: float
    """Throughput relative to the first row."""
    twin_ratio: float | None = None
    """For a recipe: throughput relative to its first baseline, as the median over rounds of paired ratios."""
    loss_first: float | None = None
    """The loss of the first step."""
    ready_s: float | None = None
    """Seconds to make the model and run the first step, with compilation. Later rows may find graphs in caches."""
    joules_per_token: float | None = None
    """Energy of the GPU per token (or other item) that is trained; None on a CPU, or if the GPU does not count it."""
    conversion: dict[str, Any] | None = None
    """For a recipe: which blocks run fused, in which form (``describe_conversion``)."""
    memory_plan: dict[str, Any] | None = None
    """For a recipe with a memory budget: what each block keeps for backward (``MemoryPlan.describe``)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a measurement."""

    warmup: int = 3
    steps: int = 5
    """Steps per round."""
    rounds: int = 5
    compile: bool = False
    seed: int = 0
    fit: str | None = None
    """The memory budget of every recipe, as ``memory_budget`` of ``Engine``; baselines have none."""


@dataclass
class Entry:
    """A recipe or a baseline that is being measured."""

    name: str
    recipe: Recipe
    compute: str
    step: Step
    peak_bytes: int | None
    times_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    loss: float = float("nan")
    loss_first: float = float("nan")
    ready_s: float | None = None
    joules_per_step: float | None = None
    conversion: dict[str, Any] | None = None
    memory_plan: dict[str, Any] | None = None


StopRule = Callable[[Sequence[Entry]], bool]
"""Called after a series of rounds with a recipe and its baselines; returns whether to stop."""


def measure(
    task: Task,
    recipes: Sequence[Recipe],
    peers: Sequence[str],
    device: Device,
    settings: Settings,
    tell: Callable[[str], None],
    enough: StopRule | None = None,
) -> list[Row]:
    """Measures every recipe together with its baselines.

    Args:
        task: The task to train.
        recipes: The recipes to measure.
        peers: Baselines: "torch", "torchao".
        device: The device to measure on.
        settings: Rounds, steps, compilation and seed.
        tell: Called with each line of progress.
        enough: A stop rule. With it, rounds continue until it returns true, up to MOST times ``settings.rounds``.

    Returns:
        One row for each recipe, followed by the rows of its baselines.

    Raises:
        UsageError: If the device does not support a recipe, a baseline is unknown, or memory is insufficient.
    """
    for recipe in recipes:
        reason = refusal(recipe, device)
        if reason:
            raise UsageError(reason)
    baselines = {recipe: choose_baselines(recipe, peers, device) for recipe in recipes}
    batches = make_batches(task, device)
    finished: list[Entry] = []
    for recipe, own in baselines.items():
        if peers and not own and is_slow(recipe, device):
            tell(f"{recipe}: no baselines, because torch's {recipe.compute} is hundreds of times slower than FP32 here")
        try:
            with torch._functorch.config.patch(enable_autograd_cache=False), _restore_fp32_mode():
                finished += measure_recipe(task, recipe, own, batches, device, settings, tell, enough)
        except torch.OutOfMemoryError:
            raise UsageError(
                f"{task.name} in {recipe} does not fit into the memory of {device.name}: use a smaller --batch"
            ) from None
    return make_rows(task, finished, device)


def is_slow(recipe: Recipe, device: Device) -> bool:
    """Whether torch runs a recipe's format far slower than FP32: on a CPU without it."""
    return device.kind == "cpu" and recipe.compute not in ("fp32", *device.native)


def choose_baselines(recipe: Recipe, peers: Sequence[str], device: Device) -> dict[str, Baseline]:
    """The baselines of a recipe that are worth running on a device, by name."""
    found = {name: one for peer in peers for name, one in make_baselines(peer, recipe).items()}
    return {} if is_slow(recipe, device) else found


@contextlib.contextmanager
def _restore_fp32_mode() -> Iterator[None]:
    """Restores the FP32 matmul mode, which baselines set globally."""
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def make_batches(task: Task, device: Device) -> list[Any]:
    """The batches of a benchmark, on the device."""
    make = task.synthetic or (lambda index: task.batch(index, "train"))
    return [tree_map_only(Tensor, lambda t: t.to(device.torch_device), make(index)) for index in range(BATCHES)]


def measure_recipe(
    task: Task,
    recipe: Recipe,
    baselines: dict[str, Baseline],
    batches: list[Any],
    device: Device,
    settings: Settings,
    tell: Callable[[str], None],
    enough: StopRule | None = None,
) -> list[Entry]:
    """Measures one recipe and its baselines, which take turns in each round. Arguments as for ``measure``."""
    if settings.compile:
        # Baselines use torch.compile, and must not get graphs that were compiled for another recipe: neither in this
        # process (code objects are shared), nor from disk, where torch 2.11 mistakes FP16's graph for BF16's (measure
        # disables that cache).
        torch._dynamo.reset()
    entries: list[Entry] = []
    for name, baseline in {str(recipe): None, **baselines}.items():
        tell(f"{name}: building and warming up")
        entries.append(build_entry(name, task, recipe, baseline, batches, device, settings))
    for entry in entries:
        settle(entry, batches, device, settings.steps)
    begin = 0
    for end in plan_analyses(settings.rounds) if enough else (settings.rounds,):
        for index in range(begin, end):
            # The order rotates with each round, so that no position is an advantage.
            order = entries[index % len(entries) :] + entries[: index % len(entries)]
            for entry in order:
                processor = time.process_time()
                entry.times_ms.append(time_round(entry, batches, index, device, settings.steps))
                if device.kind == "cpu":
                    entry.cpu_ms.append((time.process_time() - processor) * 1e3 / settings.steps)
            times = ", ".join(f"{entry.name} {entry.times_ms[-1]:.1f} ms" for entry in entries)
            tell(f"round {index + 1} of {end}: {times}")
        begin = end
        if enough is not None and enough(entries):
            break
    counter = open_counter(device.torch_device)
    for entry in entries:
        entry.loss = float(entry.step(batches[0]).detach())
        if counter is not None:
            run_step = functools.partial(_run_step, entry, batches)
            entry.joules_per_step = measure_joules_per_step(counter, run_step, statistics.median(entry.times_ms))
        entry.step = raise_released
    free_memory(device)
    return entries


def _run_step(entry: Entry, batches: list[Any], number: int) -> Tensor:
    return entry.step(batches[number % BATCHES])


def read_attention_backends() -> tuple[Any, ...]:
    """The attention backends that torch uses by default in this process, and their order."""
    allowed = [getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")]
    return tuple(torch._C._get_sdp_priority_order()), *allowed


def plan_analyses(rounds: int) -> tuple[int, ...]:
    """The numbers of rounds after which the results are analyzed."""
    return tuple(rounds * 2**power for power in range(MOST.bit_length()))


def raise_released(batch: Any) -> Tensor:
    """Replaces the step of an entry whose memory has been freed."""
    raise AssertionError("the step of a released benchmark entry was called")


def build_entry(
    name: str,
    task: Task,
    recipe: Recipe,
    baseline: Baseline | None,
    batches: list[Any],
    device: Device,
    settings: Settings,
) -> Entry:
    """Builds the model and the step of a recipe (``baseline`` is None) or of a baseline, and runs the warm-up steps."""
    free_memory(device)
    before = torch.cuda.memory_allocated() if device.kind == "cuda" else 0
    begin = time.perf_counter()
    torch.manual_seed(settings.seed)
    with torch.device(device.torch_device):
        model = task.model()
    if device.kind == "cuda":
        settle_attention_order(torch.device(device.torch_device))
    found = read_attention_backends()
    optimizers = make_plain_optimizers(task, model)
    conversion = engine = None
    if baseline is None:
        engine = Engine(
            model, optimizers, recipe, clip_norm=CLIP_NORM, compile=settings.compile, memory_budget=settings.fit
        )
        conversion = describe_conversion(engine.inner, engine.conversion)
        step = make_engine_step(task, engine)
    else:
        step = baseline.make(task, model, optimizers, CLIP_NORM, settings.compile)
    loss_first = float(step(batches[0]).detach())  # waits for the step
    ready_s = time.perf_counter() - begin
    if engine is not None and settings.fit is not None:
        settle_memory(engine, lambda index: step(batches[index % BATCHES]))
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for index in range(settings.warmup):
        step(batches[index % BATCHES])
    peak = torch.cuda.max_memory_allocated() - before if device.kind == "cuda" else None
    if read_attention_backends() != found:
        raise NarrowgaugeError(
            f"{name} changed the default attention backends from {found} to {read_attention_backends()}: the times of "
            "the other entries would not be comparable"
        )
    compute = recipe.compute if baseline is None else baseline.compute
    plan = None if engine is None or engine.memory_plan is None else engine.memory_plan.describe()
    facts: dict[str, Any] = {"loss_first": loss_first, "ready_s": ready_s, "conversion": conversion}
    facts["memory_plan"] = plan
    return Entry(name, recipe, compute, step, peak, **facts)


def make_engine_step(task: Task, engine: Engine) -> Step:
    """A training step with the engine, as ``narrowgauge train`` runs it."""
    function = StepFunction(engine, lambda batch: task.loss(engine.model, batch), None if task.recordable else False)
    return lambda batch: function(batch)[0]


def time_round(entry: Entry, batches: list[Any], round_index: int, device: Device, steps: int) -> float:
    """Mean milliseconds per step over one round."""
    if device.kind == "cpu":
        start = time.perf_counter()
        for index in range(steps):
            entry.step(batches[(round_index + index) % BATCHES])
        return (time.perf_counter() - start) * 1e3 / steps
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for index in range(steps):
        entry.step(batches[(round_index + index) % BATCHES])
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / steps


def settle(entry: Entry, batches: list[Any], device: Device, steps: int) -> None:
    """Run steps before the first round: building the next entry emptied the allocator's cache of GPU memory."""
    if device.kind == "cuda":
        time_round(entry, batches, 0, device, steps)


def make_rows(task: Task, finished: Sequence[Entry], device: Device) -> list[Row]:
    """The rows of all measured entries."""
    rows: list[Row] = []
    for entry, baseline in _pair_with_baselines(finished):
        step_ms, joules = statistics.median(entry.times_ms), entry.joules_per_step
        throughput = task.items_per_batch / step_ms * 1e3
        twin_ratio = None
        if baseline is not None:
            twin_ratio = statistics.median(b / a for a, b in zip(entry.times_ms, baseline.times_ms, strict=True))
        rows.append(
            Row(
                name=entry.name,
                recipe=str(entry.recipe),
                tokens_per_s=throughput,
                step_ms=step_ms,
                step_ms_low=min(entry.times_ms),
                step_ms_high=max(entry.times_ms),
                peak_bytes=entry.peak_bytes,
                mfu=_compute_mfu(task, throughput, entry.compute, device),
                loss=entry.loss,
                times_ms=tuple(entry.times_ms),
                cpu_ms=tuple(entry.cpu_ms) if min(entry.cpu_ms, default=0.0) > 0 else (),
                ratio=throughput / rows[0].tokens_per_s if rows else 1.0,
                twin_ratio=twin_ratio,
                loss_first=entry.loss_first,
                ready_s=entry.ready_s,
                joules_per_token=joules if joules is None else joules / task.items_per_batch,
                conversion=entry.conversion,
                memory_plan=entry.memory_plan,
            )
        )
    return rows


def _pair_with_baselines(finished: Sequence[Entry]) -> Iterator[tuple[Entry, Entry | None]]:
    for index, entry in enumerate(finished):
        follower = finished[index + 1] if index + 1 < len(finished) else None
        is_engine = entry.name == str(entry.recipe)
        has_baseline = is_engine and follower is not None and follower.name != str(follower.recipe)
        yield entry, follower if has_baseline else None


def _compute_mfu(task: Task, throughput: float, compute: str, device: Device) -> float | None:
    peak = device.gpu.peak(compute) if device.gpu is not None else None
    if peak is None or task.flops_per_item is None:
        return None
    share = task.flops_per_item * throughput / peak
    if share > 1:
        raise NarrowgaugeError(
            f"{task.name} in {compute}: measured {share:.0%} of the peak of {device.name}, which is impossible: the "
            "task's FLOPs or the peak in hardware.toml is wrong"
        )
    return share


def free_memory(device: Device) -> None:
    """Releases unused memory."""
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.empty_cache()
