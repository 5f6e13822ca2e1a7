"""Rules about the training loop: gradient accumulation, and reads of the loss that wait for the GPU."""

from __future__ import annotations

import ast

from narrowgauge.findings import NOTE
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.observations import Event
from narrowgauge.lint.interpreter.syntax import dotted, has_modulo, words_of
from narrowgauge.lint.interpreter.values import Tensor
from narrowgauge.lint.rule import PYTORCH, Rule
from narrowgauge.lint.rules.scaler_order import ZERO_GRAD_ORDER

ACCUMULATE_UNDIVIDED = Rule(
    name="accumulate-undivided",
    severity=NOTE,
    about="gradients of several batches are added, and the loss is not divided by their number",
    why="the gradient is the sum instead of the mean: clipping, epsilon and SGD's learning rate have another effect, "
    "and FP16 overflows earlier",
    fix="loss = loss / accumulation_steps before backward",
    url=f"{PYTORCH}/notes/amp_examples.html#gradient-accumulation",
)
SYNC_IN_LOOP = Rule(
    name="sync-in-loop",
    severity=NOTE,
    about="the loss is read at every step",
    why="the CPU waits for the GPU, which is then idle until the next launch",
    fix="add up loss.detach(), and read it every n steps",
)


class UndividedLoss(Detector):
    """Checks losses in loops that step only at every n-th batch."""

    def on_end(self) -> None:
        for backward in self.observations.of("backward"):
            loss = backward.value
            steps = [event for event in self.observations.of("step", "scaler-step") if event.loop == backward.loop]
            if not backward.loop or backward.guards or not steps or not all(_is_every_nth(step) for step in steps):
                continue
            if isinstance(loss, Tensor) and loss.loss not in ("", "summed") and not loss.divided:
                detail = f"backward() runs for every batch, the step in line {steps[0].line} only for every n-th"
                self.judge(ACCUMULATE_UNDIVIDED, backward.node, True, detail)


class LostBatches(Detector):
    """Checks loops that clear the gradients at every batch and step only at every n-th."""

    def on_end(self) -> None:
        seen = self.observations
        for cleared in seen.of("zero-grad"):
            steps = [event for event in seen.of("step", "scaler-step") if event.optimizer == cleared.optimizer]
            inside = [event for event in seen.of("backward") if event.loop == cleared.loop and not event.guards]
            rare = steps and all(event.loop == cleared.loop and _is_every_nth(event) for event in steps)
            if cleared.loop and not cleared.guards and inside and rare:
                detail = (
                    f"zero_grad() runs for every batch, the step in line {steps[0].line} only for every n-th: the "
                    "gradients of the other batches are lost"
                )
                fix = "call zero_grad() after the step, inside the same condition"
                self.verdicts.judge(ZERO_GRAD_ORDER, cleared.node, True, detail, fix, certain=True)


class LossRead(Detector):
    """Checks reads of the loss in the loop that calls backward.

    A loop over epochs that trains on all data at once (graphs are often trained like this) reads the loss once per
    epoch, as it should. Without a step of an optimizer, nothing is trained: gradients are compared in a test.
    """

    def on_end(self) -> None:
        if not self.observations.of("step", "scaler-step") or not self.observations.of("item"):
            return
        loops = (node for node in ast.walk(self.context.tree) if isinstance(node, ast.For | ast.AsyncFor))
        seen = {id(node) for node in loops if _counts_epochs(node)}
        for event in self.observations.of("item"):
            for backward in self.observations.of("backward"):
                name = event.text.removesuffix(".detach()")
                same = name and (backward.text == name or f"({name})" in backward.text)
                if event.loop and event.loop == backward.loop and not event.guards and same and event.loop not in seen:
                    seen.add(event.loop)
                    self.judge(SYNC_IN_LOOP, event.node, True, f"{event.text} is read for every batch")


def _is_every_nth(event: Event) -> bool:
    """Return whether a step runs at every n-th batch: one condition ``... % n == ...``, with an n other than 1."""
    tests = [test for test in event.guards if has_modulo([test])]
    for test in tests:
        for node in ast.walk(test):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                return not (isinstance(node.right, ast.Constant) and node.right.value == 1)
    return False


def _counts_epochs(loop: ast.For | ast.AsyncFor) -> bool:
    """Return whether an iteration is an epoch: ``for epoch in ...``, or ``for ... in range(epochs)``."""
    counted = [loop.target]
    for call in ast.walk(loop.iter):
        if isinstance(call, ast.Call) and (dotted(call.func) or "").split(".")[-1] in ("range", "trange"):
            counted += call.args
    return any("epoch" in word.lower() for part in counted for word in words_of(part))
