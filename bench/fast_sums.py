"""Fast accumulation of FP8 products: what it loses by the number of terms, and what it saves in a step (needs a GPU).

usage: python bench/fast_sums.py [accuracy] [TASK...]    (default: accuracy gpt2-124m gpt:8x4096)
(JSON to $OUT/fast-sums.json where OUT is set)

Tensor cores add up with fewer bits than FP32, and cut off what does not fit. With ``fast``, the whole sum stays there;
without, partial sums of 128 terms are added in FP32. Operands of the comparison:

    random      normal numbers of both signs: sums grow with the root of the number of terms
    one-sided   absolute values: sums grow with the number of terms, the worst case
    tokens      gradients whose size differs by token (log-normal), inputs with a mean: as in training

For each, the SQNR of the result relative to the exact product of the same FP8 numbers, with and without ``fast``, the
slope of the result over the exact one (below 1, sums come out too small), and the mean error relative to the root mean
square of the results, with its standard error: an error of one sign would add up over tokens. FP8's own rounding has 20
to 25 dB.

Steps: engines take turns in one process, with fast accumulation of grad_input up to 8,192 terms (the default), of all
products up to 16,384 terms, and of all products.
"""

import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge import Engine, bench, hardware, tasks
from narrowgauge.nn.products import gemm

ROUNDS, STEPS = 5, 6
DEPTHS = (768, 2048, 8192, 16384, 32768, 65536)
LIMITS = {"grad_input up to 8,192": 0, "all up to 16,384": 16384, "all": 1 << 40}
results: dict[str, Any] = {"accuracy": [], "steps": {}}


def draw(kind: str, rows: int, depth: int, gradient: bool) -> Tensor:
    """Return FP32 numbers whose largest is 1, as a scaled FP8 operand has."""
    x = torch.randn(rows, depth, device="cuda")
    if kind == "one-sided":
        x = x.abs()
    elif kind == "tokens":
        x = (
            x * torch.randn(depth, device="cuda").mul(1.5).exp()
            if gradient
            else x + torch.randn(rows, 1, device="cuda")
        )
    return x / x.abs().max()


def compare_sums(kind: str, depth: int) -> None:
    """Print the errors of both sums."""
    a = (draw(kind, 512, depth, True) * 57344).to(gemm.E5M2)
    b = (draw(kind, 512, depth, False) * 448).to(gemm.E4M3)
    one = torch.ones((), device="cuda")
    exact = a.double() @ b.double().t()
    row: dict[str, Any] = {"operands": kind, "terms": depth}
    for fast in (False, True):
        found = torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast
        ).double()
        error, size = found - exact, exact.square().mean().sqrt()
        noise = error.square().sum()
        name = "fast" if fast else "plain"
        row[f"{name}_db"] = float(10 * torch.log10(exact.square().sum() / noise))
        row[f"{name}_slope"] = float((found * exact).sum() / exact.square().sum())
        row[f"{name}_mean"] = float(error.mean() / size)
        row[f"{name}_mean_error"] = float(error.std() / error.numel() ** 0.5 / size)
    results["accuracy"].append(row)
    print(
        f"{kind:10s} {depth:6d} terms: plain {row['plain_db']:6.2f} dB, slope {row['plain_slope']:.5f}; "
        f"fast {row['fast_db']:6.2f} dB, slope {row['fast_slope']:.5f}, "
        f"mean error {row['fast_mean']:+.1e} ({row['fast_mean_error']:.0e})",
        flush=True,
    )


def race(spec: str) -> None:
    """Time steps with each limit, in turns."""
    device, task = hardware.detect(), tasks.find(spec)
    batches = bench.make_batches(task, device)
    plain = gemm.multiply_fp8
    steps = {}
    for name in LIMITS:
        torch.manual_seed(0)
        with torch.device(device.torch_device):
            model = task.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        steps[name] = bench.make_engine_step(task, Engine(model, optimizer, "fp8", clip_norm=1.0, fused=True))

    def multiply(
        limit: int, a: Tensor, b: Tensor, *others: Any, fast: bool = True, into: Tensor | None = None, **more: Any
    ) -> Tensor:
        return plain(a, b, *others, fast=fast or a.shape[1] <= limit, into=into, **more)

    times: dict[str, list[float]] = {name: [] for name in LIMITS}
    losses: dict[str, float] = {}
    for turn in range(ROUNDS + 1):
        for name, limit in LIMITS.items():
            gemm.multiply_fp8 = functools.partial(multiply, limit)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for index in range(STEPS):
                losses[name] = steps[name](batches[index % len(batches)])
            torch.cuda.synchronize()
            if turn:  # the first turn compiles kernels and chooses algorithms
                times[name].append((time.perf_counter() - begin) / STEPS * 1e3)
    gemm.multiply_fp8 = plain
    first = statistics.median(next(iter(times.values())))
    for name, found in times.items():
        ms = statistics.median(found)
        print(f"{spec} {name:24s} {ms:8.2f} ms  {first / ms:.4f}  loss {float(losses[name]):.4f}", flush=True)
    results["steps"][spec] = {name: {"ms": found, "loss": float(losses[name])} for name, found in times.items()}


def main() -> None:
    words = sys.argv[1:] or ["accuracy", "gpt2-124m", "gpt:8x4096"]
    for word in words:
        if word == "accuracy":
            for kind in ("random", "one-sided", "tokens"):
                for depth in DEPTHS:
                    compare_sums(kind, depth)
        else:
            race(word)
        if "OUT" in os.environ:
            (Path(os.environ["OUT"]) / "fast-sums.json").write_text(json.dumps(results, indent=1))


main()
