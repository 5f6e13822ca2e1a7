"""Would a GPT train in MXFP8, NVFP4 or MXFP4? Paired runs of emulated formats, BF16 and FP8 with FP32, in limited time.

usage: python bench/emulated_formats.py SECONDS [--out FILE] [--tasks gpt-tiny,gpt:10x512] [--steps 300] [--seeds 4]
           [--candidates RECIPES] [--batch N,N] [--context N,N] [--processes N] [--device cpu]

--steps, --batch and --context take one number for each task; the last one is for all others. The runs of the first seed
come first, then those of the second, and so on up to --seeds, until SECONDS are over; a run that has not ended by then
is lost. On a GPU seven processes run at once (--processes): a small model leaves most of an H200 idle, and only losses
matter here, not their time. The verdicts are those of ``narrowgauge validate``. After each pair the JSON file is
written: by default $OUT/emulated-formats.json, or emulated-formats.json. At the end, or when the time is over, a table
is printed. Block formats are emulated: the seconds in the JSON are those of the emulation beside other runs, and say
nothing about hardware that has the formats.
"""

import argparse
import concurrent.futures
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from narrowgauge import UsageError, hardware
from narrowgauge.recipe import find_emulation, parse, split
from narrowgauge.validate.curves import paired_runs
from narrowgauge.validate.run import validate

TRICKS = "emulated-nvfp4[gradient_rounding=stochastic,hadamard=random]"
CANDIDATES = ("bf16", "fp8", "emulated-mxfp8", TRICKS, "emulated-nvfp4", "emulated-mxfp4")
"""In the order of the losses that are expected: the lowest first."""
ORDER = ("bf16", "emulated-mxfp8", TRICKS, "emulated-nvfp4")
REFERENCE = "fp32"
SIZES = {"gpt:10x512": {"batch": 16, "context": 256}}
"""Smaller than the tasks' own, whose updates take 0.55 s each in FP32 on an H200: a run of 300 would take 165 s."""
PROCESSES = 7
"""Runs at once on a GPU: the recipes of one seed."""
SETTINGS = {"watch_every": 0}
"""Settings of a run as ``validate`` makes them, which then finds it in the store."""


class Comparison:
    """The results so far, and the file that they are written to."""

    def __init__(self, path: Path, device: str, seconds: float, candidates: list[str]) -> None:
        self.path, self.start = path, time.monotonic()
        self.data: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "device": device,
            "seconds_allowed": seconds,
            "reference": REFERENCE,
            "emulated": {name: find_emulation(name) for name in candidates},
            "tasks": {},
        }

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self.start

    def add(self, plan: dict[str, Any], name: str, found: dict[str, Any], reference: list[Any], seconds: float) -> None:
        """Keep the result of a candidate so far, and write the file."""
        kept = ("verdict", "gap", "interval", "deviation", "margin", "seeds", "losses", "diverged", "answer", "reason")
        own = self.data["tasks"].setdefault(plan["task"], {**plan, "losses": [], "candidates": {}})
        own["losses"] = max(own["losses"], reference, key=len)
        own["candidates"][name] = {key: found[key] for key in kept} | {"seconds_of_last_run": seconds}
        self.data["seconds"] = self.seconds
        self.write()

    def write(self) -> None:
        """Write the file; a reader never sees half of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1))
        partial.replace(self.path)

    def show(self) -> None:
        """Print gaps and verdicts, and whether the losses are in the known order."""
        for task, own in self.data["tasks"].items():
            count = len(own["losses"])
            print(f"\n{task}, {own['steps']} steps, up to {count} pairs, compared with {self.data['reference']}")
            rows = [("candidate", "emulated", "mean gap", "interval", "pairs", "verdict")]
            for name, one in own["candidates"].items():
                gap = measure_gap(own["losses"], one["losses"])
                low, high = one["interval"] or (None, None)
                interval = "" if low is None else f"{low:+.3%} to {high:+.3%}"
                text = "diverged" if gap is None else f"{gap:+.3%}"
                emulated = self.data["emulated"][name] or ""
                rows.append((name, emulated, text, interval, str(one["seeds"]), one["verdict"]))
            widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
            for row in rows:
                print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
            print(self.describe_order(own))
        print(f"\n{self.seconds:.0f} of {self.data['seconds_allowed']:.0f} s; written to {self.path}", flush=True)

    @staticmethod
    def describe_order(own: dict[str, Any]) -> str:
        """Say whether the mean gaps are in the order that other work has found."""
        known = [name for name in ORDER if name in own["candidates"]]
        count = min((own["candidates"][name]["seeds"] for name in known), default=0)
        gaps = [measure_gap(own["losses"][:count], own["candidates"][name]["losses"][:count]) for name in known]
        if len(known) < 2 or any(gap is None for gap in gaps):
            return "no order: too few candidates, or runs diverged"
        words = " <= ".join(known)
        is_ordered = all(a <= b for a, b in itertools.pairwise(gaps))
        return f"order {words}: {'seen' if is_ordered else 'not seen'} in the mean gaps of {count} common pairs"


def measure_gap(reference: list[Any], losses: list[Any]) -> float | None:
    """Return the mean relative gap of the pairs; None if one has no finite loss."""
    pairs = [(float(r), float(c)) for r, c in zip(reference, losses, strict=False)]
    if not pairs or not all(math.isfinite(value) for pair in pairs for value in pair):
        return None
    return statistics.fmean(c - r for r, c in pairs) / statistics.fmean(r for r, _ in pairs)


def train_run(plan: dict[str, Any], recipe: str, seed: int, device: str | None, store: Path) -> tuple[float, float]:
    """Train one run in a process of the pool; return its loss and its seconds. Its numbers are in the store."""
    experiment = paired_runs.Experiment(
        spec=plan["task"], device=hardware.detect(device), options=plan["options"], store=store,
        settings={"steps": plan["steps"], **SETTINGS},
    )  # fmt: skip
    run = paired_runs.get_run(experiment, str(parse(recipe, experiment.device)), seed)
    return run.loss, run.seconds


def compare(comparison: Comparison, args: Any, pool: concurrent.futures.ProcessPoolExecutor, store: Path) -> None:
    """Train the runs of all tasks, and judge a candidate after each of its pairs, until the time is over."""
    recipes = [REFERENCE, *args.candidates]
    ended: dict[tuple[str, str], set[int]] = {(plan["task"], name): set() for plan in args.plans for name in recipes}
    jobs = {
        pool.submit(train_run, plan, name, seed, args.device, store): (plan, name, seed)
        for seed in range(args.seeds) for plan in args.plans for name in recipes
    }  # fmt: skip
    judged: dict[tuple[str, str], int] = {}
    for job in concurrent.futures.as_completed(jobs, timeout=max(0.0, args.seconds - comparison.seconds)):
        (plan, name, seed), now = jobs[job], f"{comparison.seconds:6.0f} s"
        task = plan["task"]
        try:
            loss, seconds = job.result()
        except UsageError as error:  # such as FP8 on a GPU that lacks it
            print(f"{now} {task} {name} seed {seed} is left out: {error}", flush=True)
            continue
        print(f"{now} {task} {name} seed {seed}: loss {loss:.5g} ({seconds:.0f} s)", flush=True)
        ended[task, name].add(seed)
        for one in args.candidates if name == REFERENCE else [name]:
            both = ended[task, REFERENCE] & ended[task, one]
            pairs = next(count for count in itertools.count() if count not in both)
            if pairs > judged.get((task, one), 0):
                judged[task, one] = pairs
                found = validate(
                    task, [one], REFERENCE, seeds=pairs, steps=plan["steps"], options=plan["options"],
                    device=args.device, out=store, margin=args.margin,
                ).describe()  # fmt: skip
                comparison.add(plan, one, found["candidates"][one], found["losses"], seconds)


def read_numbers(text: str | None, tasks: list[str]) -> list[int | None]:
    """Return a number for each task: the last one is for all others."""
    numbers = [None] if text is None else [int(number) for number in text.split(",")]
    return [numbers[min(index, len(numbers) - 1)] for index in range(len(tasks))]


def read_arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("seconds", type=float)
    add("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "emulated-formats.json")
    add("--tasks", default="gpt-tiny,gpt:10x512")
    add("--steps", default="300", help="updates per run, one number for each task")
    add("--seeds", type=int, default=4, help="pairs of each candidate, at most")
    add("--candidates", default=",".join(CANDIDATES))
    add("--margin", type=float, default=0.005)
    add("--batch", help="sequences per batch, one number for each task")
    add("--context", help="tokens in a sequence, one number for each task")
    add("--processes", type=int, help=f"runs at once; by default {PROCESSES} on a GPU and 1 on a CPU")
    add("--device")
    args = parser.parse_args()
    tasks, args.candidates = args.tasks.split(","), split(args.candidates)
    args.plans = []
    sizes = (read_numbers(text, tasks) for text in (args.steps, args.batch, args.context))
    for task, steps, batch, context in zip(tasks, *sizes, strict=True):
        given = {name: size for name, size in (("batch", batch), ("context", context)) if size is not None}
        args.plans.append({"task": task, "steps": steps, "options": {**SIZES.get(task, {}), **given}})
    for name in args.candidates:
        parse(name)  # a wrong name ends the script here, not after half of its time
    return args


def main() -> None:
    """Compare all tasks."""
    args = read_arguments()
    device = hardware.detect(args.device)
    comparison = Comparison(args.out, device.name, args.seconds, args.candidates)
    comparison.write()
    processes = args.processes or (PROCESSES if device.kind == "cuda" else 1)
    if processes > 1:  # else they compete for the cores
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as store:
        pool = concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
        try:
            compare(comparison, args, pool, Path(store))
        except TimeoutError:
            print("\nthe time is over", flush=True)
        finally:
            children = multiprocessing.active_children()
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.kill()
        comparison.show()


if __name__ == "__main__":
    main()
