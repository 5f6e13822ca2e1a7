"""Times of a step of several recipes, which take turns in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from narrowgauge import bench
from narrowgauge.bench.baselines import make_baselines
from narrowgauge.hardware import Device
from narrowgauge.recipe import parse
from narrowgauge.task import Task

ROUNDS = 6
PLAIN = "plain PyTorch"
"""The name of the times of PyTorch alone, in the format of the reference; on a GPU with torch.compile."""


def measure_step_times(
    tasks: Mapping[str, Task], recipes: Mapping[str, str], device: Device, tell: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return the milliseconds of a step in each round, also those of PyTorch alone in the first recipe's format.

    Args:
        tasks: The task by name of the recipe: a candidate may train another one.
        recipes: The recipes by name, the reference first.
        device: The device to measure on.
        tell: Called with each line of progress.
    """
    settings = bench.Settings(compile=device.kind == "cuda")  # as runs are
    entries = {}
    for name, text in recipes.items():
        tell(f"  {name}: preparing the measurement of its step time")
        batches = bench.make_batches(tasks[name], device)
        entries[name] = bench.build_entry(name, tasks[name], parse(text), None, batches, device, settings), batches
    first = next(iter(recipes))
    recipe, batches = parse(recipes[first]), entries[first][1]
    tell(f"  {PLAIN}: preparing the measurement of its step time")
    (baseline,) = make_baselines("torch", recipe).values()
    entries[PLAIN] = bench.build_entry(PLAIN, tasks[first], recipe, baseline, batches, device, settings), batches
    for entry, batches in entries.values():
        bench.settle(entry, batches, device, settings.steps)
    times: dict[str, list[float]] = {name: [] for name in entries}
    for index in range(ROUNDS):
        for name, (entry, batches) in entries.items():
            times[name].append(bench.time_round(entry, batches, index, device, settings.steps))
    for name, (entry, _) in entries.items():
        entry.step = bench.raise_released
        tell(f"  {name}: {sorted(times[name])[ROUNDS // 2]:.2f} ms per step")
    bench.free_memory(device)
    return times
