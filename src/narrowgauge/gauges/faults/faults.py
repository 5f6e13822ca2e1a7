"""Classic mistakes of low-precision training, made for real on a small model, each with its healthy twin beside it.

A fault changes one thing about a run: the recipe, a module, the data, the optimizer, or what the engine does with
gradients. Both runs are watched by the same rules; the fault's must give the expected finding at the expected place,
the twin's none that is serious.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.engine import Engine
from narrowgauge.errors import TrainingStalled
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.faults.broken_parts import (
    ClipsScaled,
    E4m3Gradients,
    Fp16Moments,
    FreezesScales,
    HalfNorm,
    HalfSoftmax,
    LogOfZero,
    NearestBf16,
    half_sum,
)
from narrowgauge.gauges.findings import SERIOUS, Finding
from narrowgauge.gauges.rules.step_rules import Step

STEPS = 60
WIDTH, CLASSES, ROWS = 64, 16, 128


class Net(nn.Module):
    """A perceptron with a norm and an attention-like mixing of classes: room for every mistake."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, softmax: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(32, WIDTH)
        self.norm = norm(WIDTH)
        self.act = nn.GELU()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.softmax = softmax or nn.Softmax(-1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.norm(self.inner(x)))
        mixed: Tensor = self.head(hidden + hidden * self.softmax(self.gate(hidden)))
        return mixed


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points around sixteen centres."""
    generator = torch.Generator().manual_seed(1000 + step)
    centres = torch.randn(CLASSES, 32, generator=torch.Generator().manual_seed(7)) * 1.5
    targets = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    return centres[targets] + torch.randn(ROWS, 32, generator=generator), targets


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).float(), targets)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One run: what is trained, how, and in which formats."""

    recipe: str
    model: Callable[[], nn.Module] = Net
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = cross_entropy
    data: Callable[[int], tuple[Tensor, Tensor]] = batch
    lr: float = 3e-3
    optimizer: Callable[..., Optimizer] = torch.optim.AdamW
    engine: Callable[..., Engine] = Engine
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A mistake, its twin without it, and what must be found where."""

    name: str
    about: str
    expected: tuple[str, ...]
    """Rules of which one names the mistake."""
    where: tuple[str, ...] = ()
    """Places one of which must be named; empty: anywhere."""
    wrong: Setup
    right: Setup
    steps: int = STEPS


@dataclass
class Outcome:
    """What a run showed."""

    losses: list[float]
    findings: list[Finding]
    stalled: bool = False

    @property
    def serious(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == SERIOUS]


def run(setup: Setup, steps: int = STEPS, every: int = 5) -> Outcome:
    """Train a setup for a few steps under every rule."""
    torch.manual_seed(0)
    model = setup.model()
    optimizer = setup.optimizer(model.parameters(), lr=setup.lr)
    engine = setup.engine(model, optimizer, setup.recipe, max_consecutive_skips=55, **setup.options)
    examiner = Examiner(engine, every)
    outcome = Outcome([], [])
    try:
        for step in range(steps):
            total = 0.0
            for part in range(engine.accumulate):
                inputs, targets = setup.data(step * engine.accumulate + part)
                with engine.forward():
                    loss = setup.loss(model, inputs, targets)
                engine.backward(loss)
                total += loss.item() / engine.accumulate
                report = engine.step()
            outcome.losses.append(total)
            norm = report.grad_norm
            examiner.see(Step(step + 1, total, math.nan if norm is None else norm, report.loss_scale, report.applied))
            examiner.collect()
    except TrainingStalled:
        outcome.stalled = True
    examiner.collect(wait=True)
    outcome.findings = list(examiner.findings)
    return outcome


def caught(fault: Fault, findings: Sequence[Finding]) -> list[Finding]:
    """The findings that name the mistake."""
    return [
        finding
        for finding in findings
        if finding.rule in fault.expected and (not fault.where or finding.where in fault.where)
    ]


def _faults() -> Iterator[Fault]:
    fp16, bf16 = Setup(recipe="fp16"), Setup(recipe="bf16")

    def small(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model, inputs, targets) * 1e-3

    yield Fault(
        name="fp16-no-scale",
        about="FP16 without a loss scale: small gradients are flushed to zero",
        expected=("underflow",),
        where=("gate", "inner", "norm", "act", "softmax", "head"),
        wrong=Setup(recipe="fp16[loss_scale=none]", loss=small),
        right=Setup(recipe="fp16", loss=small),
    )
    yield Fault(
        name="scale-too-high",
        about="a fixed loss scale so large that every gradient overflows",
        expected=("skipping-too-often",),
        wrong=Setup(recipe="fp16[loss_scale=1e9]"),
        right=fp16,
    )
    yield Fault(
        name="scale-too-low",
        about="a fixed loss scale below 1, which makes underflow worse",
        expected=("underflow",),
        wrong=Setup(recipe="fp16[loss_scale=0.0001]"),
        right=fp16,
    )
    yield Fault(
        name="clip-before-unscale",
        about="gradients are clipped while they still carry the loss scale: all end with the same tiny norm",
        expected=("gradient-norm-constant",),
        wrong=Setup(recipe="fp16", engine=ClipsScaled, options={"clip_norm": 1.0}),
        right=Setup(recipe="fp16", options={"clip_norm": 1.0}),
    )
    yield Fault(
        name="bf16-no-master",
        about="weights kept in BF16 alone: updates smaller than half a step of the format are lost",
        expected=("stagnating-updates",),
        wrong=Setup(recipe="bf16[master=none,gradients=bf16]", optimizer=NearestBf16, lr=2e-5),
        right=Setup(recipe="bf16[master=split]", lr=2e-5),
    )
    yield Fault(
        name="norm-in-fp16",
        about="LayerNorm's statistics summed in FP16: the squares overflow, and what is divided by them is zero",
        expected=("dead-layer",),
        where=("norm",),
        wrong=Setup(recipe="fp16", model=lambda: Net(norm=HalfNorm), data=_loud),
        right=Setup(recipe="fp16", data=_loud),
    )
    yield Fault(
        name="softmax-in-fp16",
        about="softmax in FP16 without taking the maximum off first",
        expected=("overflow", "activation-not-finite"),
        where=("softmax",),
        wrong=Setup(recipe="fp16", model=lambda: _sharp(HalfSoftmax(), 200.0)),
        right=Setup(recipe="fp16", model=lambda: _sharp(None, 200.0)),
    )
    yield Fault(
        name="loss-sum-in-fp16",
        about="the loss of all samples summed in FP16",
        expected=("loss-not-finite",),
        wrong=Setup(recipe="fp16", loss=half_sum),
        right=fp16,
    )
    yield Fault(
        name="learning-rate",
        about="a learning rate thousands of times too large",
        expected=("updates-too-large", "loss-diverging"),
        wrong=Setup(recipe="bf16", lr=30.0),
        right=bf16,
    )
    yield Fault(
        name="log-of-zero",
        about="a custom op takes the logarithm of a probability that is zero",
        expected=("activation-not-finite", "loss-not-finite"),
        where=("softmax.log", "loss"),
        wrong=Setup(recipe="bf16", model=lambda: _sharp(LogOfZero(0.0), 400.0)),
        right=Setup(recipe="bf16", model=lambda: _sharp(LogOfZero(1e-6), 400.0)),
    )
    yield Fault(
        name="nan-in-batch",
        about="one sample of one batch is not a number",
        expected=("bad-batch",),
        where=("step 31",),
        wrong=Setup(recipe="bf16", data=_poisoned),
        right=bf16,
    )
    yield from _fp8_faults()
    yield Fault(
        name="moments-in-fp16",
        about="Adam's second moment and epsilon in FP16: both become zero, and the update inf",
        expected=("updates-too-large",),
        wrong=Setup(recipe="bf16", optimizer=Fp16Moments, loss=small),
        right=Setup(recipe="bf16", loss=small),
    )
    yield Fault(
        name="bf16-accumulation",
        about="many microbatches summed in BF16, where a small one no longer changes the sum",
        expected=("bf16-accumulation",),
        wrong=Setup(recipe="bf16[master=split,gradients=bf16]", options={"accumulate": 32}),
        right=Setup(recipe="bf16[master=split]", options={"accumulate": 32}),
        steps=6,
    )


def _fp8_faults() -> Iterator[Fault]:
    yield Fault(
        name="fp8-no-scale",
        about="FP8 without scales: gradients lie far below the format's smallest number",
        expected=("fp8-underflow",),
        wrong=Setup(recipe="fp8[scaling=none,products=all]", loss=lambda m, x, y: cross_entropy(m, x, y) * 1e-4),
        right=Setup(recipe="fp8[products=all]", loss=lambda m, x, y: cross_entropy(m, x, y) * 1e-4),
    )
    yield Fault(
        name="fp8-stale-scale",
        about="FP8 scales that stay where they were while the inputs grow a hundredfold",
        expected=("fp8-stale-scale",),
        where=("inner.input",),
        wrong=Setup(recipe="fp8[products=all]", engine=FreezesScales, data=_growing),
        right=Setup(recipe="fp8[products=all]", data=_growing),
    )
    yield Fault(
        name="fp8-e4m3-gradients",
        about="gradients in E4M3, unscaled: its smallest number is 128 times that of E5M2",
        expected=("fp8-underflow",),
        wrong=Setup(recipe="fp8[products=all,scaling=none]", engine=E4m3Gradients),
        right=Setup(recipe="fp8[products=all]"),
    )


def _loud(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(step)
    return inputs * 400, targets


def _growing(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(step)
    return inputs * (100 if step > 20 else 1), targets


def _poisoned(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(step)
    if step == 30:
        inputs[5, 3] = math.nan
    return inputs, targets


def _sharp(softmax: nn.Module | None, factor: float) -> Net:
    """A net whose gate gives large logits."""
    model = Net(softmax=softmax)
    with torch.no_grad():
        model.gate.weight.mul_(factor)
    return model


FAULTS = {fault.name: fault for fault in _faults()}
