"""Times each product of a GPT's step with torch and with narrowgauge's choice of algorithm, in turns (needs a GPU).

usage: python bench/products.py [TASK...]   (gpt2-124m and gpt:8x4096; JSON to $OUT/products.json where OUT is set)
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from narrowgauge import tasks
from narrowgauge.kernels import cublas
from narrowgauge.nn.fused.head import choose_chunk_rows
from narrowgauge.nn.products.gemm import BF16, E4M3, E5M2, FAST_DEPTH, multiply_bf16, multiply_fp8

ROUNDS = 5
rows: list[dict[str, Any]] = []


def report(name: str, times: int, ours: Callable[[], Tensor], by_torch: Callable[[], Tensor]) -> None:
    ours()  # the first call chooses the algorithm
    turns = [[cublas._measure_ms(run, 6) for run in (by_torch, ours)] for _ in range(ROUNDS)]
    theirs_ms, ours_ms = (median(turn[index] for turn in turns) for index in (0, 1))
    rows.append({"product": name, "times": times, "torch_ms": theirs_ms, "ours_ms": ours_ms})
    print(
        f"{name:44s} x {times:3d}  torch {theirs_ms:.4f} ms  ours {ours_ms:.4f} ms  {theirs_ms / ours_ms:.3f} x",
        flush=True,
    )


def in_bf16(name: str, times: int, n: int, inputs: int, outputs: int) -> None:
    x, g, w = (torch.randn(*size, device="cuda", dtype=BF16) for size in ((n, inputs), (n, outputs), (outputs, inputs)))
    wide = torch.float32
    report(f"{name} output bf16", times, lambda: multiply_bf16(x, w.t()), lambda: torch.mm(x, w.t()))
    report(f"{name} grad_input bf16", times, lambda: multiply_bf16(g, w), lambda: torch.mm(g, w))
    report(
        f"{name} grad_weight bf16", times,
        lambda: multiply_bf16(g.t(), x, wide), lambda: torch.mm(g.t(), x, out_dtype=wide),
    )  # fmt: skip


def in_fp8(name: str, times: int, n: int, inputs: int, outputs: int, of_gradients: torch.dtype) -> None:
    one = torch.ones((), device="cuda")
    for product, (m, width, depth), kind, out, fast in (
        ("output", (n, outputs, inputs), E4M3, BF16, True),
        ("grad_input", (n, inputs, outputs), of_gradients, BF16, outputs <= FAST_DEPTH),
        ("grad_input, the other sum", (n, inputs, outputs), of_gradients, BF16, outputs > FAST_DEPTH),
        ("grad_weight", (outputs, inputs, n), of_gradients, torch.float32, False),
    ):
        a = torch.randn(m, depth, device="cuda", dtype=BF16).to(kind)
        b = torch.randn(width, depth, device="cuda", dtype=BF16).to(E4M3)

        def ours(a: Tensor = a, b: Tensor = b, out: torch.dtype = out, fast: bool = fast) -> Tensor:
            return multiply_fp8(a, b, one, one, out, fast)

        def by_torch(a: Tensor = a, b: Tensor = b, out: torch.dtype = out, fast: bool = fast) -> Tensor:
            return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=out, use_fast_accum=fast)

        report(f"{name} {product} fp8", times, ours, by_torch)


for spec in sys.argv[1:] or ("gpt2-124m", "gpt:8x4096"):
    facts = tasks.find(spec).facts
    n, d, layers, words = facts["batch"] * facts["context"], facts["width"], facts["layers"], facts["padded_vocab"]
    chunk = choose_chunk_rows(n, words)
    for name, inputs, outputs in (("qkv", d, 3 * d), ("out", d, d), ("up", d, 4 * d), ("down", 4 * d, d)):
        in_bf16(f"{spec} {name}", layers, n, inputs, outputs)
        in_fp8(f"{spec} {name}", layers, n, inputs, outputs, E5M2)
    in_bf16(f"{spec} head", -(-n // chunk), chunk, d, words)
    in_fp8(f"{spec} head", -(-n // chunk), chunk, d, words, E4M3)
    for kind in ("bf16", "fp8"):
        own = [
            row for row in rows if spec in row["product"] and kind in row["product"] and "other" not in row["product"]
        ]
        theirs, ours_ = (sum(row["times"] * row[key] for row in own) for key in ("torch_ms", "ours_ms"))
        print(f"{spec} {kind}: torch {theirs:.2f} ms per step, ours {ours_:.2f} ms, {theirs / ours_:.3f} x", flush=True)
if "OUT" in os.environ:
    Path(os.environ["OUT"], "products.json").write_text(json.dumps(rows, indent=1))
