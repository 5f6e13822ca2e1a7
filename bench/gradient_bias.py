"""Errors of FP8's gradients that do not average out: their bias beside the gradient that all batches agree on.

usage: python bench/gradient_bias.py RUN... [--data FOLDER] [--task gpt2-124m] [--steps 900] [--of 1526] [--batches 32]
                                     [--batch ROWS] [--vocab N] [--reference bf16] [--device cpu]
(JSON to $OUT/gradient-bias.json where OUT is set)

A model is trained for STEPS of a schedule OF steps in the reference. Then its gradients are computed on the same
batches in the reference and in each RUN, without changing the weights. A RUN is what bench/loss_gap.py says, or
"rounded weights": the reference with the matrices of blocks and head rounded to E4M3. With g the gradient of a batch
and d its error, sums over pairs of different batches are free of noise:

    gradient^2 = mean of g_i g_j        what batches agree on
    bias^2     = mean of d_i d_j        what is wrong in the same way in all batches
    along      = mean of d_i g_j / gradient^2
    noise      = |d| / |g| of one batch

Noise is small beside what tells one batch from another. A bias, relative to the gradient, changes where training goes.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from loss_gap import changed_formats, parse_run
from torch import Tensor, nn

from narrowgauge import Engine, Task, UsageError, hardware, tasks
from narrowgauge.kernels import compute_scale
from narrowgauge.kernels.fp8_formats import FP8_MAX
from narrowgauge.nn.products.gemm import E4M3
from narrowgauge.nn.speed_advice import no_speed_warnings
from narrowgauge.runs.batches import make_batch, to_device
from narrowgauge.runs.schedule import Schedule

ROUNDED = "rounded weights"
WARM_UP = 2
"""Batches after which the scales of FP8 are known."""


def round_weights(model: nn.Module) -> nn.Module:
    """Round the matrices of linear layers as FP8 products do, with one scale each."""
    with torch.no_grad():
        for weight in {part.weight for part in model.modules() if isinstance(part, nn.Linear)}:
            scale = compute_scale(weight.abs().max(), FP8_MAX[E4M3])
            weight.copy_((weight * scale).to(E4M3).to(weight.dtype) / scale)
    return model


def make_engine(model: nn.Module, text: str, learning_rate: float) -> Engine:
    recipe, changes = parse_run(text)
    fused = next(model.parameters()).is_cuda
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1 if learning_rate else 0.0, fused=fused
    )
    with changed_formats(changes), no_speed_warnings():
        return Engine(model, optimizer, recipe, clip_norm=1.0 if learning_rate else None)


def run_backward(engine: Engine, task: Task, number: int) -> float:
    batch = to_device(make_batch(task, number, "train", "here"), engine.device)
    with engine.forward():
        loss = task.loss(engine.inner, batch)
    engine.backward(loss)
    return loss.item()


def get_group(name: str) -> str:
    """Return the kind of a parameter: its name without the number of its block."""
    return re.sub(r"\d+", "N", name)


class Sums:
    """Sums over batches, for each parameter, from which the noise is removed."""

    def __init__(self) -> None:
        self.count = 0
        self.total_g: dict[str, Tensor] = {}
        self.total_d: dict[str, Tensor] = {}
        self.squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    def add(self, exact: dict[str, Tensor], found: dict[str, Tensor]) -> None:
        self.count += 1
        for name, g in exact.items():
            g = g.double() if g.numel() < 1 << 16 else g.float()
            d = found[name].to(g.dtype) - g
            self.total_g[name] = self.total_g[name] + g if name in self.total_g else g.clone()
            self.total_d[name] = self.total_d[name] + d if name in self.total_d else d
            for place, value in enumerate(((g * g).sum(), (d * d).sum(), (d * g).sum())):
                self.squares[name][place] += float(value)

    def read(self) -> dict[str, dict[str, float]]:
        """Return gradient, bias, along and noise of each group of parameters."""
        groups: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
        pairs = self.count * (self.count - 1)
        for name, g in self.total_g.items():
            d, (gg, dd, dg) = self.total_d[name], self.squares[name]
            parts = (
                (float((g * g).sum()) - gg) / pairs,
                (float((d * d).sum()) - dd) / pairs,
                (float((d * g).sum()) - dg) / pairs,
                gg,
                dd,
            )
            for group in (get_group(name), "all"):
                groups[group] = [a + b for a, b in zip(groups[group], parts, strict=True)]
        return {
            group: {
                "gradient": math.sqrt(max(g, 0.0)),
                "bias": math.sqrt(max(d, 0.0) / g) if g > 0 else math.nan,
                "along": along / g if g > 0 else math.nan,
                "noise": math.sqrt(dd / gg) if gg else 0.0,
            }
            for group, (g, d, along, gg, dd) in groups.items()
        }


def train(args: argparse.Namespace, task: Task, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with device:
        model = task.model().to(device)
    engine = make_engine(model, args.reference, task.learning_rate)
    schedule = Schedule(engine.optimizers, args.of, max(1, min(100, args.of // 10)))
    for step in range(args.steps):
        schedule.set(step)
        loss = run_backward(engine, task, step)
        engine.step()
        if step % 100 == 99:
            print(f"  step {step + 1}: loss {loss:.4f}", flush=True)
    engine.detach()
    return model


def measure(args: argparse.Namespace, task: Task, model: nn.Module, text: str) -> dict[str, dict[str, float]]:
    other = copy.deepcopy(model)
    found = (round_weights(other), args.reference) if text == ROUNDED else (other, text)
    engines = [make_engine(copy.deepcopy(model), args.reference, 0.0), make_engine(*found, 0.0)]
    sums = Sums()
    for number in range(WARM_UP + args.batches):
        gradients = []
        for engine in engines:
            run_backward(engine, task, args.steps + number)
            gradients.append({name: p.grad for name, p in engine.inner.named_parameters() if p.grad is not None})
        if number >= WARM_UP:
            sums.add(*gradients)
        for engine in engines:
            engine.step()  # moves scales; the learning rate is 0
    return sums.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN")
    add("--data")
    add("--task", default="gpt2-124m")
    add("--steps", type=int, default=900)
    add("--of", type=int, default=1526)
    add("--batches", type=int, default=32)
    add("--batch", type=int)
    add("--vocab", type=int)
    add("--reference", default="bf16")
    add("--device")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    try:
        for text in (args.reference, *args.runs):
            if text != ROUNDED:
                parse_run(text)
        options = {
            name: value for name, value in (("data", args.data), ("batch", args.batch), ("vocab", args.vocab)) if value
        }
        task = tasks.find(args.task, seed=0, **options)
        device = torch.device(hardware.detect(args.device).torch_device)
        model = train(args, task, device)
        for text in args.runs:
            results[text] = measure(args, task, model, text)
            print(f"{text}\n  {'parameters':28} {'gradient':>10} {'bias':>8} {'along':>9} {'noise':>8}")
            for group, found in sorted(results[text].items(), key=lambda item: -item[1]["gradient"]):
                if found["gradient"] > 0:
                    numbers = f"{found['bias']:8.2%} {found['along']:+9.2%} {found['noise']:8.2%}"
                    print(f"  {group:28} {found['gradient']:10.3g} {numbers}", flush=True)
    except (UsageError, OSError) as error:
        print(f"gradient_bias: {error}", file=sys.stderr)
        return 2
    if "OUT" in os.environ:
        about = {name: value for name, value in vars(args).items() if name not in ("runs", "data")}
        path = Path(os.environ["OUT"]) / "gradient-bias.json"
        path.write_text(json.dumps({"about": about, "runs": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
