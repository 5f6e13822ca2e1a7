"""Times each kernel with different tiles and launch configurations on this GPU and prints the fastest first.

usage: python bench/tune_kernels.py [KIND ...]                      (all by default)

KIND: cast, packed, gelu, gelu_keep, gelu_backward, gelu_backward_kept, swiglu_keep, swiglu_backward,
swiglu_backward_kept, transpose, lp, statistics, loss, norm, norm_bias, norm_backward, norm_backward_bias.

One process per kind compiles all configurations first, in parallel. This process then measures them alone.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from narrowgauge.kernels import activation, cast, cross_entropy, norm
from narrowgauge.nn.products.choose_formats import timed
from narrowgauge.nn.products.gemm import BF16, E4M3, E5M2

N, D, V = 65536, 768, 50304
Case = tuple[str, Callable[[], Any]]


def tile_grid(*cuts: tuple[int, int, int]) -> list[dict[str, int]]:
    return [{"BLOCK_N": n, "BLOCK_D": d, "num_warps": w} for n, d, w in cuts]


FLAT = tile_grid(
    (128, 64, 8), (128, 64, 4), (128, 64, 16), (64, 64, 4), (64, 64, 8), (64, 128, 8), (128, 128, 8), (128, 128, 16),
    (128, 32, 4), (64, 32, 4), (64, 64, 16), (128, 32, 8), (64, 256, 16), (128, 32, 2), (64, 64, 2), (128, 128, 4),
)  # fmt: skip
TURN = tile_grid(
    (128, 128, 4), (128, 128, 8), (128, 64, 4), (64, 128, 4), (128, 256, 8), (256, 128, 8), (64, 64, 2), (256, 64, 4)
)
LP = tile_grid((128, 128, 8), (128, 64, 4), (128, 64, 8), (128, 128, 16), (64, 128, 8), (64, 64, 4), (128, 32, 4))
STATISTICS = [{"BLOCK": b, "num_warps": w} for b, w in ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16))]
LOSS = [
    {"BLOCK": b, "num_warps": w}
    for b, w in ((8192, 32), (8192, 16), (16384, 32), (8192, 8), (16384, 16), (4096, 8), (4096, 16), (2048, 4))
]
CUTS = {
    "norm": {
        768: [(1, 2, 16), (1, 1, 20), (1, 1, 28), (2, 4, 8), (1, 4, 12), (1, 2, 24)],
        2048: [(1, 4, 7), (1, 8, 6), (2, 8, 4), (1, 4, 10)],
        4096: [(1, 8, 4), (1, 16, 3), (1, 8, 6), (1, 8, 3)],
    },
    "norm_bias": {
        768: [(1, 4, 10), (1, 4, 12), (1, 2, 16), (1, 2, 12)],
        1024: [(1, 4, 10), (1, 4, 12), (1, 2, 12)],
        4096: [(1, 8, 3), (1, 8, 4), (1, 16, 2)],
    },
    "norm_backward_bias": {
        768: [(1, 2, 10), (1, 2, 8), (1, 4, 6), (1, 4, 5)],
        1024: [(1, 2, 7), (1, 2, 8), (1, 2, 10), (1, 4, 5), (1, 4, 6)],
        4096: [(1, 8, 2), (1, 8, 1), (1, 16, 1)],
    },
    "norm_backward": {
        768: [(1, 2, 10), (1, 4, 8), (1, 4, 7, 2), (1, 2, 12), (1, 2, 8), (1, 2, 6, 2)],
        1024: [(1, 2, 8), (1, 2, 10), (1, 4, 6), (1, 4, 8)],
        2048: [(1, 4, 4), (1, 8, 3), (1, 8, 3, 2), (1, 4, 5), (1, 4, 3)],
        4096: [(1, 8, 2), (1, 16, 1, 2), (1, 8, 1, 2), (1, 16, 2)],
    },
}


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def options(dtype: torch.dtype) -> dict[str, Any]:
    counts = torch.zeros(2, dtype=torch.int64, device="cuda")
    return {
        "scale": torch.full((), 1024.0 if dtype is E5M2 else 1.0, device="cuda"),  # so that E5M2 flushes nothing
        "dtype": dtype,
        "amax": torch.zeros((), device="cuda"),
        "counts": counts,
    }


def with_tile(tile: dict[str, int], choices: list[dict[str, int]], work: Callable[[], Any]) -> Iterator[Case]:
    for choice in choices:
        tile.clear()
        tile.update(choice)
        yield " ".join(str(value) for value in choice.values()), work


def cases(kind: str) -> Iterator[Case]:
    if kind in ("cast", "transpose"):
        x = randn(N, D)
        x8 = x.to(E4M3)
        if kind == "cast":
            yield from with_tile(cast.TILE, FLAT, lambda: cast.cast_transpose(x, **options_e4m3))
        else:
            yield from with_tile(cast.TRANSPOSE_TILE, TURN, lambda: cast.transpose(x8))
    elif kind == "packed":
        parts = tuple(randn(64, 1024, 12, 64).transpose(1, 2) for _ in range(3))
        yield from with_tile(cast.TILE, FLAT, lambda: cast.cast_transpose_packed(parts, **options_e5m2))
    elif kind == "gelu":
        u = randn(N, 4 * D)
        yield from with_tile(
            activation.TILE, FLAT, lambda: activation.activate("gelu", u, transposed=False, **options_e4m3)
        )
    elif kind == "gelu_keep":
        u = randn(N, 4 * D)
        work = partial(activation.activate_and_keep, "gelu", u, **options_e4m3)
        yield from with_tile(activation.KEEP_TILE, [tile for tile in FLAT if tile["BLOCK_D"] == 64], work)
    elif kind == "swiglu_keep":
        u = randn(N, 4 * D)
        work = partial(activation.activate_and_keep, "swiglu", u, **options_e4m3)
        yield from with_tile(activation.PAIR_TILE, [tile for tile in FLAT if tile["BLOCK_D"] == 64], work)
    elif kind == "gelu_backward_kept":
        u, grad_output = randn(N, 4 * D), randn(N, 4 * D)
        _, kept = activation.activate_and_keep("gelu", u, **options_e4m3)
        one = torch.ones((), device="cuda")
        work = partial(activation.activate_backward, "gelu", grad_output, kept, forward_scale=one, **options_e5m2)
        yield from with_tile(activation.KEPT_TILE, [tile for tile in FLAT if tile["BLOCK_D"] == 64], work)
    elif kind == "gelu_backward":
        u, grad_output = randn(N, 4 * D), randn(N, 4 * D)
        one = torch.ones((), device="cuda")
        yield from with_tile(
            activation.PAIR_TILE,
            FLAT,
            lambda: activation.activate_backward("gelu", grad_output, u, forward_scale=one, **options_e5m2),
        )
    elif kind == "swiglu_backward_kept":
        u, grad_output = randn(N, 4 * D), randn(N, 2 * D)
        _, kept = activation.activate_and_keep("swiglu", u, **options_e4m3)
        one = torch.ones((), device="cuda")
        work = partial(activation.activate_backward, "swiglu", grad_output, kept, forward_scale=one, **options_e5m2)
        narrow = [tile for tile in FLAT if tile["BLOCK_D"] == 64] + tile_grid((32, 64, 4), (32, 64, 2), (32, 64, 8))
        yield from with_tile(activation.GATED_TILE, narrow, work)
    elif kind == "swiglu_backward":
        u, grad_output = randn(N, 4 * D), randn(N, 2 * D)
        one = torch.ones((), device="cuda")
        yield from with_tile(
            activation.GATED_TILE,
            FLAT,
            lambda: activation.activate_backward("swiglu", grad_output, u, forward_scale=one, **options_e5m2),
        )
    elif kind in ("lp", "statistics", "loss"):
        logits, targets = randn(N // 4, V), torch.randint(0, V, (N // 4,), device="cuda")
        lse, _ = cross_entropy.compute_softmax_stats(logits, targets, -100)
        if kind == "lp":
            yield from with_tile(
                cross_entropy.LP_TILE, LP, lambda: cross_entropy.compute_grad_logits_fp8(logits, targets, lse)
            )
        elif kind == "loss":
            factor = torch.ones((), device="cuda")
            work = partial(cross_entropy.compute_loss_and_grad, logits, targets, factor, out=torch.empty_like(logits))
            yield from with_tile(cross_entropy.LOSS_GRADIENT_TILE, LOSS, work)
        else:
            yield from with_tile(
                cross_entropy.STATISTICS_TILE,
                STATISTICS,
                lambda: cross_entropy.compute_softmax_stats(logits, targets, -100),
            )
    else:
        for width, cuts in CUTS[kind].items():
            rows = N * D // width
            x, branch, weight = (
                randn(rows, width, dtype=torch.float32),
                randn(rows, width),
                torch.rand(width, device="cuda"),
            )
            made, has_bias = norm.norm(x, weight, eps=1e-5), kind.endswith("bias")
            for cut in cuts:
                name = "choose_backward_launch" if "backward" in kind else "choose_forward_launch"
                setattr(norm, name, lambda *_, cut=cut: norm.LaunchConfig(*cut))
                if "backward" not in kind:
                    bias = weight if has_bias else None
                    work = partial(norm.norm, x, weight, bias, eps=1e-5, branch=branch, **options_e4m3)
                else:
                    given = branch, x, weight, made.mean, made.rstd
                    work = partial(norm.norm_backward, *given, grad_residual=x, has_bias=has_bias, **options_e5m2)
                yield f"{width}: {cut}", work


options_e4m3, options_e5m2 = options(E4M3), options(E5M2)
KINDS = (
    "cast",
    "packed",
    "gelu",
    "gelu_keep",
    "gelu_backward",
    "gelu_backward_kept",
    "swiglu_keep",
    "swiglu_backward",
    "swiglu_backward_kept",
    "transpose",
    "lp",
    "statistics",
    "loss",
    "norm",
    "norm_bias",
    "norm_backward",
    "norm_backward_bias",
)
kinds = [argument for argument in sys.argv[1:] if argument in KINDS] or list(KINDS)
if "--compile" in sys.argv:
    for _, work in cases(kinds[0]):
        work()
    sys.exit()
ahead = [subprocess.Popen([sys.executable, __file__, kind, "--compile"], stderr=subprocess.DEVNULL) for kind in kinds]
print("compiled:", {kind: process.wait() for kind, process in zip(kinds, ahead, strict=True)}, flush=True)
for kind in kinds:
    found = []
    for name, work in cases(kind):
        try:
            found.append((timed(work), name))
        except Exception as error:
            print(f"{kind} {name}: {type(error).__name__} {str(error)[:120]}", flush=True)
    print(kind, "; ".join(f"{name} {ms:.4f}" for ms, name in sorted(found)), flush=True)
