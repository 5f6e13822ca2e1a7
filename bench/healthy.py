"""Findings on healthy runs with all rules, over recipes, tasks and seeds. There must be no serious finding.

usage: python bench/healthy.py [SEEDS] [RECIPE ...]      (JSON to bench/results/healthy.json with --save)
"""

import collections
import json
import sys
import tempfile
import time
from pathlib import Path

from narrowgauge import tasks
from narrowgauge.runs.settings import make_settings
from narrowgauge.runs.train import train

HERE = Path(__file__).parent
TASKS = {
    "digits": ("digits", {}, 120),
    "gpt:2x64": ("gpt:2x64", {"batch": 4, "context": 32}, 80),
    "llama": (f"{HERE}/small_tasks.py:llama", {}, 60),
    "regression": (f"{HERE}/small_tasks.py:regression", {}, 150),
    "autoencoder": (f"{HERE}/small_tasks.py:autoencoder", {}, 120),
}
RECIPES = ("fp32", "fp16", "bf16", "fp8", "bf16-lean", "fp8-lean", "bf16[master=none,moments=bf16]")


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--save"]
    seeds = int(words[0]) if words and words[0].isdigit() else 3
    recipes = [word for word in words if not word.isdigit()] or RECIPES
    rows, begin = [], time.perf_counter()
    for recipe in recipes:
        for name, (spec, options, steps) in TASKS.items():
            found: collections.Counter[str] = collections.Counter()
            serious = 0
            for seed in range(seeds):
                task = tasks.find(spec, **({"seed": seed} if ".py:" not in spec else {}), **options)
                settings = make_settings(task, recipe=recipe, device="cpu", steps=steps, seed=seed, checkpoint_every=0,
                                  watch_every=10)  # fmt: skip
                with tempfile.TemporaryDirectory() as folder:
                    result = train(task, settings, Path(folder) / "run")
                found.update(f"{finding.rule} ({finding.severity})" for finding in result.findings)
                serious += sum(finding.severity == "serious" for finding in result.findings)
            rows.append({"recipe": recipe, "task": name, "seeds": seeds, "serious": serious, "found": dict(found)})
            print(f"{recipe:32s} {name:12s} serious {serious}  {dict(found) or ''}", flush=True)
    print(f"{sum(row['serious'] for row in rows)} serious findings in {len(rows) * seeds} runs, "
          f"{time.perf_counter() - begin:.0f} s")  # fmt: skip
    if "--save" in sys.argv:
        (HERE / "results" / "healthy.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
