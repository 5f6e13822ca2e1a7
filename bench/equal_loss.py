"""Speed at equal loss, in stretches of GPU time: what `narrowgauge validate --time` does, with results that travel.

usage: python bench/equal_loss.py FILE.json SECONDS --data FOLDER [--task gpt2-124m] [--tokens 100M] [--seeds 5]
                                  [--recipes bf16,fp8] [--shorter 3] [--margin 0.0025] [--device cpu]

Trains each recipe with each seed, through the decay of the learning rate; the first recipe is the reference. SHORTER
seeds of it are also trained for 60% of the steps. Every finished run is written to FILE.json at once. Runs are chosen
so that together they fill SECONDS, and none is started that would not end within them: the same command continues in
the next stretch, on another machine too if it has the same GPU and the same data. When no run is missing, step times
are measured in turns with PyTorch alone, and the verdict and the speed at equal loss of each recipe are printed and
written.

FOLDER has train.bin and eval.bin (bench/corpus/read_corpus.py). TOKENS is rounded to whole steps of the task.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from narrowgauge import UsageError, hardware, tasks
from narrowgauge.recipe import parse, split
from narrowgauge.runs.train import read_versions
from narrowgauge.runs.trainer import Observer
from narrowgauge.validate.curves.paired_runs import Experiment, Run, get_run, make_task
from narrowgauge.validate.statistics.equal_loss import SHARE, compare_at_equal_loss
from narrowgauge.validate.statistics.verdict import judge
from narrowgauge.validate.step_times import PLAIN, measure_step_times

LATER = 1.06
"""A run may take this many times as long as the fastest one of its recipe."""
NEXT = 12
"""So many of the missing runs are looked at when a stretch is filled."""
EACH = 50
"""Steps between two points of a curve in the file."""
SAY_SECONDS = 20.0
UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}


class Progress(Observer):
    """Prints a line now and then."""

    def __init__(self, name: str) -> None:
        self.name, self.said = name, time.monotonic()

    def on_metrics(self, event: Any, skipped: int) -> None:
        if event["kind"] == "step" and time.monotonic() - self.said > SAY_SECONDS:
            self.said = time.monotonic()
            print(f"  {self.name}: step {event['step']}, loss {event['loss']:.4f}", flush=True)


class Stretch:
    """The runs of a file, and the time for more."""

    def __init__(self, args: argparse.Namespace, device: hardware.Device) -> None:
        self.args, self.device, self.begin = args, device, time.monotonic()
        options = {"data": args.data}
        task = tasks.find(args.task, seed=0, **options)
        self.steps = max(1, round(args.tokens / task.items_per_batch))
        about = {
            "task": args.task, "tokens": self.steps * task.items_per_batch, "steps": self.steps,
            "device": device.name, "data": hash_data(Path(args.data)), "torch": read_versions()["torch"],
        }  # fmt: skip
        self.data: dict[str, Any] = {"about": about, "runs": [], "times_ms": {}, "results": {}}
        if args.file.exists():
            self.data = json.loads(args.file.read_text())
            if not isinstance(self.data, dict) or not {"about", "runs", "times_ms", "results"} <= self.data.keys():
                raise UsageError(f"{args.file} has no runs of this script: name another file")
            differs = [name for name, value in about.items() if self.data["about"].get(name) != value]
            if differs:
                raise UsageError(f"{args.file} has runs with another {', '.join(differs)}: name another file")
        self.experiment = Experiment(spec=args.task, device=device, options=options)

    def write(self) -> None:
        """Write the file; a reader never sees half of it."""
        partial = self.args.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1))
        partial.replace(self.args.file)

    def find(self, recipe: str, seed: int, steps: int) -> dict[str, Any] | None:
        wanted = {"recipe": recipe, "seed": seed, "steps": steps}
        return next((run for run in self.data["runs"] if wanted.items() <= run.items()), None)

    def estimate(self, recipe: str, steps: int) -> float:
        """Seconds of a run, by its number of steps: from runs of its recipe, else of any; 0 before the first."""
        runs = self.data["runs"]
        own = [run["seconds"] / run["steps"] for run in runs if run["recipe"] == recipe]
        any_recipe = [run["seconds"] / run["steps"] for run in runs]
        return steps * LATER * (min(own) if own else max(any_recipe, default=0.0))

    def choose(self, missing: list[tuple[str, int, int]], seconds: float) -> list[tuple[str, int, int]]:
        """Return which of the next runs fill the seconds best, earlier ones where several do; none if no run fits."""
        missing = missing[:NEXT]
        times = {run: self.estimate(run[0], run[2]) for run in missing}
        fitting: list[tuple[str, int, int]] = []
        for count in range(1, len(missing) + 1):
            for runs in itertools.combinations(missing, count):
                total = sum(times[run] for run in runs)
                if total < seconds and (not fitting or total > sum(times[run] for run in fitting)):
                    fitting = list(runs)
        return fitting

    def train(self, wanted: list[tuple[str, int, int]]) -> bool:
        """Train what is missing and fits. Returns whether nothing is missing."""
        while missing := [run for run in wanted if self.find(*run) is None]:
            left = self.get_seconds_left()
            fitting = self.choose(missing, left)
            if not fitting:
                names = ", ".join(f"{recipe} seed {seed} ({steps} steps)" for recipe, seed, steps in missing)
                print(f"{left:.0f} s are left, too few for the next run; missing: {names}")
                return False
            recipe, seed, steps = fitting[0]
            experiment = dataclasses.replace(self.experiment, settings={"steps": steps, "watch_every": 0})
            with tempfile.TemporaryDirectory() as store:
                experiment = dataclasses.replace(experiment, store=Path(store))
                run = get_run(experiment, str(parse(recipe)), seed, Progress(f"{recipe} seed {seed}"))
            self.add(recipe, seed, steps, run)
        return True

    def get_seconds_left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.begin)

    def add(self, recipe: str, seed: int, steps: int, run: Run) -> None:
        """Write a finished run to the file."""
        self.data["runs"].append({
            "recipe": recipe, "seed": seed, "steps": steps, "loss": run.loss, "best": run.best,
            "skipped": run.skipped, "seconds": run.seconds, "curve": run.curve[::EACH],
        })  # fmt: skip
        self.write()
        print(f"{recipe} seed {seed}, {steps} steps: loss {run.loss:.5f} in {run.seconds:.0f} s", flush=True)

    def measure(self) -> None:
        """Measure step times, unless the file has them."""
        recipes = self.args.recipes
        if not {*recipes, PLAIN} <= set(self.data["times_ms"]):
            made = {recipe: make_task(self.experiment, 0) for recipe in recipes}
            texts = {recipe: str(parse(recipe)) for recipe in recipes}
            self.data["times_ms"] = measure_step_times(made, texts, self.device, lambda line: print(line, flush=True))
            self.write()

    def judge(self) -> None:
        """Print and write verdicts and speeds of all candidates."""
        reference, *candidates = self.args.recipes
        seeds, times = range(self.args.seeds), self.data["times_ms"]

        def collect(recipe: str, steps: int, seeds: range) -> list[float]:
            return [run["loss"] for seed in seeds if (run := self.find(recipe, seed, steps)) is not None]

        shorter = collect(reference, self.shorter_steps, range(self.args.shorter))
        losses = collect(reference, self.steps, seeds)
        for name in candidates:
            own = collect(name, self.steps, seeds)
            verdict = judge(losses, own, self.args.margin)
            share = self.shorter_steps / self.steps
            speed = compare_at_equal_loss(losses, own, shorter, times[reference], times[name], share)
            speed = speed.beside_plain(times[reference], times[PLAIN])
            self.data["results"][name] = {"verdict": dataclasses.asdict(verdict), "speed": dataclasses.asdict(speed)}
            print(f"{name} against {reference}: {verdict.verdict}: {verdict.reason}\n  {speed.reason}")
        self.write()

    @property
    def shorter_steps(self) -> int:
        return max(1, round(SHARE * self.steps))

    def run(self) -> int:
        reference = self.args.recipes[0]
        wanted = [(recipe, seed, self.steps) for seed in range(self.args.seeds) for recipe in self.args.recipes]
        wanted += [(reference, seed, self.shorter_steps) for seed in range(self.args.shorter)]
        if not self.train(wanted):
            return 1
        self.measure()
        self.judge()
        return 0


def hash_data(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in ("train.bin", "eval.bin"):
        with (folder / name).open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def parse_count(text: str) -> float:
    unit = UNITS.get(text[-1:].lower())
    return float(text[:-1]) * unit if unit else float(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", type=Path)
    add("seconds", type=float)
    add("--data", required=True)
    add("--task", default="gpt2-124m")
    add("--tokens", type=parse_count, default=100e6)
    add("--seeds", type=int, default=5)
    add("--recipes", type=split, default=["bf16", "fp8"])
    add("--shorter", type=int, default=3)
    add("--margin", type=float, default=0.0025)
    add("--device")
    args = parser.parse_args()
    args.shorter = min(args.shorter, args.seeds)
    if args.seeds < 2 or args.shorter < 2 or len(args.recipes) < 2:
        parser.error("give two recipes, seeds and shorter runs or more")
    try:
        return Stretch(args, hardware.detect(args.device)).run()
    except (UsageError, OSError, ValueError) as error:
        print(f"equal_loss: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
