"""Schemes for AdamW's two moments in 8 bits: error of the update on real gradients, and final loss of training.

A GPT is trained in FP32, and every scheme gets the same gradients (clipped to norm 1) as the exact moments. As in a
fused kernel, a step decodes the moments, adds the gradient, computes the update u = m_hat / (sqrt(v_hat) + 1e-8) from
the FP32 values and then encodes them. So u has only the rounding errors of earlier steps. The head is untied from the
embedding, so that the embedding's rows get zero gradients whenever their byte is not in the batch.

usage: PYTHONPATH=src python bench/moments.py PART BETA2 [STEPS] [SEED]          (default 300 steps, seed 0)
    PART m: codes of the first moment with an exact second;  v: codes of the second with an exact first;
    both: pairs of the two;  silent: the same, but an eighth of the elements get zero gradients in the second half;
    train: the loss of training with a few pairs, compared with FP32 AdamW
Columns of the table: error of the update at steps 50, 100, (300, 600,) last | the same for the embedding |
largest |u_q|, share of |u_q| > 2 |u| + 0.1, mean and standard deviation of log2(v_q / v), remaining update of
silenced elements. Results are added to bench/results/moments.json under PART-BETA2-STEPS-SEED.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from narrowgauge import tasks

RESULTS = Path(__file__).parent / "results" / "moments.json"
BETA1, EPS, DECAY, CLIP, PEAK, WARMUP = 0.9, 1e-8, 0.1, 1.0, 2e-3, 30
EMBEDDING = 256 * 128
"""Number of elements of the embedding, which is first in the flat vector."""
ALIGN = 768
"""The flat vector is padded to a multiple of every group size tried (64, 96, 128, 256)."""
PLASTIC = 3242174889, 2447445414
"""2^32 over the plastic number and over its square: sums of their multiples, modulo 2^32, are evenly distributed
over elements, over steps and over both (Roberts' R2 sequence)."""


@dataclass(frozen=True)
class Code:
    """A map of magnitudes 0..top to the reals 0..levels, and back. The nearest integer is stored."""

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    levels: int
    low: int = 0
    """The lowest code: 1 if no value may decode to 0."""
    top: float = 1.0
    grid: int = 1
    """Snapped scales are powers of 2^(1/grid)."""


def power(exponent: float, levels: int, low: int = 0) -> Code:
    """Store x^exponent linearly."""
    return Code(lambda x: x.pow(exponent) * levels, lambda q: (q / levels).pow(1 / exponent), levels, low)


def softsign(levels: int) -> Code:
    """Store 2x / (1 + x): steps near 0 are a quarter of those near 1."""
    return Code(lambda x: x * (2 * levels) / (1 + x), lambda q: q / (2 * levels - q), levels)


def mu_law(mu: float, levels: int) -> Code:
    """Store log(1 + mu x): linear below 1/mu, logarithmic above."""
    octaves = math.log2(1 + mu)
    return Code(
        lambda x: (x * mu + 1).log2() * (levels / octaves), lambda q: ((q * (octaves / levels)).exp2() - 1) / mu, levels
    )


def logarithm(steps_per_octave: int, levels: int = 255) -> Code:
    """Store log2 x, down to 2^-(levels / steps per octave): never 0."""
    return Code(
        lambda x: x.clamp(min=1e-30).log2() * steps_per_octave + levels,
        lambda q: ((q - levels) / steps_per_octave).exp2(),
        levels,
        grid=steps_per_octave,
    )


def float_bits(mantissa: int, offset: float, levels: int) -> Code:
    """Store the leading bits of x + offset in FP32, minus those of the lowest value: a piecewise linear logarithm.

    It needs integer arithmetic only. Offset 0 is an unsigned float without a zero (E4M4: 2^-15 .. 1.9375); offset 1 is
    a piecewise linear mu-law with a zero.
    """
    unit = 1 << (23 - mantissa)
    if offset:
        base = int(torch.tensor(offset).view(torch.int32))
        top = float(torch.tensor(base + levels * unit, dtype=torch.int32).view(torch.float32)) - offset
    else:
        top = 2 - 2.0**-mantissa
        base = int(torch.tensor(top).view(torch.int32)) - levels * unit
    lowest = float(torch.tensor(base, dtype=torch.int32).view(torch.float32))
    return Code(
        lambda x: ((x + offset).clamp(min=lowest).view(torch.int32) - base).float() / unit,
        lambda q: (q.int() * unit + base).view(torch.float32) - offset,
        levels,
        top=top,
    )


def cast(dtype: torch.dtype, never_zero: bool) -> Code:
    """Use the hardware's FP8 conversion; the code is the bit pattern, which increases with the magnitude."""
    top = torch.finfo(dtype).max
    levels = int(torch.tensor(top).to(dtype).view(torch.uint8))
    encode, decode = lambda x: x.to(dtype).view(torch.uint8).float(), lambda q: q.to(torch.uint8).view(dtype).float()
    return Code(encode, decode, levels, int(never_zero), top)


def soft_root(levels: int) -> Code:
    """Store y = sqrt(x) as 2y / (1 + y)."""
    soft = softsign(levels)
    return Code(lambda x: soft.encode(x.sqrt()), lambda q: soft.decode(q).square(), levels, 1)


CODES_M = {
    "linear": power(1.0, 127),
    "sqrt": power(0.5, 127),
    "power 2/3": power(2 / 3, 127),
    "softsign": softsign(127),
    "mu-law 16": mu_law(16, 127),
    "mu-law 255": mu_law(255, 127),
    "bits 4": float_bits(4, 1.0, 127),
    "bits 5": float_bits(5, 1.0, 127),
    "bits 6": float_bits(6, 1.0, 127),
    "E4M3": cast(torch.float8_e4m3fn, False),
}
CODES_V = {
    "linear": power(1.0, 255, 1),
    "sqrt": power(0.5, 255, 1),
    "soft root": soft_root(255),
    "cube root": power(1 / 3, 255, 1),
    "fourth root": power(0.25, 255, 1),
    "log 8": logarithm(8),
    "log 16": logarithm(16),
    "log 21": logarithm(21),
    "log 32": logarithm(32),
    "E5M3 bits": float_bits(3, 0, 255),
    "E4M4 bits": float_bits(4, 0, 255),
    "E3M5 bits": float_bits(5, 0, 255),
    "E4M3": cast(torch.float8_e4m3fn, True),
    "E5M2": cast(torch.float8_e5m2, True),
}


@dataclass(frozen=True)
class Keep:
    """How one moment is stored between steps."""

    code: str
    group: int = 128
    rounding: str = "near"
    """near: to the nearest. hash and lattice are stochastic: they round up with the remainder as probability. hash uses
    a new random number, lattice an evenly distributed sequence over elements and steps (one multiply-add)."""
    snap: bool = False
    """Scales are powers of two (or of the code's own grid), so small changes of the largest value leave them."""
    over_root: bool = False
    """The first moment is stored divided by the square root of the stored second moment."""

    def __str__(self) -> str:
        words = [self.code, str(self.group)]
        words += [w for w, on in (("snap", self.snap), ("/sqrt v", self.over_root)) if on]
        return " ".join([*words, *([self.rounding] if self.rounding != "near" else [])])


Schemes = dict[str, tuple[Keep | None, Keep | None]]


def thresholds(keep: Keep, step: int, index: Tensor, salt: int) -> Tensor:
    """Return what is added before rounding down, in 0..1: the probability of rounding up is then the remainder."""
    if keep.rounding == "lattice":
        state = (index + salt) * as_int32(PLASTIC[0]) + as_int32(step * PLASTIC[1])
    else:
        state = hash32(index ^ as_int32(salt + step * 0x85EBCA6B))
    return ((state >> 8) & 0xFFFFFF).float() * 2.0**-24


def as_int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def hash32(x: Tensor) -> Tensor:
    """Hash int32 by two multiplications and three shifts (Wellons' lowbias32)."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * as_int32(0x846CA68B)
    return x ^ (x >> 16 & 0xFFFF)


def requantize(value: Tensor, keep: Keep, code: Code, step: int, index: Tensor, salt: int) -> Tensor:
    """Encode and decode: return the values that the next step reads."""
    grouped = value.view(-1, keep.group)
    magnitude = grouped.abs()
    scale = magnitude.amax(1, keepdim=True) / code.top
    if keep.snap:
        scale = torch.where(scale > 0, ((scale.log2() * code.grid).sub(1e-3).ceil() / code.grid).exp2(), scale)
    inv_scale = torch.where(scale > 1e-37, 1 / scale, 0.0)
    q = code.encode(magnitude * inv_scale)
    q = q.round() if keep.rounding == "near" else (q + thresholds(keep, step, index, salt).view_as(q)).floor()
    decoded = code.decode(q.clamp(code.low, code.levels)) * scale
    return torch.copysign(decoded, grouped).view(-1)


class Moments:
    """AdamW's moments of one flat vector, exact where a Keep is None."""

    def __init__(self, size: int, beta2: float, keep_m: Keep | None = None, keep_v: Keep | None = None) -> None:
        self.beta2, self.keep_m, self.keep_v = beta2, keep_m, keep_v
        self.m, self.v, self.step = torch.zeros(size), torch.zeros(size), 0
        self.index = torch.arange(size, dtype=torch.int32)

    def update(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Add a gradient; return the update and its second moment, both before rounding."""
        self.step += 1
        m = self.m.mul_(BETA1).add_(gradient, alpha=1 - BETA1)
        v = self.v.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        root = (v / (1 - self.beta2**self.step)).sqrt_().add_(EPS)
        u = (m / (1 - BETA1**self.step)).div_(root)
        if self.keep_v:
            self.v = requantize(v, self.keep_v, CODES_V[self.keep_v.code], self.step, self.index, 0x51ED27)
        if self.keep_m:
            root = self.v.sqrt().clamp_(min=1e-30) if self.keep_m.over_root else 1.0
            self.m = requantize(m / root, self.keep_m, CODES_M[self.keep_m.code], self.step, self.index, 0) * root
        return u, v


class Flat:
    """A model whose parameters and gradients are views of two flat vectors: embedding, matrices, norms, padding."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        model.lm_head.weight = nn.Parameter(model.tok.weight.detach().clone())
        named = sorted(model.named_parameters(), key=lambda item: (item[1].ndim == 1, not item[0].startswith("tok")))
        size = sum(p.numel() for _, p in named)
        self.values, self.gradient, self.decay = (torch.zeros(-(-size // ALIGN) * ALIGN) for _ in range(3))
        start = 0
        for _, p in named:
            where = slice(start, start := start + p.numel())
            self.values[where] = p.detach().flatten()
            p.data = self.values[where].view_as(p)
            p.grad = self.gradient[where].view_as(p)
            self.decay[where] = DECAY * (p.ndim > 1)


def silenced(index: Tensor) -> Tensor:
    return hash32(index ^ 0x5EED) & 7 == 0


def train(
    beta2: float, seed: int, steps: int, moments: Moments | None = None, nudge: float = 0.0, silence: bool = False
) -> Iterator[tuple[int, float, Tensor, Tensor, Tensor]]:
    """Train with the given moments (exact ones by default); yield step, loss, gradient, u and v of each step."""
    task = tasks.find("gpt:3x128", vocab=256, batch=8, context=64, seed=seed)
    torch.manual_seed(seed)
    flat = Flat(task.model())
    flat.values.mul_(1 + nudge * torch.randn(flat.values.shape))
    moments = moments or Moments(len(flat.values), beta2)
    heard = ~silenced(moments.index)
    for step in range(1, steps + 1):
        flat.gradient.zero_()
        loss = task.loss(flat.model, task.batch(step - 1, "train"))
        loss.backward()
        flat.gradient.mul_((CLIP / (flat.gradient.norm() + 1e-6)).clamp(max=1.0))
        if silence and step > steps // 2:
            flat.gradient.mul_(heard)
        u, v = moments.update(flat.gradient)
        warm, done = step / WARMUP, (step - WARMUP) / max(1, steps - WARMUP)
        rate = PEAK * (warm if warm < 1 else 0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        flat.values.sub_(u + flat.decay * flat.values, alpha=rate)
        yield step, loss.item(), flat.gradient, u, v


@dataclass
class Score:
    """Measurements of one scheme: errors at the sampled steps, drifts at the last step."""

    error: list[float]
    """||u_q - u|| / ||u|| over all parameters."""
    error_embedding: list[float]
    worst: float = 0.0
    """The largest |u_q|."""
    blown: float = 0.0
    """Share of |u_q| > 2 |u| + 0.1."""
    drift: float = 0.0
    """Mean log2(v_q / v) where v > 0: a second moment stuck at old values shows here."""
    spread: float = 0.0
    """Standard deviation of the same."""
    silent: float = 0.0
    """Mean |u_q| of the silenced elements over that of the rest: 0 if the first moment decays as it should."""


def replay(schemes: Schemes, beta2: float, steps: int, seed: int, silence: bool) -> dict[str, Score]:
    """Feed every scheme the gradients of one FP32 run, live, and compare its updates with the exact ones.

    With ``silence`` an eighth of the elements, distributed over every group, get zero gradients in the second half.
    """
    sampled = [step for step in (50, 100, 300, 600) if step < steps] + [steps]
    scores = {name: Score([], []) for name in schemes}
    states: dict[str, Moments] = {}
    for step, _, gradient, u, v in train(beta2, seed, steps, silence=silence):
        for name, keeps in schemes.items():
            state = states.setdefault(name, Moments(len(gradient), beta2, *keeps))
            u_q, v_q = state.update(gradient)
            if step in sampled:
                measure(scores[name], u_q, u, (v_q / v).log2()[v > 0], silenced(state.index) & (v > 0))
    return scores


def measure(score: Score, u_q: Tensor, u: Tensor, log_ratio: Tensor, silent: Tensor) -> None:
    score.error.append(float((u_q - u).norm() / u.norm()))
    score.error_embedding.append(float((u_q - u)[:EMBEDDING].norm() / u[:EMBEDDING].norm()))
    score.worst = max(score.worst, float(u_q.abs().max()))
    score.blown = max(score.blown, float((u_q.abs() > 2 * u.abs() + 0.1).float().mean()))
    score.drift, score.spread = float(log_ratio.mean()), float(log_ratio.std())
    score.silent = float(u_q[silent].abs().mean() / u_q[~silent].abs().mean())


def schemes_of(part: str) -> Schemes:
    """Return the schemes that a part compares, by name."""
    if part == "m":
        keeps = [Keep(code, over_root=root) for root in (False, True) for code in CODES_M]
        keeps += [Keep("softsign", group, over_root=root) for root in (False, True) for group in (64, 96, 256)]
        for rounding in ("hash", "lattice"):
            keeps += [Keep("softsign", rounding=rounding, over_root=root) for root in (False, True)]
        return {str(keep): (keep, None) for keep in keeps}
    if part == "v":
        best = ("sqrt", "soft root", "fourth root", "log 21", "E4M4 bits")
        keeps = [Keep(code) for code in CODES_V]
        keeps += [Keep(code, rounding=rounding) for code in best for rounding in ("hash", "lattice")]
        keeps += [Keep(code, snap=True, rounding=rounding) for code in best for rounding in ("near", "lattice")]
        keeps += [Keep(code, group, "lattice") for code in best[:3] for group in (64, 96, 256)]
        return {str(keep): (None, keep) for keep in keeps}
    pairs = [
        (Keep("linear"), Keep("linear")),
        (Keep("E4M3"), Keep("E4M3")),
        (Keep("softsign"), Keep("sqrt")),
        (Keep("sqrt"), Keep("fourth root")),
        (Keep("sqrt"), Keep("fourth root", rounding="lattice")),
        (Keep("sqrt", rounding="lattice"), Keep("fourth root", rounding="lattice")),
        (Keep("softsign", over_root=True), Keep("soft root")),
        (Keep("softsign"), Keep("soft root", rounding="lattice")),
        (Keep("softsign", over_root=True), Keep("soft root", rounding="lattice")),
        (Keep("softsign", over_root=True, rounding="hash"), Keep("soft root", rounding="hash")),
        (Keep("softsign", over_root=True, rounding="lattice"), Keep("soft root", rounding="lattice")),
        (Keep("softsign", over_root=True, rounding="lattice"), Keep("soft root", 64, rounding="lattice")),
        (Keep("softsign", over_root=True, rounding="lattice"), Keep("fourth root", rounding="lattice")),
        (None, None),
    ]
    named: Schemes = {f"{m or 'FP32'}, {v or 'FP32'}": (m, v) for m, v in pairs}
    trained = [1, 3, 5, 8, 10]
    return {name: named[name] for i, name in enumerate(named) if part != "train" or i in trained}


def final_losses(schemes: Schemes, beta2: float, steps: int, seed: int) -> dict[str, dict[str, float]]:
    """Train with each scheme and with FP32 moments; return the mean of the last 30 losses.

    FP32 from initial weights changed by 1% shows how much equally good runs differ.
    """
    size = next(len(g) for *_, g, _, _ in train(beta2, seed, 1))
    runs = {"FP32": (0.0, (None, None)), "FP32, nudged": (1e-2, (None, None))}
    runs |= {name: (0.0, keeps) for name, keeps in schemes.items()}
    losses: dict[str, dict[str, float]] = {}
    for name, (nudge, keeps) in runs.items():
        moments = Moments(size, beta2, *keeps)
        last = [loss for _, loss, *_ in train(beta2, seed, steps, moments, nudge)][-30:]
        loss = sum(last) / len(last)
        losses[name] = {"loss": loss, "over_fp32": loss / losses["FP32"]["loss"] - 1 if losses else 0.0}
        print(f"{name:66s} {loss:.4f} {losses[name]['over_fp32']:+.2%}", flush=True)
    return losses


def main() -> None:
    part, beta2 = sys.argv[1], float(sys.argv[2])
    steps, seed = (int(given) for given in (*sys.argv[3:5], *("300", "0")[len(sys.argv) - 3 :]))
    torch.set_num_threads(1)
    schemes, began = schemes_of(part), time.time()
    print(f"{part}, beta2 {beta2}, {steps} steps, seed {seed}, {len(schemes)} schemes", flush=True)
    if part == "train":
        rows: dict[str, object] = dict(final_losses(schemes, beta2, steps, seed))
    else:
        scores = replay(schemes, beta2, steps, seed, silence=part == "silent")
        rows = {name: vars(score) for name, score in scores.items()}
        for name, s in scores.items():
            errors, rare = (" ".join(f"{e:7.2%}" for e in errors) for errors in (s.error, s.error_embedding))
            tail = f"{s.worst:6.2f} {s.blown:7.1e} {s.drift:+.3f} {s.spread:.3f} {s.silent:.4f}"
            print(f"{name:66s} {errors} | {rare} | {tail}")
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    facts = {"torch": torch.__version__, "seconds": round(time.time() - began)}
    record[f"{part}-{beta2}-{steps}-{seed}"] = {**facts, "schemes": rows}
    RESULTS.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
