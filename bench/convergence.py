"""Final evaluation loss of FP8 (in every product) and BF16, same seeds and data, through the learning rate's decay.

usage: python bench/convergence.py TASK STEPS [SEEDS] [BATCH CONTEXT] [RECIPE ...]
       (e.g. gpt:10x512 2400 3 32 256; the first recipe is the reference; default bf16 fp8[products=all])
(JSON to $OUT/convergence-TASK.json where OUT is set)

Evaluations of FP8 recipes multiply in BF16, so the losses are those of the weights. Files of earlier versions have them
as "weights", and as "loss" those of evaluations in FP8.

On a GPU all runs start at once, one process each: they fit in memory, and only their losses matter, not their time.
"""

import concurrent.futures
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path

from narrowgauge import hardware, tasks
from narrowgauge.runs.settings import make_settings
from narrowgauge.runs.train import train


def run(spec: str, steps: int, sizes: dict[str, int], recipe: str, seed: int, device: str) -> dict[str, float | str]:
    task = tasks.find(spec, seed=seed, vocab=256, **sizes)
    options = {"steps": steps, "seed": seed, "checkpoint_every": 0, "compile": False}
    settings = make_settings(task, recipe=recipe, device=device, **options)
    with tempfile.TemporaryDirectory() as folder:
        result = train(task, settings, Path(folder) / "run")
    assert result.loss_eval is not None
    print(f"{spec} seed {seed} {recipe}: {result.loss_eval:.4f}, skipped {result.skipped}", flush=True)
    return {"seed": seed, "recipe": recipe, "loss": result.loss_eval, "skipped": result.skipped}


def main() -> None:
    spec, steps = sys.argv[1], int(sys.argv[2])
    numbers = [int(argument) for argument in sys.argv[3:] if argument.isdigit()]
    seeds = numbers[0] if numbers else 3
    sizes = {"batch": numbers[1], "context": numbers[2]} if len(numbers) > 2 else {}
    recipes = [argument for argument in sys.argv[3:] if not argument.isdigit()] or ["bf16", "fp8[products=all]"]
    device = hardware.detect()
    workers = seeds * len(recipes) if device.kind == "cuda" else 1
    jobs = [(spec, steps, sizes, recipe, seed, device.torch_device) for seed in range(seeds) for recipe in recipes]
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        runs = list(pool.map(run, *zip(*jobs, strict=True)))
    record = {"task": spec, "steps": steps, **sizes, "device": device.name, "runs": runs}
    for recipe in recipes[1:]:
        losses = {(one["recipe"], one["seed"]): float(one["loss"]) for one in runs}
        gaps = [losses[recipe, seed] / losses[recipes[0], seed] - 1 for seed in range(seeds)]
        each = ", ".join(f"{gap:+.3%}" for gap in gaps)
        print(f"{spec}, {steps} steps: {recipe} against {recipes[0]} {statistics.mean(gaps):+.3%} (each {each})")
        record[f"{recipe} gaps of loss"] = gaps
    if "OUT" in os.environ:
        path = Path(os.environ["OUT"]) / f"convergence-{spec.replace(':', '-')}.json"
        path.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
