"""Ways to round the gradients of logits to FP8: what they do to the gradients of a head's input and weight.

usage: python bench/logit_gradients.py [ROWS] [VOCABULARY] [WIDTH]

Simulated on a CPU: tokens have the frequencies of Zipf's law, a context changes their logits, and targets are sampled
from the softmax. Rows of the head's weight have much in common, as in trained models. For each way:

    input, weight     SQNR of the two gradients in dB, with a weight and an input that are not rounded
    tokens            the median of the SQNR of each token's row of the weight's gradient
    sum               the mean of a row's sum, which should be 0, in % of the mean sum of its absolute values, and the
                      standard error of that mean
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from narrowgauge.kernels import cross_entropy as ce
from narrowgauge.kernels.fp8_formats import FLUSH_THRESHOLD

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def dither_small(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Offset all values by up to half the format's smallest step, and round to the nearest."""
    offsets = ce.dither(torch.full_like(values, 2.0**-40), dtype) - 2.0**-40
    return values + offsets.clamp(-FLUSH_THRESHOLD[dtype], FLUSH_THRESHOLD[dtype])


WAYS: dict[str, tuple[torch.dtype, Callable[[Tensor, torch.dtype], Tensor]]] = {
    "E5M2, to the nearest": (E5M2, lambda values, dtype: values),
    "E4M3, to the nearest": (E4M3, lambda values, dtype: values),
    "E4M3, small values right on average": (E4M3, dither_small),
    "E4M3, all values right on average": (E4M3, ce.dither),
}


def sqnr(exact: Tensor, found: Tensor, dim: int | None = None) -> Tensor:
    error = (found - exact).square()
    signal = exact.square()
    sums = (signal.sum(), error.sum()) if dim is None else (signal.sum(dim), error.sum(dim))
    return 10 * torch.log10(sums[0] / sums[1].clamp(min=1e-60))


def make_logits(rows: int, vocab: int, width: int, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input [N, D], the weight [V, D] and logits that are the flatter the smaller the level is."""
    x, weight = torch.randn(rows, width), torch.randn(vocab, width)
    unigram = -torch.log(torch.arange(1.0, vocab + 1))[torch.randperm(vocab)]
    logits = level * (unigram + x @ weight.t() / width**0.5)
    return x + 0.5 * torch.randn(width), weight + torch.randn(width), logits.bfloat16()


def main() -> None:
    given = [int(argument) for argument in sys.argv[1:]]
    rows, vocab, width = given + [4096, 50304, 128][len(given) :]
    for level in (0.02, 1.0, 1.5):
        torch.manual_seed(0)
        x, weight, logits = make_logits(rows, vocab, width, level)
        targets = torch.multinomial(torch.softmax(logits.float(), 1), 1)[:, 0]
        lse, loss = ce.softmax_stats_reference(logits, targets)
        exact = ce.grad_logits_reference(logits, targets, lse)
        del logits
        grads = exact @ weight, exact.t() @ x
        print(f"loss {loss.mean():.1f}\n{'':36} {'input':>7} {'weight':>7} {'tokens':>7}   sum")
        for name, (dtype, prepare) in WAYS.items():
            scale = ce.UNIT_SCALE[dtype]
            d = prepare(exact * scale, dtype).to(dtype).float() / scale
            sums = d.sum(1) / exact.abs().sum(1).mean() * 100
            found = d @ weight, d.t() @ x
            numbers = (sqnr(grads[0], found[0]), sqnr(grads[1], found[1]), sqnr(grads[1], found[1], 1).median())
            text = " ".join(f"{float(number):7.1f}" for number in numbers)
            print(f"{name:36} {text}  {sums.mean():+.4f} +- {sums.std() / rows**0.5:.4f}", flush=True)


if __name__ == "__main__":
    main()
