"""Which part of FP8 costs loss: the same training with one part of it in BF16, against BF16 with the same seed.

usage: python bench/loss_gap.py FILE.json SECONDS [--data FOLDER] [--task gpt2-124m] [--steps 800] [--batch 32]
                                [--seeds 2] [--only NAME,...] [--device cpu]

FOLDER has train.bin and eval.bin (bench/corpus/read_corpus.py). Each run goes through the decay of the learning rate
and is evaluated in its own formats and in BF16. Every finished run is written to FILE.json at once; a run that would
not end within SECONDS is not started, and the same command continues. Gaps to BF16 are printed at the end.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from narrowgauge import Engine, Task, hardware, tasks
from narrowgauge.nn import convert
from narrowgauge.nn.products.gemm import ALL_BF16
from narrowgauge.nn.speed_advice import no_speed_warnings
from narrowgauge.nn.survey import Layer, survey_layers
from narrowgauge.runs.batches import make_batch, to_device
from narrowgauge.runs.schedule import Schedule

EVALUATIONS = 16
"""Batches of an evaluation."""
Change = Callable[[Layer], dict[str, str]]


def in_blocks(**formats: str) -> Change:
    return lambda layer: formats if layer.part_of == "block" else {}


def in_ends(layer: Layer) -> dict[str, str]:
    return {"output": "bf16"} if layer.path.startswith(("blocks.0.", "blocks.11.")) else {}


GRADIENTS = {"grad_input": "bf16", "grad_weight": "bf16"}
PARTS: dict[str, tuple[str, Change]] = {
    "fp8": ("fp8", lambda layer: {}),
    "gradients in E4M3": ("fp8[gradients_format=e4m3]", lambda layer: {}),
    "gradients in BF16": ("fp8", lambda layer: GRADIENTS),
    "outputs in BF16": ("fp8", lambda layer: {"output": "bf16"}),
    "head in BF16": ("fp8", lambda layer: ALL_BF16._asdict() if layer.part_of == "head" else {}),
    "first and last block's outputs in BF16": ("fp8", in_ends),
    "activations kept in BF16": ("fp8[activations=bf16]", lambda layer: {}),
    "outputs of blocks in BF16": ("fp8", in_blocks(output="bf16")),
    "weight gradients in BF16": ("fp8", lambda layer: {"grad_weight": "bf16"}),
    "input gradients in BF16": ("fp8", lambda layer: {"grad_input": "bf16"}),
    "current scales": ("fp8[scaling=current]", lambda layer: {}),
}
"""What is trained, with the recipe and the formats that differ from it."""
LAST = {"last 20% of steps in BF16": 0.8, "last 10% of steps in BF16": 0.9, "last 5% of steps in BF16": 0.95}
"""Continuations of fp8 in BF16, by the share of steps before."""


class Training:
    """One training run."""

    def __init__(self, task: Task, seed: int, device: torch.device, steps: int, recipe: str, change: Change) -> None:
        self.task, self.steps, self.done = task, steps, 0
        torch.manual_seed(seed)
        with device:
            self.model = task.model().to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.learning_rate, betas=(0.9, 0.95), weight_decay=0.1,
            fused=device.type == "cuda",
        )  # fmt: skip
        self.schedule = Schedule([self.optimizer], steps, max(1, steps // 10))
        with changed_formats(change), no_speed_warnings():
            self.engine = Engine(self.model, self.optimizer, recipe, clip_norm=1.0)

    def run(self, until: int) -> None:
        while self.done < until:
            self.schedule.set(self.done)
            batch = to_device(make_batch(self.task, self.done, "train", "here"), self.engine.device)
            with self.engine.forward():
                loss = self.task.loss(self.model, batch)
            self.engine.backward(loss)
            self.engine.step()
            self.done += 1

    def continue_in(self, recipe: str) -> Training:
        """Return the same training in another recipe, from the step that this one is at."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        groups = self.optimizer.param_groups
        other.optimizer = torch.optim.AdamW(
            other.model.parameters(), lr=self.task.learning_rate, betas=groups[0]["betas"],
            weight_decay=groups[0]["weight_decay"], fused=groups[0]["fused"],
        )  # fmt: skip
        other.schedule = Schedule([other.optimizer], self.steps, max(1, self.steps // 10))
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        with no_speed_warnings():
            other.engine = Engine(other.model, other.optimizer, recipe, clip_norm=1.0)
        return other

    @torch.no_grad()
    def evaluate(self, as_trained: bool) -> float:
        """Return the loss, as in training or, as evaluations are, in BF16."""
        engine = self.engine
        self.model.eval()
        with engine.forward() if as_trained else engine.evaluating():
            batches = (make_batch(self.task, n, "eval", "here") for n in range(EVALUATIONS))
            loss = statistics.mean(float(self.task.loss(self.model, to_device(b, engine.device))) for b in batches)
        self.model.train()
        return loss


def changed_formats(change: Change) -> Any:
    """Context manager in which conversions choose other formats."""

    def survey(*args: Any, **kwargs: Any) -> Iterator[Layer]:
        for layer in survey_layers(*args, **kwargs):
            other = change(layer)
            yield dataclasses.replace(layer, choice=layer.choice._replace(**other)) if other else layer

    return mock.patch.object(convert, "survey_layers", survey)


class Runs:
    """The runs of a file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.monotonic()
        self.device = torch.device(hardware.detect(args.device).torch_device)
        found = hardware.detect(args.device).name
        about = {"task": args.task, "steps": args.steps, "batch": args.batch, "device": found}
        self.data: dict[str, Any] = {"about": about, "runs": []}
        if args.file.exists():
            self.data = json.loads(args.file.read_text())

    def has(self, name: str, seed: int) -> bool:
        return any((run["name"], run["seed"]) == (name, seed) for run in self.data["runs"])

    def add(self, name: str, seed: int, training: Training, seconds: float) -> None:
        own, alone = training.evaluate(as_trained=True), training.evaluate(as_trained=False)
        run = {"name": name, "seed": seed, "loss": own, "weights": alone, "seconds": seconds}
        self.data["runs"].append(run)
        self.args.file.write_text(json.dumps(self.data, indent=1))
        print(f"seed {seed}, {name}: {own:.4f}, weights in BF16 {alone:.4f}, {seconds:.0f} s", flush=True)

    def train(self, name: str, seed: int) -> None:
        options = {"data": self.args.data} if self.args.data else {}
        task = tasks.find(self.args.task, seed=seed, batch=self.args.batch, **options)
        recipe, change = PARTS.get(name, ("bf16", lambda layer: {}))
        start, steps = time.monotonic(), self.args.steps
        training = Training(task, seed, self.device, steps, recipe, change)
        if name == "fp8" and seed == 0:
            print(training.engine.conversion, flush=True)
        for branch, share in LAST.items() if name == "fp8" else ():
            training.run(round(share * steps))
            if not self.wants(branch) or self.has(branch, seed):
                continue
            began = time.monotonic()
            other = training.continue_in("bf16")
            other.run(steps)
            self.add(branch, seed, other, time.monotonic() - began)
        training.run(steps)
        self.add(name, seed, training, time.monotonic() - start)

    def wants(self, name: str) -> bool:
        return not self.args.only or name in self.args.only.split(",")

    def run(self) -> None:
        for seed in range(self.args.seeds):
            for name in ("bf16", *PARTS):
                if self.has(name, seed) or not self.wants(name):
                    continue
                longest = max((run["seconds"] for run in self.data["runs"]), default=0.0)
                if time.monotonic() - self.begin + longest > self.args.seconds:
                    print("no time for the next run")
                    return
                self.train(name, seed)

    def compare(self) -> None:
        losses = {(run["name"], run["seed"]): run for run in self.data["runs"]}
        for name in ("fp8", *LAST, *list(PARTS)[1:]):
            seeds = [seed for seed in range(self.args.seeds) if {(name, seed), ("bf16", seed)} <= losses.keys()]
            for which in ("loss", "weights"):
                gaps = [losses[name, seed][which] / losses["bf16", seed]["loss"] - 1 for seed in seeds]
                if gaps:
                    each = ", ".join(f"{gap:+.2%}" for gap in gaps)
                    print(f"{name:42} {which:8} {statistics.mean(gaps):+.3%} ({each})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", type=Path)
    add("seconds", type=float)
    add("--data")
    add("--task", default="gpt2-124m")
    add("--steps", type=int, default=800)
    add("--batch", type=int, default=32)
    add("--seeds", type=int, default=2)
    add("--only", default="")
    add("--device")
    runs = Runs(parser.parse_args())
    runs.run()
    runs.compare()


if __name__ == "__main__":
    main()
