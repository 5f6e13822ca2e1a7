"""Final evaluation loss of FP8 (in every product) and BF16, same seeds and data, through the learning rate's decay.

usage: python bench/fp8_convergence.py TASK STEPS [SEEDS] [BATCH CONTEXT]      (e.g. gpt:10x512 600 3 32 256)
(JSON to $OUT/fp8-convergence-TASK.json where OUT is set)
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from narrowgauge import hardware, tasks
from narrowgauge.runs.loop import train
from narrowgauge.runs.settings import settle

spec, steps = sys.argv[1], int(sys.argv[2])
seeds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
sizes = {"batch": int(sys.argv[4]), "context": int(sys.argv[5])} if len(sys.argv) > 5 else {}
device = hardware.detect().torch_device
gaps, runs = [], []
for seed in range(seeds):
    losses = {}
    for recipe in ("bf16", "fp8[products=all]"):
        task = tasks.find(spec, seed=seed, vocab=256, **sizes)
        settings = settle(task, recipe=recipe, device=device, steps=steps, seed=seed, checkpoint_every=0, compile=False)
        with tempfile.TemporaryDirectory() as folder:
            result = train(task, settings, Path(folder) / "run")
        assert result.loss_eval is not None
        losses[recipe] = result.loss_eval
        runs.append({"seed": seed, "recipe": recipe, "loss": result.loss_eval, "skipped": result.skipped})
        print(f"{spec} seed {seed} {recipe}: {result.loss_eval:.4f}, skipped {result.skipped}", flush=True)
    gaps.append(losses["fp8[products=all]"] / losses["bf16"] - 1)
each = ", ".join(f"{gap:+.3%}" for gap in gaps)
print(f"{spec}, {steps} steps: FP8 against BF16 {statistics.mean(gaps):+.3%} (each {each})")
if "OUT" in os.environ:
    record = {"task": spec, "steps": steps, **sizes, "device": hardware.detect().name, "runs": runs, "gaps": gaps}
    path = Path(os.environ["OUT"]) / f"fp8-convergence-{spec.replace(':', '-')}.json"
    path.write_text(json.dumps(record, indent=1))
