"""Bandwidth of each kernel (milliseconds, bytes, share of a copy's bandwidth), and times of GEMMs.

usage: python bench/kernel_times.py [WIDTH] [TOKENS]      (default 768 65536; on a GPU)

Each is timed as a CUDA graph, because a launch takes longer than a small kernel.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from narrowgauge.kernels import activation, cast, cross_entropy, embedding, norm
from narrowgauge.kernels.cast_weights import cast_weight, cast_weight_delayed
from narrowgauge.nn.products.choose_formats import timed
from narrowgauge.nn.products.gemm import BF16, E4M3, E5M2, multiply_bf16, multiply_fp8

D, N = (int(argument) for argument in (*sys.argv[1:], "768", "65536")[:2]) if len(sys.argv) > 2 else (768, 65536)
cuda = torch.device("cuda")
one, amax = torch.ones((), device=cuda), torch.zeros((), device=cuda)
counts = torch.zeros(2, dtype=torch.int64, device=cuda)


def report(name: str, bytes_moved: float, work: Callable[[], Any]) -> None:
    try:
        ms = timed(work)
        speed = bytes_moved / ms / 1e9
        print(
            f"{name:44s} {ms:8.3f} ms  {bytes_moved / 1e6:9.0f} MB  {speed:5.2f} TB/s  {speed / COPY:5.0%}", flush=True
        )
    except Exception as error:
        print(f"{name:44s} FAILED {type(error).__name__}: {str(error)[:200]}", flush=True)


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device=cuda, dtype=dtype)


big = randn(1 << 28, dtype=torch.float32)
# Not tensor.copy_: in a graph it runs on a copy engine, which is slower.
COPY = 2 * big.numel() * 4 / timed(lambda: big + 0.0) / 1e9
big = big[:1]
print(f"{torch.cuda.get_device_name()}  D={D} N={N}  copy {COPY:.2f} TB/s", flush=True)

x, x32, u, grad_output = randn(N, D), randn(N, D, dtype=torch.float32), randn(N, 4 * D), randn(N, 4 * D)
weight = torch.rand(D, device=cuda)
heads = D // 64 if D <= 1024 else D // 128
parts = tuple(randn(N // 1024, heads, 1024, D // heads) for _ in range(3))
options: dict[str, Any] = {"amax": amax, "counts": counts}
# For E5M2, as in training: with this scale nothing is flushed. Counting flushed values is slow.
large = torch.full((), 1024.0, device=cuda)
fp8, grad8 = {"scale": one, "dtype": E4M3, **options}, {"scale": large, "dtype": E5M2, **options}
report("cast bf16", N * D * 3, lambda: cast.cast(x, one, E4M3, **options))
report("cast_transpose bf16", N * D * 4, lambda: cast.cast_transpose(x, one, E4M3, **options))
report("cast_transpose bf16, no amax", N * D * 4, lambda: cast.cast_transpose(x, one, E4M3))
report("cast_transpose fp32", N * D * 6, lambda: cast.cast_transpose(x32, large, E5M2, **options))
report("cast_transpose_packed dq dk dv", N * D * 12, lambda: cast.cast_transpose_packed(parts, large, E5M2, **options))
x8 = cast.cast(x, one, E4M3)
report("transpose fp8", N * D * 2, lambda: cast.transpose(x8))
report("max_abs", N * D * 2, lambda: cast.max_abs(x))
w = randn(4 * D, D, dtype=torch.float32)
report("cast_weight 4DxD", 4 * D * D * 10, lambda: cast_weight([w], E4M3))
w_site = (torch.zeros((), device="cuda"), *torch.zeros(2, 2, dtype=torch.int64, device="cuda").unbind())
w_scale = 448 / w.abs().max()
report("cast_weight_delayed 4DxD", 4 * D * D * 6, lambda: cast_weight_delayed([w], w_scale, *w_site, E4M3))
report("gelu bf16", N * D * 16, lambda: activation.activate("gelu", u, transposed=False))
report("gelu fp8", N * D * 12, lambda: activation.activate("gelu", u, transposed=False, **fp8))
report("gelu fp8 both", N * D * 16, lambda: activation.activate("gelu", u, **fp8))
report("gelu_backward fp8 both", N * D * 24, lambda: activation.activate_backward("gelu", grad_output, u, **grad8))
again: dict[str, Any] = {"forward_scale": one, **grad8}
report(
    "gelu_backward fp8 both, recomputes gelu",
    N * D * 28,
    lambda: activation.activate_backward("gelu", grad_output, u, **again),
)
report("gelu_backward bf16", N * D * 24, lambda: activation.activate_backward("gelu", grad_output, u, transposed=False))
report("swiglu fp8 both", N * D * 12, lambda: activation.activate("swiglu", u, **fp8))
report(
    "swiglu_backward fp8 both, recomputes swiglu",
    N * D * 22,
    lambda: activation.activate_backward("swiglu", grad_output[:, : 2 * D], u, **again),
)
for kind in ("relu", "silu", "gelu-quick"):
    report(f"{kind} fp8", N * D * 12, functools.partial(activation.activate, kind, u, transposed=False, **fp8))
    work = functools.partial(activation.activate_backward, kind, grad_output, u, **again)
    report(f"{kind} backward fp8 both, recomputes", N * D * 28, work)
for kind in ("geglu", "geglu-tanh"):
    report(f"{kind} fp8 both", N * D * 12, functools.partial(activation.activate, kind, u, **fp8))
    work = functools.partial(activation.activate_backward, kind, grad_output[:, : 2 * D], u, **again)
    report(f"{kind} backward fp8 both, recomputes", N * D * 22, work)
report("norm fp32 + branch -> fp8", N * D * 11, lambda: norm.norm(x32, weight, eps=1e-5, branch=x, **fp8))
report("norm fp32 -> fp8", N * D * 5, lambda: norm.norm(x32, weight, eps=1e-5, **fp8))
report("norm fp32 -> bf16", N * D * 6, lambda: norm.norm(x32, weight, eps=1e-5))
made = norm.norm(x32, weight, eps=1e-5)
back: dict[str, Any] = {"kind": "layer", "grad_residual": x32}
stats = (x32, weight, made.mean, made.rstd)
report("norm_backward -> fp32", N * D * 14, lambda: norm.norm_backward(x, *stats, **back))
report("norm_backward -> fp32 + fp8", N * D * 15, lambda: norm.norm_backward(x, *stats, **back, **grad8))
V, n = 50304, 16384
logits, targets = randn(n, V), torch.randint(0, V, (n,), device=cuda)
report("softmax_statistics", n * V * 2, lambda: cross_entropy.compute_softmax_stats(logits, targets, -100))
lse, _ = cross_entropy.compute_softmax_stats(logits, targets, -100)
report("grad_logits fp8 both", n * V * 4, lambda: cross_entropy.compute_grad_logits_fp8(logits, targets, lse))
report("grad_logits bf16", n * V * 4, lambda: cross_entropy.compute_grad_logits(logits, targets, lse, one))
over: dict[str, Any] = {"out": torch.empty_like(logits)}
report(
    "loss and grad_logits bf16, fused",
    n * V * 4,
    lambda: cross_entropy.compute_loss_and_grad(logits, targets, one, **over),
)
for name, form in (("smoothed", (None, None, 0.1)), ("capped", (None, 30.0, None))):
    over["form"] = cross_entropy.LossForm(*form)
    work = functools.partial(cross_entropy.compute_loss_and_grad, logits, targets, one, **over)
    report(f"loss and grad_logits bf16, {name}", n * V * 4, work)
    work = functools.partial(cross_entropy.compute_grad_logits_fp8, logits, targets, lse, form=over["form"])
    report(f"grad_logits fp8 both, {name}", n * V * 4, work)
over = {"out": logits}
report("the same, in place", n * V * 4, lambda: cross_entropy.compute_loss_and_grad(logits, targets, one, **over))
logits = lse = targets = one
over.clear()
ids = (torch.rand(N, device=cuda) ** 4 * V).long()  # a few ids are frequent, most are rare
words = functools.partial(embedding.embedding_backward, x32, ids, V)
by_torch = functools.partial(torch.ops.aten.embedding_dense_backward, x32, ids, V, -1, False)
report("embedding_gradient", N * D * 4 + V * D * 4, words)

print(f"{'product':28s} {'bf16':>9s} {'fp8 fast':>9s} {'fp8':>9s}  ms;  speedup with fast, without", flush=True)
for name, m, width, k, out in (
    ("qkv", N, 3 * D, D, BF16), ("out", N, D, D, BF16), ("up", N, 4 * D, D, BF16), ("down", N, D, 4 * D, BF16),
    ("qkv grad_weight", 3 * D, D, N, torch.float32), ("out grad_weight", D, D, N, torch.float32),
    ("up grad_weight", 4 * D, D, N, torch.float32), ("down grad_weight", D, 4 * D, N, torch.float32),
    ("head", n, V, D, BF16), ("head grad_input", n, D, V, BF16), ("head grad_weight", V, D, n, torch.float32),
):  # fmt: skip
    a, b = randn(m, k), randn(width, k)
    a8, b8 = a.to(E4M3), b.to(E4M3)
    plain = timed(functools.partial(multiply_bf16, a, b.t(), out))
    fast, slow = (timed(functools.partial(multiply_fp8, a8, b8, one, one, out, mode)) for mode in (True, False))
    print(f"{name:28s} {plain:9.3f} {fast:9.3f} {slow:9.3f}      {plain / fast:.2f} {plain / slow:.2f}", flush=True)
report("embedding_gradient by torch", N * D * 4 + V * D * 4, by_torch)
