"""Measures training steps side by side: recipes of the engine, and peers that take the same step by hand.

A recipe and its peers are in memory together and take turns, round after round, so that whatever else the machine
does (clocks, neighbours, heat) falls on all of them alike. Claims are ratios inside one run; the spread comes from the
rounds.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from narrowgauge.bench.baselines import Peer, Step, contestants
from narrowgauge.engine import Engine
from narrowgauge.errors import NarrowgaugeError, UsageError
from narrowgauge.hardware import Device
from narrowgauge.nn.step_context import settle_attention_order
from narrowgauge.recipe import Recipe, refusal
from narrowgauge.task import Task

CLIP_NORM = 1.0
BATCHES = 4
"""How many different batches take turns, so that no step sees the data of the one before it in its caches."""
MOST = 8
"""How many times the rounds that were asked for are taken at most, where measuring goes on until it is enough."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant's result."""

    name: str
    recipe: str
    tokens_per_s: float
    step_ms: float
    """Median over the rounds of the mean step of a round."""
    step_ms_low: float
    step_ms_high: float
    """Fastest and slowest round."""
    peak_bytes: int | None
    """Most memory allocated during a step beyond what stood before the contestant was built; None on a CPU."""
    mfu: float | None
    """Model FLOPs against the device's dense peak in the compute format; None where either is unknown."""
    loss: float
    """Loss after the last step: contestants of one recipe started alike and saw the same data."""
    times_ms: tuple[float, ...]
    """The mean step of each round: contestants of one recipe took turns, so equal places are a pair."""
    cpu_ms: tuple[float, ...]
    """The same in processor time, which is blind to what others take; empty on a GPU, or where that clock is coarse."""
    ratio: float
    """Throughput against the first row's."""
    twin_ratio: float | None = None
    """For a recipe with a peer: its throughput against the first peer's, median over the rounds of paired ratios."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure."""

    warmup: int = 3
    steps: int = 5
    """Steps in a round."""
    rounds: int = 5
    compile: bool = False
    seed: int = 0


@dataclass
class Contestant:
    name: str
    recipe: Recipe
    compute: str
    step: Step
    peak_bytes: int | None
    times_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    loss: float = float("nan")


Enough = Callable[[Sequence[Contestant]], bool]
"""Asked after a batch of rounds whether those who took turns have been measured well enough."""


def measure(
    task: Task,
    recipes: Sequence[Recipe],
    peers: Sequence[str],
    device: Device,
    settings: Settings,
    tell: Callable[[str], None],
    enough: Enough | None = None,
) -> list[Row]:
    """Measure every recipe, each beside its peers; ``tell`` hears what is going on.

    With ``enough`` rounds go on, up to MOST times as many, until it is content.
    """
    for recipe in recipes:
        reason = refusal(recipe, device)
        if reason:
            raise UsageError(reason)
    against = {
        recipe: {name: one for peer in peers for name, one in contestants(peer, recipe).items()} for recipe in recipes
    }
    batches = make_batches(task, device)
    finished: list[Contestant] = []
    for recipe in recipes:
        beside = against[recipe]
        if beside and device.kind == "cpu" and recipe.compute not in ("fp32", *device.native):
            tell(
                f"{recipe}: no peers, because torch's own {recipe.compute} takes hundreds of times as long as FP32 here"
            )
            beside = {}
        try:
            with torch._functorch.config.patch(enable_autograd_cache=False), _fp32_mode_put_back():
                finished += race(task, recipe, beside, batches, device, settings, tell, enough)
        except torch.OutOfMemoryError:
            raise UsageError(
                f"{task.name} in {recipe} does not fit into {device.name}: take a smaller --batch"
            ) from None
    return make_rows(task, finished, device)


@contextlib.contextmanager
def _fp32_mode_put_back() -> Iterator[None]:
    """Peers set this mode by hand, as plain loops do, and leave it so."""
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def make_batches(task: Task, device: Device) -> list[Any]:
    make = task.synthetic or (lambda index: task.batch(index, "train"))
    return [tree_map_only(Tensor, lambda t: t.to(device.torch_device), make(index)) for index in range(BATCHES)]


def race(
    task: Task,
    recipe: Recipe,
    peers: dict[str, Peer],
    batches: list[Any],
    device: Device,
    settings: Settings,
    tell: Callable[[str], None],
    enough: Enough | None = None,
) -> list[Contestant]:
    if settings.compile:
        # Peers are compiled by torch.compile's habits, so they must not meet what it compiled for another recipe: in
        # this process (code objects are shared), or on disk, where torch 2.11 takes FP16's graph for BF16's (measure
        # keeps that cache shut).
        torch._dynamo.reset()
    field: list[Contestant] = []
    for name, peer in {str(recipe): None, **peers}.items():
        tell(f"{name}: building and warming up")
        field.append(build(name, task, recipe, peer, batches, device, settings))
    begin = 0
    for end in looks(settings.rounds) if enough else (settings.rounds,):
        for index in range(begin, end):
            # Whoever went first in this round goes last in the next: no place in the row is an advantage.
            turn = field[index % len(field) :] + field[: index % len(field)]
            for contestant in turn:
                processor = time.process_time()
                contestant.times_ms.append(time_round(contestant, batches, index, device, settings.steps))
                if device.kind == "cpu":
                    contestant.cpu_ms.append((time.process_time() - processor) * 1e3 / settings.steps)
            spread = ", ".join(f"{c.name} {c.times_ms[-1]:.1f} ms" for c in field)
            tell(f"round {index + 1} of {end}: {spread}")
        begin = end
        if enough is not None and enough(field):
            break
    for contestant in field:
        contestant.loss = float(contestant.step(batches[0]).detach())
        contestant.step = gone
    free(device)
    return field


def attention_of_process() -> tuple[Any, ...]:
    """Which attention backends torch takes for whoever sets none, and in which order."""
    allowed = [getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")]
    return tuple(torch._C._get_sdp_priority_order()), *allowed


def looks(rounds: int) -> tuple[int, ...]:
    """The numbers of rounds after which one looks whether they are enough."""
    return tuple(rounds * 2**power for power in range(MOST.bit_length()))


def gone(batch: Any) -> Tensor:
    raise AssertionError("a contestant that has left memory was asked to step")


def build(
    name: str, task: Task, recipe: Recipe, peer: Peer | None, batches: list[Any], device: Device, settings: Settings
) -> Contestant:
    free(device)
    before = torch.cuda.memory_allocated() if device.kind == "cuda" else 0
    torch.manual_seed(settings.seed)
    with torch.device(device.torch_device):
        model = task.model()
    if device.kind == "cuda":
        settle_attention_order(torch.device(device.torch_device))
    found = attention_of_process()
    optimizer = torch.optim.AdamW(
        model.parameters(), task.learning_rate, betas=(0.9, 0.95), weight_decay=task.weight_decay, fused=True
    )
    if peer is None:
        step = engine_step(task, Engine(model, optimizer, recipe, clip_norm=CLIP_NORM, compile=settings.compile))
    else:
        step = peer.make(task, model, optimizer, CLIP_NORM, settings.compile)
    step(batches[0])
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for index in range(settings.warmup):
        step(batches[index % BATCHES])
    peak = torch.cuda.max_memory_allocated() - before if device.kind == "cuda" else None
    if attention_of_process() != found:
        raise NarrowgaugeError(
            f"{name} found the attention backends {found} and left {attention_of_process()} to those after it: their "
            "times would say nothing about them"
        )
    return Contestant(name, recipe, recipe.compute if peer is None else peer.compute, step, peak)


def engine_step(task: Task, engine: Engine) -> Step:
    def step(batch: Any) -> Tensor:
        with engine.forward():
            loss = task.loss(engine.model, batch)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def time_round(contestant: Contestant, batches: list[Any], round_index: int, device: Device, steps: int) -> float:
    """Mean milliseconds a step over one round."""
    if device.kind == "cpu":
        start = time.perf_counter()
        for index in range(steps):
            contestant.step(batches[(round_index + index) % BATCHES])
        return (time.perf_counter() - start) * 1e3 / steps
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for index in range(steps):
        contestant.step(batches[(round_index + index) % BATCHES])
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / steps


def make_rows(task: Task, finished: Sequence[Contestant], device: Device) -> list[Row]:
    rows: list[Row] = []
    for contestant, twin in _with_twins(finished):
        step_ms = statistics.median(contestant.times_ms)
        throughput = task.items_per_batch / step_ms * 1e3
        twin_ratio = None
        if twin is not None:
            twin_ratio = statistics.median(b / a for a, b in zip(contestant.times_ms, twin.times_ms, strict=True))
        rows.append(
            Row(
                name=contestant.name,
                recipe=str(contestant.recipe),
                tokens_per_s=throughput,
                step_ms=step_ms,
                step_ms_low=min(contestant.times_ms),
                step_ms_high=max(contestant.times_ms),
                peak_bytes=contestant.peak_bytes,
                mfu=_utilisation(task, throughput, contestant.compute, device),
                loss=contestant.loss,
                times_ms=tuple(contestant.times_ms),
                cpu_ms=tuple(contestant.cpu_ms) if min(contestant.cpu_ms, default=0.0) > 0 else (),
                ratio=throughput / rows[0].tokens_per_s if rows else 1.0,
                twin_ratio=twin_ratio,
            )
        )
    return rows


def _with_twins(finished: Sequence[Contestant]) -> Iterator[tuple[Contestant, Contestant | None]]:
    for index, contestant in enumerate(finished):
        follower = finished[index + 1] if index + 1 < len(finished) else None
        is_engine = contestant.name == str(contestant.recipe)
        has_twin = is_engine and follower is not None and follower.name != str(follower.recipe)
        yield contestant, follower if has_twin else None


def _utilisation(task: Task, throughput: float, compute: str, device: Device) -> float | None:
    peak = device.gpu.peak(compute) if device.gpu is not None else None
    if peak is None or task.flops_per_item is None:
        return None
    share = task.flops_per_item * throughput / peak
    if share > 1:
        raise NarrowgaugeError(
            f"{task.name} in {compute}: {share:.0%} of {device.name}'s peak was measured, which cannot be: the FLOPs "
            "of the task or the peak in hardware.toml is wrong"
        )
    return share


def free(device: Device) -> None:
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.empty_cache()
