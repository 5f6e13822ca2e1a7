"""Where the time of a step goes: a torch.profiler trace of a recipe's steps, and the share of each kind of work.

On a GPU the kernels count, on a CPU the operators with the time each spends in itself. ``op_kinds`` derives the kind
of work from the name; unknown names are ``other``.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from narrowgauge import op_kinds
from narrowgauge.bench.compare import BATCHES, Settings, build_entry, free_memory, make_batches, raise_released
from narrowgauge.errors import UsageError
from narrowgauge.hardware import Device
from narrowgauge.recipe import Recipe
from narrowgauge.task import Task

GROUPS = {"product": "gemm", "convolution": "gemm", "copy": "cast", "embedding": "other", op_kinds.OTHER: "other"}
"""Kinds of work that a profile reports under another name, several of them together."""
NAMES = (*dict.fromkeys(GROUPS.get(kind, kind) for kind in (*op_kinds.KINDS, op_kinds.OTHER) if kind != "embedding"),)
_OVERHEAD = re.compile(r"^autograd::|Backward\d*$|AccumulateGrad")
_TENSOR_CORES = re.compile(
    r"nvjet|wgmma|[hi]mma|xmma|_mma|tensorop|tensor\d+x\d+|[a-z](884|1688|16816)|sdpa|flash|fmha|triton_tem",
    re.IGNORECASE,
)
_CUDA_CORES = re.compile(r"ffma|simt|splitk|reduce_kernel", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The time of a recipe's steps by kind of work."""

    total_ms: float
    """Of a step: kernels on a GPU, operators on a CPU."""
    shares: dict[str, float]
    """Of the total, for each kind of work; they sum to 1."""
    tensor_cores: float | None
    """Share of the time in products and attention that was spent in kernels that use tensor cores; None on a CPU."""
    trace: str
    """The file to open in Perfetto or chrome://tracing."""


def kind_of(name: str) -> str:
    """What kind of work a kernel or an operator does."""
    if _OVERHEAD.search(name):
        return "other"
    kind = op_kinds.classify(name)
    return GROUPS.get(kind, kind)


def on_tensor_cores(name: str) -> bool:
    """Whether a kernel that multiplies matrices does so on tensor cores."""
    return bool(_TENSOR_CORES.search(name)) and not _CUDA_CORES.search(name)


def profile(task: Task, recipe: Recipe, device: Device, settings: Settings, path: Path, steps: int = 3) -> Summary:
    """Runs some steps with torch.profiler and writes the trace to ``path``.

    Raises:
        UsageError: If the trace cannot be written.
    """
    batches = make_batches(task, device)
    entry = build_entry(str(recipe), task, recipe, None, batches, device, settings)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        for index in range(steps):
            entry.step(batches[index % BATCHES])
        if device.kind == "cuda":
            torch.cuda.synchronize()
    entry.step = raise_released
    free_memory(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")  # the profiler's own error does not have the reason
    except OSError as error:
        raise UsageError(f"--profile {path}: {error.strerror}") from None
    recorded.export_chrome_trace(str(path))
    if device.kind == "cuda":
        return summarize(read_kernels(path), steps, path, on_gpu=True)
    times = [(event.key, event.self_cpu_time_total / 1e3) for event in recorded.key_averages()]
    return summarize(times, steps, path, on_gpu=False)


def read_kernels(path: Path) -> list[tuple[str, float]]:
    """The name and the milliseconds of every kernel and copy in a Chrome trace."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    on_device = ("kernel", "gpu_memcpy", "gpu_memset")
    return [(event["name"], event["dur"] / 1e3) for event in events if event.get("cat") in on_device]


def summarize(times: Iterable[tuple[str, float]], steps: int, path: Path, on_gpu: bool) -> Summary:
    """Sums up the times of kernels or operators by kind of work."""
    spent = dict.fromkeys(NAMES, 0.0)
    on_cores = 0.0
    for name, milliseconds in times:
        kind = kind_of(name)
        spent[kind] += milliseconds
        if kind in ("gemm", "attention") and on_tensor_cores(name):
            on_cores += milliseconds
    total, products = sum(spent.values()), spent["gemm"] + spent["attention"]
    return Summary(
        total_ms=total / steps,
        shares={kind: value / total if total else 0.0 for kind, value in spent.items()},
        tensor_cores=on_cores / products if on_gpu and products else None,
        trace=str(path),
    )


def choose_trace_paths(where: str | None, folder: str | None, recipes: Iterable[Recipe]) -> dict[Recipe, Path]:
    """The trace file of each recipe: the given file, or trace-RECIPE.json.gz in a folder."""
    wanted = list(recipes)
    if where and where.endswith((".json", ".json.gz")):
        if len(wanted) > 1:
            raise UsageError(f"--profile {where}: {len(wanted)} recipes need a folder, not a file")
        return {wanted[0]: Path(where)}
    target = Path(where or folder or ".")
    names = {recipe: re.sub(r"[^A-Za-z0-9.=-]+", "-", str(recipe)).strip("-") for recipe in wanted}
    return {recipe: target / f"trace-{name}.json.gz" for recipe, name in names.items()}
