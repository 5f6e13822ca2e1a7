"""Times a causal attention forward in FP8 beside cuDNN's and FlashAttention's in BF16, at long sequences.

usage: python bench/attention_fp8.py [TOKENS ...]      (default 8192 16384 65536; JSON to $OUT/attention-fp8.json)

The FP8 kernel is the usual one: queries, keys and values in E4M3 with a scale for each tensor, values transposed (the
tensor cores read FP8 only along the summed dimension), scores and sums in FP32, weights of a tile in E4M3 times 256. It
shows what could be gained in forward. The times of casts and of the transpose are listed apart. Backward needs
BF16 or FP32 gradients of queries and keys, and stays as it is.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

HEADS, SIZE = 32, 128
E4M3 = torch.float8_e4m3fn
CHOICES = [(128, 128, 8, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 128, 4, 3), (128, 64, 4, 3)]
"""Rows of queries and of keys in a tile, warps, and stages of loads."""


@triton.jit
def attention_kernel(q_desc, k_desc, vt_desc, out_ptr, length, by_log2, by_value, M: tl.constexpr, N: tl.constexpr,
                     D: tl.constexpr):  # fmt: skip
    """One tile of queries: softmax(q k' / sqrt(D)) v with a running maximum. ``by_log2`` includes the scales."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1)
    first = head * length
    q = q_desc.load([first + tile * M, 0])
    rows = tile * M + tl.arange(0, M)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for n in tl.range(0, (tile + 1) * M, N):
        k = k_desc.load([first + n, 0])
        scores = tl.dot(q, k.T) * by_log2
        if n + N > tile * M:
            scores = tl.where(rows[:, None] >= n + tl.arange(0, N)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        change = tl.exp2(top - higher)
        total = total * change + tl.sum(p, 1)
        vt = vt_desc.load([head * D, n])
        acc = tl.dot((p * 256.0).to(tl.float8e4nv), vt.T, acc * change[:, None])
        top = higher
    out = acc * (by_value / 256.0) / total[:, None]
    place = (first + rows).to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out_ptr + place, out.to(tl.bfloat16))


def cast(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    scale = 448.0 / float(x.abs().max())
    return (x.float() * scale).to(E4M3), 1.0 / scale


def attend_fp8(q: Any, k: Any, vt: Any, by: tuple[float, float], out: torch.Tensor, choice: Any) -> None:
    """q and k are [B H, T, D] in E4M3, vt is [B H, D, T]."""
    (heads, length, size), (m, n, warps, stages) = q.shape, choice
    flat = [TensorDescriptor.from_tensor(one.view(-1, size), [rows, size]) for one, rows in ((q, m), (k, n))]
    values = TensorDescriptor.from_tensor(vt.view(-1, length), [size, n])
    attention_kernel[(length // m, heads)](
        *flat, values, out, length, by[0] * size**-0.5 * 1.4426950408889634, by[1], m, n, size, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip


def measure(work: Any) -> float:
    return float(triton.testing.do_bench(work, warmup=50, rep=300, return_mode="median"))


def main() -> None:
    results = {}
    for length in [int(word) for word in sys.argv[1:]] or [8192, 16384, 65536]:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, HEADS, length, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        flops = 2.0 * HEADS * length**2 * SIZE  # causal: half of 4 T T D
        row: dict[str, float] = {}
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            with sdpa_kernel(backend):
                wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                row[name] = measure(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True))
                ins = [x.clone().requires_grad_() for x in (q, k, v)]
                made = F.scaled_dot_product_attention(*ins, is_causal=True)
                backward = partial(torch.autograd.grad, made, ins, wanted, retain_graph=True)
                row[f"{name} backward"] = measure(backward)
        (q8, by_q), (k8, by_k), (v8, by_v) = (cast(x.squeeze(0)) for x in (q, k, v))
        row["transpose of values"] = measure(v8.transpose(1, 2).contiguous)
        vt8, out = v8.transpose(1, 2).contiguous(), torch.empty_like(q)
        for choice in CHOICES:
            try:
                work = partial(attend_fp8, q8, k8, vt8, (by_q * by_k, by_v), out, choice)
                work()
                row[f"fp8 {choice}"] = measure(work)
            except Exception as error:
                print(f"{choice}: {type(error).__name__} {str(error)[:200]}", flush=True)
        error = (out.float() - wanted.float()).square().mean()
        row["fp8 decibels"] = float(10 * torch.log10(wanted.float().square().mean() / error))
        results[str(length)] = row
        print(length, {name: round(value, 3) for name, value in row.items()}, flush=True)
        best = min(value for name, value in row.items() if name.startswith("fp8 ("))
        rates = f"cuDNN {flops / row['cudnn'] * 1e-9:.0f} TFLOP/s, FP8 {flops / best * 1e-9:.0f}"
        print(f"  forward: {rates}: {row['cudnn'] / best:.2f}x", flush=True)
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "attention-fp8.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
