"""Where FP8's noise in gradients comes from: roundings of forward one by one, emulated in plain torch.

usage: python bench/rounding_noise.py [--task gpt2-124m] [--data FOLDER] [--after 300,700] [--vocab N] [--batch N]
                                      [--context N] [--reference bf16] [--device cpu]
(JSON to $OUT/rounding-noise.json where OUT is set)

Trains the reference as bench/gradient_bias.py does, and stops after each of these numbers of steps. There the operands
of some layers are rounded to E4M3 with the scale of the tensor and multiplied as FP32 numbers (TF32 on a GPU), and the
gradients of two batches of at most 32 rows are compared with those without rounding: |D|^2 / |G|^2, in units of 1e-4,
for all parameters and for groups of them. Backward multiplies what forward read, so that only forward's rounding is in
it. Roundings of independent operands add up, as long as they are small.

For tasks with the built-in GPT, whose blocks have layers qkv, out, up and down.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from gradient_bias import Comparison, make_parser, named_gradients
from rounding_bias import E4M3, round_to

from narrowgauge import UsageError
from narrowgauge.models.gpt import GPT

ROWS, BATCHES = 32, 2
Round = Callable[[Tensor], Tensor]
Grads = list[dict[str, Tensor]]


class Rule(NamedTuple):
    """What is rounded in the layers that a pattern names; the first rule that fits a layer counts."""

    layers: str
    x: Round | None = None
    weight: Round | None = None
    part: int | None = None
    """Of the layer's outputs only this third: 0 queries, 1 keys, 2 values."""


def to_e4m3(tensor: Tensor) -> Tensor:
    return round_to(tensor, E4M3)


def to_bits(bits: int) -> Round:
    """Return a rounding to so many mantissa bits, without limits of range."""

    def rounded(tensor: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(tensor.float())
        return torch.ldexp(torch.round(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent)

    return rounded


def around_mean(x: Tensor) -> Tensor:
    """Round what the rows do not have in common."""
    mean = x.reshape(-1, x.shape[-1]).mean(0)
    return to_e4m3(x - mean) + mean


def all_but_largest(count: int) -> Round:
    """Return a rounding that leaves out the columns with the largest sum of squares."""

    def rounded(x: Tensor) -> Tensor:
        largest = x.reshape(-1, x.shape[-1]).float().square().sum(0).topk(min(count, x.shape[-1])).indices
        made = to_e4m3(x)
        made[..., largest] = x[..., largest]
        return made

    return rounded


def list_variants(layers: int) -> dict[str, list[Rule]]:
    """Return what is rounded, by name."""
    qkv, both = "blocks.*.qkv", (to_e4m3, to_e4m3)
    none, rest = Rule(qkv), Rule("*", *both)
    variants = {"everything": [rest], "the head": [Rule("lm_head", *both)], "everything but qkv": [none, rest]}
    for name in ("qkv", "out", "up", "down"):
        variants[name] = [Rule(f"blocks.*.{name}", *both)]
        variants[f"{name}: inputs"] = [Rule(f"blocks.*.{name}", to_e4m3)]
        variants[f"{name}: weights"] = [Rule(f"blocks.*.{name}", None, to_e4m3)]
    for part, name in enumerate(("queries", "keys", "values")):
        variants[f"qkv: {name}"] = [Rule(qkv, *both, part)]
    for block in range(layers):
        variants[f"qkv of block {block}"] = [Rule(f"blocks.{block}.qkv", *both)]
        variants[f"block {block} but qkv"] = [Rule(f"blocks.{block}.qkv"), Rule(f"blocks.{block}.*", *both)]
    variants["qkv: inputs, without their mean"] = [Rule(qkv, around_mean)]
    for count in (8, 32, 64, 128):
        variants[f"qkv: inputs, all but the {count} largest columns"] = [Rule(qkv, all_but_largest(count))]
    for bits in (3, 4, 5):
        variants[f"qkv: {bits} mantissa bits"] = [Rule(qkv, to_bits(bits), to_bits(bits))]
    return variants


class ReadRounded(torch.autograd.Function):
    """A product of rounded operands, whose backward reads the same ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rule: Rule) -> Tensor:
        rounded_x = x if rule.x is None else rule.x(x)
        rounded_weight = weight if rule.weight is None else rule.weight(weight)
        if rule.part is None:
            ctx.save_for_backward(rounded_x, rounded_weight)
            return F.linear(rounded_x, rounded_weight)
        ctx.save_for_backward(x, weight)
        parts = list(F.linear(x, weight).chunk(3, -1))
        parts[rule.part] = F.linear(rounded_x, rounded_weight.chunk(3)[rule.part])
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1]), None


class Rounded(Comparison):
    """A task at one place of its training, and gradients there with some operands rounded."""

    def compute_gradients(self, rules: list[Rule]) -> Grads:
        with torch.device(self.device):
            model = self.task.model()
        model.load_state_dict(self.weights)
        for name, layer in model.named_modules():
            rule = next((rule for rule in rules if fnmatch.fnmatchcase(name, rule.layers)), None)
            if isinstance(layer, nn.Linear) and rule is not None:

                def forward(x: Tensor, own: nn.Linear = layer, how: Rule = rule) -> Tensor:
                    product: Tensor = ReadRounded.apply(x, own.weight, how)
                    return product

                layer.forward = forward  # type: ignore[method-assign]
        found = []
        for batch in self.read_batches(self.args.steps, BATCHES):
            self.task.loss(model, tuple(tensor[:ROWS] for tensor in batch)).backward()
            found.append({name: grad.clone() for name, grad in named_gradients(model)})
            model.zero_grad()
        return found

    def measure(self, layers: int) -> dict[str, dict[str, float]]:
        wanted, noise = self.compute_gradients([]), {}
        for name, rules in list_variants(layers).items():
            noise[name] = compare(self.compute_gradients(rules), wanted)
            groups = " ".join(f"{group} {value:.1f}" for group, value in noise[name].items() if group != "all")
            print(f"{name:48} {noise[name]['all']:8.2f}   {groups}", flush=True)
        return noise


def compare(found: Grads, wanted: Grads) -> dict[str, float]:
    """Return the energy of the difference, relative to that of the gradients, in units of 1e-4."""
    sums: dict[str, tuple[float, float]] = {}
    for one, other in zip(found, wanted, strict=True):
        for name, grad in other.items():
            noise = float((one[name] - grad).double().square().sum())
            size = float(grad.double().square().sum())
            for group in ("all", re.sub(r"blocks\.\d+\.", "", name)):
                before = sums.get(group, (0.0, 0.0))
                sums[group] = before[0] + noise, before[1] + size
    return {group: 1e4 * noise / max(size, 1e-300) for group, (noise, size) in sums.items()}


def parse_steps(text: str) -> list[int]:
    try:
        steps = [int(part) for part in text.split(",")]
    except ValueError:
        steps = [0]
    if min(steps) < 1:
        raise UsageError(f"--after {text}: expected numbers of steps, such as 300,700")
    return steps


def main() -> int:
    parser: argparse.ArgumentParser = make_parser(__doc__)
    parser.add_argument("--after", default="300,700")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    results: dict[str, Any] = {"task": args.task, "unit": 1e-4, "after": {}}
    try:
        for steps in parse_steps(args.after):
            args.steps = steps
            began, rounded = time.monotonic(), Rounded(args)
            with torch.device("meta"):
                model = rounded.task.model()
            if not isinstance(model, GPT):
                raise UsageError(f"--task {args.task}: expected a task with the built-in GPT")
            rounded.train()
            results["after"][steps] = rounded.measure(model.config.layers)
            print(f"after {steps} steps: {time.monotonic() - began:.0f} s")
            if os.environ.get("OUT"):
                Path(os.environ["OUT"], "rounding-noise.json").write_text(json.dumps(results, indent=1))
    except (UsageError, OSError, ValueError) as error:
        print(f"rounding_noise: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
