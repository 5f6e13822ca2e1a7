"""The error of gradients that all batches share: what rounding adds to training besides noise.

usage: python bench/gradient_bias.py RUN... [--task gpt2-124m] [--data FOLDER] [--steps 700] [--batches 64]
                                     [--reference bf16] [--vocab N] [--batch N] [--context N] [--device cpu]
(JSON to $OUT/gradient-bias.json where OUT is set)

Trains the reference for STEPS steps, at the task's learning rate after a warm-up. Then computes the gradients of
BATCHES other batches with these weights in the reference and in each RUN: a recipe, or one of bench/loss_gap.py with
products in BF16. Their FP8 scales have seen a few batches before. With D the difference of a batch's gradients and G
its gradient in the reference, both averaged over half of the batches, a and b:

    shared    sqrt(Da Db / Ga Gb): the part of D that is the same in all batches, relative to what they agree on.
              Products of two halves, because noise that differs by batch is not in them
    along     (Da Gb + Db Ga) / 2 Ga Gb: how much longer the gradient is on average
    batch     |D| / |G| of the first batch, noise included
    agreed    how long the part of G that all batches agree on is, relative to G of the first batch

for each group of parameters: their names, with * for numbers. Noise averages out over steps, what is shared does not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).parent))
from loss_gap import changed_formats, parse_run

from narrowgauge import Engine, UsageError, hardware, tasks

WARM = 4
"""Batches before gradients are compared, from which scales are taken."""
COLUMNS = ("shared", "along", "batch", "agreed")
Sums = dict[str, list[Tensor]]


class Comparison:
    """A task at one place of its training, and gradients there."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, hardware.detect(args.device).torch_device
        given = {name: getattr(args, name) for name in ("data", "vocab", "batch", "context")}
        self.task = tasks.find(args.task, seed=0, **{name: value for name, value in given.items() if value is not None})
        self.weights: dict[str, Tensor] = {}

    def read_batches(self, first: int, count: int) -> Iterator[Any]:
        for index in range(first, first + count):
            yield tree_map_only(Tensor, lambda tensor: tensor.to(self.device), self.task.batch(index, "train"))

    def build(self, text: str, rate: float) -> Engine:
        recipe, changes = parse_run(text)
        torch.manual_seed(0)
        with torch.device(self.device):
            model = self.task.model()
        if self.weights:
            model.load_state_dict(self.weights)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1 if rate else 0.0)
        with changed_formats(changes):
            return Engine(model, optimizer, recipe, clip_norm=1.0)

    def run_backward(self, engine: Engine, batch: Any) -> Tensor:
        with engine.forward():
            loss = self.task.loss(engine.model, batch)
        engine.backward(loss)
        return loss.detach()

    def train(self) -> None:
        """Set the weights to those after some steps."""
        engine = self.build(self.args.reference, self.task.learning_rate)
        (group,) = engine.optimizers[0].param_groups
        for step, batch in enumerate(self.read_batches(0, self.args.steps)):
            group["lr"] = self.task.learning_rate * min(1.0, (step + 1) / 100)
            loss = self.run_backward(engine, batch)
            engine.step()
            if step % 100 == 99 or step == self.args.steps - 1:
                print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
        self.weights = {name: tensor.detach().clone() for name, tensor in engine.model.state_dict().items()}

    def collect(self, text: str) -> tuple[Sums, dict[str, Tensor]]:
        """Return sums of gradients over both halves of the batches, and the gradients of the first one."""
        engine = self.build(text, 0.0)
        sums: Sums = {}
        first: dict[str, Tensor] = {}
        for index, batch in enumerate(self.read_batches(self.args.steps, WARM + self.args.batches)):
            loss = self.run_backward(engine, batch)
            if index >= WARM:
                for name, parameter in named_gradients(engine.model):
                    if index == WARM:
                        first[name] = parameter.clone()
                        sums[name] = [torch.zeros_like(parameter) for _ in range(2)]
                    sums[name][index % 2] += parameter
            engine.step()
        print(f"{text}: loss {loss.item():.4f}", flush=True)
        return sums, first


def named_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad.float()


def compare(
    found: tuple[Sums, dict[str, Tensor]], wanted: tuple[Sums, dict[str, Tensor]], half: int
) -> dict[str, dict[str, float]]:
    """Return the errors for each group of parameters, and for all together."""
    totals: dict[str, list[float]] = {}
    for name, (ga, gb) in wanted[0].items():
        da, db = (one - other for one, other in zip(found[0][name], (ga, gb), strict=True))
        difference = found[1][name] - wanted[1][name]
        products = [(da, db), (ga, gb), (da, gb), (db, ga), (difference, difference), (wanted[1][name],) * 2]
        values = [float((one.double() * other.double()).sum()) for one, other in products]
        for group in (re.sub(r"\d+", "*", name), "all"):
            totals[group] = [a + b for a, b in zip(totals.get(group, [0.0] * 6), values, strict=True)]
    errors = {}
    for group, (shared, signal, one, other, noise, size) in totals.items():
        scale = max(signal, 1e-300)
        errors[group] = {
            "shared": math.copysign(math.sqrt(abs(shared) / scale), shared),
            "along": (one + other) / 2 / scale,
            "batch": math.sqrt(noise / max(size, 1e-300)),
            "agreed": math.sqrt(max(signal, 0.0) / max(size, 1e-300)) / half,
        }
    return errors


def print_errors(name: str, errors: dict[str, dict[str, float]]) -> None:
    print(f"{name:50} " + " ".join(f"{column:>8}" for column in COLUMNS))
    for group, error in errors.items():
        print(f"  {group:48} " + " ".join(f"{error[column]:8.2%}" for column in COLUMNS), flush=True)


def make_parser(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", default="gpt2-124m")
    add("--data")
    add("--steps", type=int, default=700)
    add("--batches", type=int, default=64)
    add("--reference", default="bf16")
    for name in ("--vocab", "--batch", "--context"):
        add(name, type=int)
    add("--device")
    return parser


def check(args: argparse.Namespace) -> None:
    if args.batches < 2 or args.batches % 2 or args.steps < 1:
        raise UsageError("give an even number of batches, and a step or more")
    parse_run(args.reference)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    args = parser.parse_args()
    results: dict[str, Any] = {"task": args.task, "steps": args.steps, "batches": args.batches, "runs": {}}
    try:
        check(args)
        for text in args.runs:
            parse_run(text)
        comparison = Comparison(args)
        comparison.train()
        wanted = comparison.collect(args.reference)
        for text in args.runs:
            errors = compare(comparison.collect(text), wanted, args.batches // 2)
            results["runs"][text] = errors
            print_errors(text, errors)
            if os.environ.get("OUT"):
                Path(os.environ["OUT"], "gradient-bias.json").write_text(json.dumps(results, indent=1))
    except (UsageError, OSError, ValueError) as error:
        print(f"gradient_bias: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
