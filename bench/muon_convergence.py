"""How Muon trains: in narrow formats against FP32, and against AdamW. In limited seconds, several runs at once.

usage: python bench/muon_convergence.py SECONDS gaps  [--task gpt:10x512] [--steps 1200] [--seeds 4]
                                                      [--recipes fp32,bf16-lean,fp8-lean] [--lr RATE]
       python bench/muon_convergence.py SECONDS reach [--task gpt2-124m] [--steps 800] [--recipe bf16]
                                                      [--adamw-lrs 6e-4,1.2e-3] [--muon-lrs 6e-4,1.2e-3] [--trials 3]
                                                      [--goal LOSS] [--first 0.7]
       both: [--data FOLDER] [--batch N] [--context N] [--vocab N] [--processes N] [--device cpu] [--out FILE]

gaps    Muon in each recipe, with the same seeds and data: the relative gap of the final evaluation loss to the first
        recipe's, per seed and on average. Lean recipes have split masters and 8-bit momentum. Each run's weights are
        also evaluated in plain BF16, which leaves out the error of narrow products in the evaluation itself.
reach   How many steps Muon needs for AdamW's final loss. AdamW trains for STEPS with each of its rates; its lowest loss
        is the goal. Muon then trains for 0.7 of STEPS (--first) with each of its rates, and with the better one for
        other lengths, each with its own complete schedule: shorter ones after a run that reached the goal, else longer
        ones. --goal has AdamW's lowest loss of an earlier run; a lower one of this run's rates replaces it.

FOLDER has train.bin and eval.bin (bench/corpus/read_corpus.py). By default the data are bytes of Python's sources.
After every run the JSON file is written: $OUT/muon-PART-TASK.json, or in the current folder. When the time is over,
runs in progress end, and the file has their losses so far.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from narrowgauge import UsageError, hardware
from narrowgauge.recipe import parse, split

BAR = 0.0025
"""The largest mean gap that counts as equal."""
EVALUATIONS = 8
SAY_SECONDS = 20.0
RESERVE_S = 5.0
"""Kept for the end: stopping runs, writing the file."""
LONGEST, FIRST = 1.25, 0.7
"""Lengths of Muon's runs, as shares of AdamW's: the longest that is tried, and the first."""

Job = dict[str, Any]
"""What a run trains: name, optimizer, recipe, lr, steps, seed."""


def run(job: Job, options: dict[str, Any], spec: str, device: str, folder: str) -> None:
    """Train, in a process of its own; leave the result or the error in the folder."""
    where = Path(folder)
    try:
        result = train_job(job, options, spec, device, where / "run")
    except UsageError as error:
        result = {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    (where / "partial").write_text(json.dumps(result))
    (where / "partial").replace(where / "result.json")


def train_job(job: Job, options: dict[str, Any], spec: str, device: str, folder: Path) -> dict[str, Any]:
    import torch

    from narrowgauge import Engine, tasks
    from narrowgauge.runs.batches import make_batch, to_device
    from narrowgauge.runs.checkpoints import checkpoint
    from narrowgauge.runs.settings import make_settings
    from narrowgauge.runs.train import train

    task = tasks.find(spec, seed=job["seed"], **options)
    settings = make_settings(
        task, recipe=job["recipe"], device=device, steps=job["steps"], seed=job["seed"], learning_rate=job["lr"],
        optimizer=job["optimizer"], eval_every=max(1, job["steps"] // EVALUATIONS), checkpoint_every=0, compile=False,
        watch_every=0, log="none",
    )  # fmt: skip
    began = time.monotonic()
    result = train(task, settings, folder)
    seconds = time.monotonic() - began
    saved = checkpoint.load_newest(folder, print)
    assert saved is not None
    model = task.model().to(device)
    model.load_state_dict(saved.weights)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), "bf16", fused=False)
    with engine.evaluating():
        batches = (to_device(make_batch(task, n, "eval", "here"), engine.device) for n in range(settings.eval_batches))
        alone = statistics.mean(float(task.loss(model, batch)) for batch in batches)
    return {"loss": result.loss_eval, "weights": alone, "skipped": result.skipped, "seconds": seconds}


class Runs:
    """Starts runs, waits for them until the time is over, and writes what is known."""

    def __init__(self, args: Any, device: hardware.Device) -> None:
        self.args, self.device, self.start = args, device, time.monotonic()
        self.done: list[Job] = []
        self.seconds_per_step = 0.0
        self.data: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]), "device": device.name, "task": args.task, "steps": args.steps,
            "options": args.options, "runs": self.done,
        }  # fmt: skip
        self.store = tempfile.TemporaryDirectory()
        self.count = 0

    @property
    def left(self) -> float:
        """Seconds that runs may still take."""
        return self.args.seconds - min(RESERVE_S, self.args.seconds / 10) - (time.monotonic() - self.start)

    def tell(self, line: str) -> None:
        print(f"{time.monotonic() - self.start:6.0f} s {line}", flush=True)

    def write(self) -> None:
        """Write the file; a reader never sees half of it."""
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.args.out.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1))
        partial.replace(self.args.out)

    def train(self, jobs: list[Job]) -> list[Job]:
        """Train jobs, some at a time, in their order. Returns those that ended with a loss."""
        waiting, running, said = list(jobs), dict[int, tuple[Job, BaseProcess, Path]](), time.monotonic()
        while (waiting or running) and self.left > 0:
            while waiting and len(running) < self.args.processes:
                job = waiting.pop(0)
                running[id(job)] = self.begin(job)
            time.sleep(0.2)
            for key, (job, process, folder) in list(running.items()):
                if not process.is_alive():
                    process.join()
                    self.finish(job, folder, f"the process ended with {process.exitcode}")
                    del running[key]
            if time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                for job, _, folder in running.values():
                    self.tell(f"{job['name']}: {describe_progress(folder)}")
        for job, process, folder in running.values():
            process.kill()  # on SIGTERM a run would write a checkpoint and end as if it were complete
            process.join()
            self.finish(job, folder, "the time is over")
        self.done += [{**job, "error": "the time was over before it started"} for job in waiting]
        self.write()
        return [job for job in jobs if "loss" in job]

    def begin(self, job: Job) -> tuple[Job, BaseProcess, Path]:
        folder = Path(self.store.name) / str(self.count)
        self.count += 1
        folder.mkdir()
        arguments = (job, self.args.options, self.args.task, self.device.torch_device, str(folder))
        process = multiprocessing.get_context("spawn").Process(target=run, args=arguments, daemon=True)
        process.start()
        self.tell(f"{job['name']}: started, {job['steps']} steps")
        return job, process, folder

    def finish(self, job: Job, folder: Path, why: str) -> None:
        """Keep the result of a run, with its evaluations so far, and write the file."""
        path = folder / "result.json"
        found = json.loads(path.read_text()) if path.exists() else {"error": why}
        evaluations = [(e["step"], e["loss"]) for e in read_events(folder) if e.get("kind") == "eval"]
        job |= {**found, "evaluations": evaluations}
        self.done.append(job)
        if "loss" in job:
            each = job["seconds"] / job["steps"]
            self.seconds_per_step = max(self.seconds_per_step, each)
            words = f"loss {job['loss']:.4f}, weights in BF16 {job['weights']:.4f}, skipped {job['skipped']}"
            self.tell(f"{job['name']}: {words}, {each * 1e3:.0f} ms per step")
        else:
            self.tell(f"{job['name']}: no result: {job['error']}; {describe_progress(folder)}")
        self.write()


def read_events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # a line that is being written
            break
    return found


def describe_progress(folder: Path) -> str:
    steps = [event for event in read_events(folder) if event.get("kind") == "step"]
    return f"step {steps[-1]['step']}, loss {float(steps[-1]['loss']):.4f}" if steps else "no step yet"


def compare_recipes(runs: Runs) -> None:
    """Measure the gaps of recipes to the first one."""
    args = runs.args
    jobs = [
        {"name": f"muon {recipe} seed {seed}", "optimizer": "muon", "recipe": recipe, "lr": args.lr,
         "steps": args.steps, "seed": seed}
        for seed in range(args.seeds) for recipe in args.recipes
    ]  # fmt: skip
    ended = {(job["recipe"], job["seed"]): job for job in runs.train(jobs)}
    base = args.recipes[0]
    runs.data["gaps"] = {}
    for recipe in args.recipes[1:]:
        seeds = [seed for seed in range(args.seeds) if (base, seed) in ended and (recipe, seed) in ended]
        for which in ("loss", "weights") if seeds else ():
            gaps = [ended[recipe, seed][which] / ended[base, seed][which] - 1 for seed in seeds]
            mean = statistics.mean(gaps)
            runs.data["gaps"].setdefault(recipe, {})[which] = {"seeds": seeds, "each": gaps, "mean": mean}
            each = ", ".join(f"{gap:+.3%}" for gap in gaps)
            verdict = "within" if abs(mean) <= BAR else "better than" if mean < 0 else "NOT within"
            print(f"{which}: Muon {recipe} against {base}: {mean:+.3%}, {verdict} {BAR:.2%} (each {each})")
        if not seeds:
            print(f"Muon {recipe} against {base}: no seed of both has ended")


def count_steps(runs: Runs) -> None:
    """Find the length of a Muon run that ends at AdamW's lowest loss."""
    args = runs.args

    def make(optimizer: str, lr: float, steps: int) -> Job:
        name = f"{optimizer} lr {lr:g} {steps} steps"
        own = {"optimizer": optimizer, "recipe": args.recipe, "lr": lr, "steps": steps, "seed": 0}
        return {"name": name, **own}

    def train_best(optimizer: str, rates: list[float], steps: int) -> Job | None:
        return min(runs.train([make(optimizer, lr, steps) for lr in rates]), key=lambda job: job["loss"], default=None)

    best_adamw = train_best("adamw", args.adamw_lrs, args.steps)
    known = [args.goal, None if best_adamw is None else best_adamw["loss"]]
    goal = min((loss for loss in known if loss is not None), default=None)
    if goal is None:
        print("no run of AdamW has ended: give more seconds, or fewer steps")
        return
    runs.data["goal"] = goal
    source = "an earlier run" if best_adamw is None or goal == args.goal else f"lr {best_adamw['lr']:g}"
    runs.tell(f"the goal is {goal:.4f}: AdamW, {args.steps} steps, {source}")
    tried: dict[int, float] = {}
    rates, low, high, share = list(args.muon_lrs), 0.0, LONGEST, args.first
    for _ in range(args.trials):
        steps = max(1, round(share * args.steps))
        needed = runs.seconds_per_step * steps * -(-len(rates) // args.processes)
        if steps in tried or needed > runs.left:
            break
        best = train_best("muon", rates, steps)
        if best is None:
            break
        rates, tried[steps] = [best["lr"]], best["loss"]
        low, high = (low, share) if best["loss"] <= goal else (share, high)
        share = (max(low, 0.4) + high) / 2 if low < high else high
        runs.data["muon"] = {"lr": best["lr"], "losses": tried}
        runs.write()
    reached = [steps for steps, loss in tried.items() if loss <= goal]
    runs.data["reached_in_steps"] = min(reached, default=None)
    for steps, loss in sorted(tried.items()):
        print(f"Muon, {steps} steps ({steps / args.steps:.0%} of AdamW's): {loss:.4f}, {loss / goal - 1:+.2%}")
    if reached:
        missed = max((steps for steps in tried if steps < min(reached) and steps not in reached), default=0)
        print(f"Muon reaches AdamW's loss of {args.steps} steps in at most {min(reached)} steps, more than {missed}")
    else:
        print(f"Muon did not reach AdamW's loss in {', '.join(map(str, tried)) or 'any run of'} steps")


def read_arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("seconds", type=float)
    add("part", choices=("gaps", "reach"))
    add("--task")
    add("--steps", type=int)
    add("--seeds", type=int, default=4)
    add("--recipes", default="fp32,bf16-lean,fp8-lean")
    add("--recipe", default="bf16")
    add("--lr", type=float, help="Muon's learning rate in gaps (default: the task's)")
    add("--adamw-lrs", default="6e-4,1.2e-3")
    add("--muon-lrs", default="6e-4,1.2e-3")
    add("--goal", type=float, help="AdamW's lowest loss so far, with the same steps and data")
    add("--first", type=float, default=FIRST, help="the first length of Muon's runs, as a share of AdamW's")
    add("--trials", type=int, default=3, help="lengths of Muon's runs")
    add("--data")
    add("--batch", type=int)
    add("--context", type=int)
    add("--vocab", type=int, help="default: 256 (bytes), or the task's with --data")
    add("--processes", type=int, help="runs at a time (default on a GPU: two seeds of gaps, one run of reach)")
    add("--device")
    add("--out", type=Path)
    args = parser.parse_args()
    gaps = args.part == "gaps"
    args.task = args.task or ("gpt:10x512" if gaps else "gpt2-124m")
    args.steps = args.steps or (1200 if gaps else 800)
    args.recipes = split(args.recipes)
    args.adamw_lrs, args.muon_lrs = (
        [float(r) for r in text.split(",") if r] for text in (args.adamw_lrs, args.muon_lrs)
    )
    args.vocab = args.vocab or (256 if args.data is None else None)
    if gaps and args.task == "gpt:10x512":  # as in bench/convergence.py
        args.batch, args.context = args.batch or 32, args.context or 256
    given = {name: getattr(args, name) for name in ("data", "batch", "context", "vocab")}
    args.options = {name: value for name, value in given.items() if value is not None}
    name = f"muon-{args.part}-{args.task.replace(':', '-')}.json"
    args.out = args.out or Path(os.environ.get("OUT", ".")) / name
    return args


def main() -> None:
    """Read the arguments, check them by making the task, and run one part."""
    args = read_arguments()
    from narrowgauge import tasks

    device = hardware.detect(args.device)
    try:
        task = tasks.find(args.task, seed=0, **args.options)
        for recipe in args.recipes if args.part == "gaps" else [args.recipe]:
            parse(recipe, device)
        task.batch(0, "train"), task.batch(0, "eval")  # encodes text once, before several processes need it
    except UsageError as error:
        sys.exit(str(error))
    args.lr = args.lr or task.learning_rate
    several = 2 * len(args.recipes) if args.part == "gaps" else 1
    args.processes = args.processes or (several if device.kind == "cuda" else 1)
    runs = Runs(args, device)
    runs.write()
    (compare_recipes if args.part == "gaps" else count_steps)(runs)
    runs.data["seconds"] = time.monotonic() - runs.start
    runs.write()
    print(f"{runs.data['seconds']:.0f} of {args.seconds:.0f} s; written to {args.out}", flush=True)


if __name__ == "__main__":
    main()
