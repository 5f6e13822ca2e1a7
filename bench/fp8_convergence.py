"""Final evaluation loss of FP8 and BF16, same seeds and data, through the learning rate's decay.

usage: python bench/fp8_convergence.py TASK STEPS [SEEDS] [BATCH CONTEXT]      (e.g. gpt:6x512 600 3 32 256)
"""

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
gaps = []
for seed in range(seeds):
    losses = {}
    for recipe in ("bf16", "fp8"):
        task = tasks.find(spec, seed=seed, vocab=256, **sizes)
        settings = settle(task, recipe=recipe, device=device, steps=steps, seed=seed, checkpoint_every=0, compile=False)
        with tempfile.TemporaryDirectory() as folder:
            result = train(task, settings, Path(folder) / "run")
        assert result.loss_eval is not None
        losses[recipe] = result.loss_eval
        print(f"{spec} seed {seed} {recipe}: {result.loss_eval:.4f}, skipped {result.skipped}", flush=True)
    gaps.append(losses["fp8"] / losses["bf16"] - 1)
each = ", ".join(f"{gap:+.3%}" for gap in gaps)
print(f"{spec}, {steps} steps: FP8 against BF16 {statistics.mean(gaps):+.3%} (each {each})")
