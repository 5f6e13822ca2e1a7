"""Classic mistakes of low-precision training on a small model, each with a healthy counterpart.

A fault changes one part of a run: the recipe, a module, the data, the optimizer, or how the engine treats gradients.
The same rules watch both runs. The faulty run must give the expected finding at the expected place, and the healthy
run no serious finding.
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
from narrowgauge.findings import SERIOUS, Finding
from narrowgauge.gauges.examiner import Examiner
from narrowgauge.gauges.faults.broken_parts import (
    BF16WithoutMaster,
    ClipBeforeUnscale,
    FP16Moments,
    FP16Norm,
    FP16Softmax,
    FrozenScales,
    LogOfZero,
    sum_loss_in_fp16,
)
from narrowgauge.gauges.rules.step_rules import Step

STEPS = 60
WIDTH, CLASSES, ROWS = 64, 16, 128


class Net(nn.Module):
    """An MLP with a norm and a softmax gate, so that every fault has a place."""

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


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Points around sixteen class centers."""
    generator = torch.Generator().manual_seed(1000 + step)
    centers = torch.randn(CLASSES, 32, generator=torch.Generator().manual_seed(7)) * 1.5
    targets = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    return centers[targets] + torch.randn(ROWS, 32, generator=generator), targets


def cross_entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).float(), targets)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The configuration of one run."""

    recipe: str
    model: Callable[[], nn.Module] = Net
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = cross_entropy
    data: Callable[[int], tuple[Tensor, Tensor]] = make_batch
    lr: float = 3e-3
    optimizer: Callable[..., Optimizer] = torch.optim.AdamW
    engine: Callable[..., Engine] = Engine
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A mistake, its healthy counterpart, and the expected finding."""

    name: str
    about: str
    expected: tuple[str, ...]
    """Rules, one of which must report the mistake."""
    where: tuple[str, ...] = ()
    """Places, one of which must be reported; empty: any place."""
    wrong: Setup
    right: Setup
    steps: int = STEPS


@dataclass
class Outcome:
    """The losses and findings of a run."""

    losses: list[float]
    findings: list[Finding]
    stalled: bool = False

    @property
    def serious(self) -> list[Finding]:
        """The serious findings."""
        return [finding for finding in self.findings if finding.severity == SERIOUS]


def train_setup(setup: Setup, steps: int = STEPS, every: int = 5) -> Outcome:
    """Train a setup for a few steps and apply every rule."""
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
            norm = math.nan if norm is None else norm
            examiner.check_step(Step(step + 1, total, norm, report.loss_scale, report.applied))
            examiner.collect()
    except TrainingStalled:
        outcome.stalled = True
    examiner.collect(wait=True)
    examiner.finish()
    outcome.findings = list(examiner.findings)
    return outcome


def select_expected(fault: Fault, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that report the mistake."""
    return [
        finding
        for finding in findings
        if finding.rule in fault.expected and (not fault.where or finding.where in fault.where)
    ]


def _make_faults() -> Iterator[Fault]:
    fp16, bf16 = Setup(recipe="fp16"), Setup(recipe="bf16")

    def small_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model, inputs, targets) * 1e-3

    yield Fault(
        name="fp16-no-scale",
        about="FP16 without a loss scale: small gradients are flushed to zero",
        expected=("underflow",),
        where=("gate", "inner", "norm", "act", "softmax", "head"),
        wrong=Setup(recipe="fp16[loss_scale=none]", loss=small_loss),
        right=Setup(recipe="fp16", loss=small_loss),
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
        about="gradients are clipped before unscaling: all get the same tiny norm",
        expected=("gradient-norm-constant",),
        wrong=Setup(recipe="fp16", engine=ClipBeforeUnscale, options={"clip_norm": 1.0}),
        right=Setup(recipe="fp16", options={"clip_norm": 1.0}),
    )
    yield Fault(
        name="bf16-no-master",
        about="BF16 weights without a master: updates smaller than half the spacing of the format are lost",
        expected=("stagnating-updates",),
        wrong=Setup(recipe="bf16[master=none,gradients=bf16]", optimizer=BF16WithoutMaster, lr=2e-5),
        right=Setup(recipe="bf16[master=split]", lr=2e-5),
    )
    yield Fault(
        name="norm-in-fp16",
        about="LayerNorm statistics summed in FP16: the squares overflow, and the normalized output is zero",
        expected=("dead-layer",),
        where=("norm",),
        wrong=Setup(recipe="fp16", model=lambda: Net(norm=FP16Norm), data=_make_large_batch),
        right=Setup(recipe="fp16", data=_make_large_batch),
    )
    yield Fault(
        name="softmax-in-fp16",
        about="softmax in FP16 without subtracting the maximum first",
        expected=("overflow", "activation-not-finite"),
        where=("softmax",),
        wrong=Setup(recipe="fp16", model=lambda: _make_sharp_net(FP16Softmax(), 200.0)),
        right=Setup(recipe="fp16", model=lambda: _make_sharp_net(None, 200.0)),
    )
    yield Fault(
        name="loss-sum-in-fp16",
        about="the losses of all samples summed in FP16",
        expected=("loss-not-finite",),
        wrong=Setup(recipe="fp16", loss=sum_loss_in_fp16),
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
        about="a custom op takes the logarithm of a zero probability",
        expected=("activation-not-finite", "loss-not-finite"),
        where=("softmax.log", "loss"),
        wrong=Setup(recipe="bf16", model=lambda: _make_sharp_net(LogOfZero(0.0), 400.0)),
        right=Setup(recipe="bf16", model=lambda: _make_sharp_net(LogOfZero(1e-6), 400.0)),
    )
    yield Fault(
        name="nan-in-batch",
        about="one sample of one batch is NaN",
        expected=("bad-batch",),
        where=("step 31",),
        wrong=Setup(recipe="bf16", data=_make_batch_with_nan),
        right=bf16,
    )
    yield from _fp8_faults()
    yield Fault(
        name="moments-in-fp16",
        about="second moment and epsilon of Adam in FP16: both underflow to zero, and the update is inf",
        expected=("updates-too-large",),
        wrong=Setup(recipe="bf16", optimizer=FP16Moments, loss=small_loss),
        right=Setup(recipe="bf16", loss=small_loss),
    )
    yield Fault(
        name="bf16-accumulation",
        about="gradients of many microbatches summed in BF16: small ones no longer change the sum",
        expected=("bf16-accumulation",),
        wrong=Setup(recipe="bf16[master=split,gradients=bf16]", options={"accumulate": 32}),
        right=Setup(recipe="bf16[master=split]", options={"accumulate": 32}),
        steps=6,
    )


def _fp8_faults() -> Iterator[Fault]:
    yield Fault(
        name="fp8-no-scale",
        about="FP8 without scales: gradients are far below the smallest FP8 number",
        expected=("fp8-underflow",),
        wrong=Setup(recipe="fp8[scaling=none,products=all]", loss=lambda m, x, y: cross_entropy(m, x, y) * 1e-4),
        right=Setup(recipe="fp8[products=all]", loss=lambda m, x, y: cross_entropy(m, x, y) * 1e-4),
    )
    yield Fault(
        name="fp8-stale-scale",
        about="frozen FP8 scales while the inputs grow a hundredfold",
        expected=("fp8-stale-scale",),
        where=("inner.input",),
        wrong=Setup(recipe="fp8[products=all]", engine=FrozenScales, data=_make_growing_batch),
        right=Setup(recipe="fp8[products=all]", data=_make_growing_batch),
    )
    yield Fault(
        name="fp8-e4m3-gradients",
        about="unscaled gradients in E4M3, whose smallest number is 128 times that of E5M2",
        expected=("fp8-underflow",),
        wrong=Setup(recipe="fp8[products=all,scaling=none,gradients_format=e4m3]"),
        right=Setup(recipe="fp8[products=all]"),
    )


def _make_large_batch(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = make_batch(step)
    return inputs * 400, targets


def _make_growing_batch(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = make_batch(step)
    return inputs * (100 if step > 20 else 1), targets


def _make_batch_with_nan(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = make_batch(step)
    if step == 30:
        inputs[5, 3] = math.nan
    return inputs, targets


def _make_sharp_net(softmax: nn.Module | None, factor: float) -> Net:
    """A net whose gate has large logits."""
    model = Net(softmax=softmax)
    with torch.no_grad():
        model.gate.weight.mul_(factor)
    return model


FAULTS = {fault.name: fault for fault in _make_faults()}
