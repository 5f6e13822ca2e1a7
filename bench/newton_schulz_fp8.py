"""Would Newton-Schulz converge in FP8? Singular values after five steps, and training, with operands rounded to E4M3.

usage: python bench/newton_schulz_fp8.py [STEPS] [TASK] [WIDTH]
       (default 300 gpt:4x128 256; 0 steps: no training; JSON to $OUT/newton-schulz-fp8.json where OUT is set)

The products are emulated: both operands of each are rounded to E4M3 with a scale from their largest value, one per
matrix or one per row along the sum, and multiplied in FP32. Sums are FP32 and results BF16, as a GPU's are. The variant
with a scale per row is also tried with its last two steps in BF16. Training is in FP32 but for these products.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from narrowgauge import tasks
from narrowgauge.optim import muon
from narrowgauge.optim.newton_schulz import COEFFICIENTS, EPS, STEPS
from narrowgauge.runs.settings import make_settings
from narrowgauge.runs.train import train

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
Orthogonalize = Callable[..., Tensor]


def to_e4m3(x: Tensor, rows: bool) -> Tensor:
    """Round to E4M3 with a current scale: of the whole matrix, or of each row along the last dimension."""
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True) if rows else x.abs().amax()
    scale = LARGEST / amax.clamp(min=1e-12)
    return (x * scale).to(E4M3).float() / scale


def make_way(rows: bool = False, bf16_steps: int = 0) -> Orthogonalize:
    """Return an orthogonalization whose products are in FP8, except in the last ``bf16_steps``: those are in BF16."""

    def run(matrix: Tensor, coefficients: Any = COEFFICIENTS, steps: int = STEPS, eps: float = EPS) -> Tensor:
        a, b, c = coefficients
        tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.to(torch.bfloat16)
        x = x.T if tall else x
        x = x / x.norm().clamp(min=eps)

        def multiply(left: Tensor, right: Tensor, step: int) -> Tensor:
            """left @ right.T: both operands are read along their rows, as FP8 products read them."""
            if step >= steps - bf16_steps:
                return left.float() @ right.float().T
            return to_e4m3(left, rows) @ to_e4m3(right, rows).T

        for step in range(steps):
            gram = multiply(x, x, step).bfloat16()
            inner = (b * gram.float() + c * multiply(gram, gram, step)).bfloat16()  # gram is symmetric
            x = (a * x.float() + multiply(inner, x.T, step)).bfloat16()
        return x.T if tall else x

    return run


WAYS: dict[str, Orthogonalize] = {
    "bf16": make_way(bf16_steps=STEPS),
    "fp8, a scale per matrix": make_way(),
    "fp8, a scale per row": make_way(rows=True),
    "fp8 per row, last two steps bf16": make_way(rows=True, bf16_steps=2),
}


def make_matrices(n: int) -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(0)
    yield "random, square", torch.randn(n, n)
    yield "random, 1 to 4", torch.randn(n, 4 * n)
    low = n // 12
    yield "low rank and 1% noise", torch.randn(n, low) @ torch.randn(low, n) + 0.01 * low**0.5 * torch.randn(n, n)
    left, right = (torch.linalg.qr(torch.randn(n, n))[0] for _ in range(2))
    yield "condition 1e3", left @ torch.logspace(0, -3, n).diag() @ right
    yield "condition 1e5", left @ torch.logspace(0, -5, n).diag() @ right


def measure(matrix: Tensor, result: Tensor) -> dict[str, float]:
    """Compare the result with the exact orthogonal factor, and with what the iteration gives in FP64."""
    u, _, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    along = (u.T @ result.double() @ vh.T).diagonal()  # what became of each singular vector
    values = torch.linalg.svdvals(result.double())
    a, b, c = COEFFICIENTS
    x = matrix.double() / matrix.double().norm()
    x = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    exact = x if matrix.shape[0] <= matrix.shape[1] else x.T
    return {
        "smallest": values.min().item(), "median": values.median().item(), "largest": values.max().item(),
        "along_singular_vectors": along.square().sum().item() / values.square().sum().item(),
        "error": ((result.double() - exact).norm() / exact.norm()).item(),
    }  # fmt: skip


def train_with(way: Orthogonalize, spec: str, steps: int, seed: int) -> float:
    task = tasks.find(spec, seed=seed)
    options = {"steps": steps, "seed": seed, "checkpoint_every": 0, "watch_every": 0, "log": "none"}
    settings = make_settings(task, recipe="fp32", device="cpu", optimizer="muon", **options)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(muon, "orthogonalize", way):
        result = train(task, settings, Path(folder) / "run")
    assert result.loss_eval is not None
    return result.loss_eval


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    spec = sys.argv[2] if len(sys.argv) > 2 else "gpt:4x128"
    width = int(sys.argv[3]) if len(sys.argv) > 3 else 256
    found: dict[str, Any] = {"matrices": {}, "training": {}}
    print(f"{'':22s} {'':33s} singular values: smallest, median, largest; share along the matrix's singular vectors;"
          " error against FP64")  # fmt: skip
    for name, matrix in make_matrices(width):
        for way, function in WAYS.items():
            own = measure(matrix, function(matrix))
            found["matrices"].setdefault(name, {})[way] = own
            print(f"{name:22s} {way:33s} {own['smallest']:7.4f} {own['median']:7.3f} {own['largest']:7.3f} "
                  f"{own['along_singular_vectors']:8.2%} {own['error']:8.2%}", flush=True)  # fmt: skip
    for seed in range(2) if steps else ():
        for way, function in WAYS.items():
            loss = train_with(function, spec, steps, seed)
            found["training"].setdefault(way, []).append(loss)
            base = found["training"]["bf16"][seed]
            print(f"{spec}, {steps} steps, seed {seed}, {way}: {loss:.4f} ({loss / base - 1:+.2%})", flush=True)
            if "OUT" in os.environ:
                path = Path(os.environ["OUT"]) / "newton-schulz-fp8.json"
                path.write_text(json.dumps({"task": spec, "steps": steps, "width": width, **found}, indent=1))


if __name__ == "__main__":
    main()
