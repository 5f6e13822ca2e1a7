"""Findings on healthy runs of many kinds (tests/gauges/healthy_models.py), in several recipes and seeds.

usage: python bench/healthy_kinds.py [SEEDS]      (JSON to bench/results/healthy-kinds.json with --save)
"""

import collections
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "gauges"))

from healthy_models import CASES  # noqa: E402
from zero_start_models import train  # noqa: E402

from narrowgauge.errors import UsageError  # noqa: E402

RECIPES = ("fp32", "fp16", "bf16", "fp8[products=all]")
STEPS, EVERY = 30, 3


def draw_shifted(batch: Callable[[int], Any], shift: int, step: int) -> Any:
    return batch(step + shift)


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--save"]
    seeds = int(words[0]) if words else 1
    rows, begin = [], time.perf_counter()
    for name, make in CASES.items():
        for recipe in RECIPES:
            found: collections.Counter[str] = collections.Counter()
            accused = trained = 0
            for seed in range(seeds):
                torch.manual_seed(seed)
                run = make()
                run["batch"] = functools.partial(draw_shifted, run["batch"], 100_003 * seed)
                try:
                    findings = train(recipe=recipe, steps=STEPS, every=EVERY, **run).values()
                except UsageError as error:  # second derivatives in FP8, for example
                    print(f"{name:24s} {recipe:20s} not possible: {str(error)[:60]}", flush=True)
                    continue
                trained += 1
                found.update(f"{finding.rule} ({finding.severity})" for finding in findings)
                accused += any(finding.severity == "serious" for finding in findings)
            rows.append({"kind": name, "recipe": recipe, "runs": trained, "accused": accused, "found": dict(found)})
            if found:
                print(f"{name:24s} {recipe:20s} {dict(found)}", flush=True)
    runs = {recipe: sum(row["runs"] for row in rows if row["recipe"] == recipe) for recipe in RECIPES}
    accused = sum(row["accused"] for row in rows)
    warned = sum(1 for row in rows if row["found"])
    print(f"{accused} of {sum(runs.values())} runs with a serious finding, {time.perf_counter() - begin:.0f} s")
    result = {"steps": STEPS, "runs": sum(runs.values()), "accused": accused, "with_findings": warned, "rows": rows}
    if "--save" in sys.argv:
        (HERE / "results" / "healthy-kinds.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
