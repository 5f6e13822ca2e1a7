"""Would a GPT train in MXFP8, NVFP4 or MXFP4? Paired runs of emulated formats, BF16 and FP8 with FP32, in limited time.

usage: python bench/emulated_formats.py SECONDS [--out FILE] [--tasks gpt-tiny,gpt:10x512] [--steps 400,300] [--seeds 5]
           [--candidates RECIPES] [--batch N] [--context N] [--device cpu]

Each task has an equal share of what is left of SECONDS. All candidates of a task get their first pair of runs, then
their second, and so on up to --seeds, as long as the next pair is expected to end in time. The verdicts are those of
``narrowgauge validate``. After each pair the JSON file is written: by default $OUT/emulated-formats.json, or
emulated-formats.json. At the end, or when the time is over, a table is printed. Block formats are emulated: the seconds
in the JSON are those of the emulation, and say nothing about hardware that has the formats.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from narrowgauge import UsageError, hardware
from narrowgauge.recipe import find_emulation, parse, split
from narrowgauge.validate.run import validate

TRICKS = "emulated-nvfp4[gradient_rounding=stochastic,hadamard=random]"
CANDIDATES = ("bf16", "fp8", "emulated-mxfp8", TRICKS, "emulated-nvfp4", "emulated-mxfp4")
"""In the order of the losses that are expected: the lowest first."""
ORDER = ("bf16", "emulated-mxfp8", TRICKS, "emulated-nvfp4")
RESERVE_S = 15.0
"""Time kept for the end of a step, the evaluation after it and the table; at most a tenth of all."""


class TimeOver(Exception):
    """The time of a task is over."""


class Comparison:
    """The results so far, and the file that they are written to."""

    def __init__(self, path: Path, device: str, seconds: float, candidates: list[str]) -> None:
        self.path, self.start, self.lock = path, time.monotonic(), threading.Lock()
        self.data: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "device": device,
            "seconds_allowed": seconds,
            "reference": "fp32",
            "emulated": {name: find_emulation(name) for name in candidates},
            "tasks": {},
        }

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self.start

    def add(
        self, task: str, steps: int, name: str, found: dict[str, Any], reference: list[Any], seconds: float
    ) -> None:
        """Keep the result of a candidate so far, and write the file."""
        kept = ("verdict", "gap", "interval", "deviation", "margin", "seeds", "losses", "diverged", "answer", "reason")
        with self.lock:
            own = self.data["tasks"].setdefault(task, {"steps": steps, "losses": [], "candidates": {}})
            own["losses"] = max(own["losses"], reference, key=len)
            own["candidates"][name] = {key: found[key] for key in kept} | {"seconds_of_last_pair": seconds}
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


def compare_task(comparison: Comparison, task: str, steps: int, deadline: float, args: Any, store: Path) -> None:
    """Train pairs of all candidates of a task until the deadline, in seconds since the start."""
    costs: dict[str, float] = {}
    deadline -= min(RESERVE_S, args.seconds / 10)
    options = {name: value for name in ("batch", "context") if (value := getattr(args, name)) is not None}

    def tell(line: str) -> None:
        print(f"{comparison.seconds:6.0f} s {line}", flush=True)
        if comparison.seconds > deadline:
            raise TimeOver

    for seeds in range(1, args.seeds + 1):
        for name in args.candidates:
            expected = costs.get(name, statistics.fmean(costs.values()) if costs else 0.0)
            if comparison.seconds + expected > deadline:
                print(f"{comparison.seconds:6.0f} s {task} {name}: pair {seeds} would take {expected:.0f} s; left out")
                continue
            before = time.monotonic()
            try:
                found = validate(
                    task, [name], "fp32", seeds=seeds, steps=steps, options=options, device=args.device, out=store,
                    margin=args.margin, tell=tell,
                ).describe()  # fmt: skip
            except UsageError as error:  # such as FP8 on a GPU that lacks it
                print(f"{comparison.seconds:6.0f} s {task} {name} is left out: {error}", flush=True)
                costs.setdefault(name, 0.0)
                continue
            except TimeOver:
                print(f"{comparison.seconds:6.0f} s the time of {task} is over", flush=True)
                return
            costs[name] = time.monotonic() - before
            comparison.add(task, steps, name, found["candidates"][name], found["losses"], costs[name])


def read_arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("seconds", type=float)
    add("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "emulated-formats.json")
    add("--tasks", default="gpt-tiny,gpt:10x512")
    add("--steps", default="400,300", help="updates per run, one number for each task")
    add("--seeds", type=int, default=5, help="pairs of each candidate, at most")
    add("--candidates", default=",".join(CANDIDATES))
    add("--margin", type=float, default=0.005)
    add("--batch", type=int)
    add("--context", type=int)
    add("--device")
    args = parser.parse_args()
    args.tasks, args.candidates = args.tasks.split(","), split(args.candidates)
    args.steps = [int(text) for text in args.steps.split(",")]
    args.steps += args.steps[-1:] * (len(args.tasks) - len(args.steps))
    for name in args.candidates:
        parse(name)  # a wrong name ends the script here, not after half of its time
    return args


def main() -> None:
    """Compare all tasks."""
    args = read_arguments()
    device = hardware.detect(args.device)
    comparison = Comparison(args.out, device.name, args.seconds, args.candidates)
    comparison.write()

    def quit_in_time() -> None:
        """End the process whatever it does, such as compiling: what is done is in the file."""
        with comparison.lock:
            print("\nthe time is over", flush=True)
            comparison.show()
            os._exit(0)

    timer = threading.Timer(args.seconds, quit_in_time)
    timer.daemon = True
    timer.start()
    with tempfile.TemporaryDirectory() as store:
        for index, (task, steps) in enumerate(zip(args.tasks, args.steps, strict=False)):
            share = (args.seconds - comparison.seconds) / (len(args.tasks) - index)
            compare_task(comparison, task, steps, comparison.seconds + share, args, Path(store))
        timer.cancel()
        comparison.show()


if __name__ == "__main__":
    main()
