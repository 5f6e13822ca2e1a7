"""Rules about the training loop: gradient accumulation, and reads of the loss that wait for the GPU."""

from __future__ import annotations

import ast

from narrowgauge.findings import NOTE
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.observations import Event
from narrowgauge.lint.interpreter.syntax import dotted, nodes_of, words_of
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
    """Checks losses in loops that step only at every n-th batch, and in loops over microbatches."""

    def on_end(self) -> None:
        every = self.observations.of("step", "scaler-step")
        for backward in self.observations.of("backward"):
            loss = backward.value
            if not backward.loop or backward.guards or not isinstance(loss, Tensor):
                continue
            if loss.loss in ("", "summed") or loss.divided:
                continue
            steps = [event for event in every if event.loop == backward.loop]
            if steps and all(is_every_nth(step, self.context.tree) for step in steps):
                detail = f"backward() runs for every batch, the step in line {steps[0].line} only for every n-th"
                self.judge(ACCUMULATE_UNDIVIDED, backward.node, True, detail)
            elif not steps and _is_over_microbatches(backward.loop, self.context.tree):
                detail = "backward() runs for every microbatch, and the step after all of them"
                self.judge(ACCUMULATE_UNDIVIDED, backward.node, bool(every), detail)


class LostBatches(Detector):
    """Checks loops that clear the gradients at every batch and step only at every n-th, or after the loop."""

    def on_end(self) -> None:
        every, backwards = self.observations.of("step", "scaler-step"), self.observations.of("backward")
        is_single = len({event.optimizer for event in every}) == 1
        for cleared in self.observations.of("zero-grad", "model-zero-grad"):
            inside = [event for event in backwards if event.loop == cleared.loop and not event.guards]
            if not cleared.loop or cleared.guards or not inside:
                continue
            of_model = cleared.kind == "model-zero-grad" and is_single
            steps = [event for event in every if of_model or event.optimizer == cleared.optimizer]
            if not steps:
                continue
            rare = all(event.loop == cleared.loop and is_every_nth(event, self.context.tree) for event in steps)
            later = len(inside) == len(backwards)
            if later and not rare:
                around = _loops_around(cleared.loop, self.context.tree)
                later = all(event.loop in around for event in steps)
            if rare or later:
                when = "only for every n-th" if rare else "after all of them"
                detail = (
                    f"zero_grad() runs for every batch, the step in line {steps[0].line} {when}: the gradients of the "
                    "other batches are lost"
                )
                fix = "call zero_grad() after the step, inside the same condition" if rare else "call it after the step"
                self.verdicts.judge(ZERO_GRAD_ORDER, cleared.node, True, detail, fix, certain=True)


class LossRead(Detector):
    """Checks reads of the loss in the loop that calls backward.

    A loop over epochs that trains on all data at once (graphs are often trained like this) reads the loss once per
    epoch, as it should. Without a step of an optimizer, nothing is trained: gradients are compared in a test.
    """

    def on_end(self) -> None:
        if not self.observations.of("step", "scaler-step") or not self.observations.of("item"):
            return
        loops = (node for node in nodes_of(self.context.tree) if isinstance(node, ast.For | ast.AsyncFor))
        seen = {id(node) for node in loops if _counts_epochs(node)}
        for event in self.observations.of("item"):
            for backward in self.observations.of("backward"):
                name = event.text.removesuffix(".detach()")
                same = name and (backward.text == name or f"({name})" in backward.text)
                if event.loop and event.loop == backward.loop and not event.guards and same and event.loop not in seen:
                    seen.add(event.loop)
                    self.judge(SYNC_IN_LOOP, event.node, True, f"{event.text} is read for every batch")


def is_every_nth(event: Event, tree: ast.Module) -> bool:
    """Return whether a step runs at every n-th batch: ``... % n == ...`` with an n other than 1, or a counter."""
    for test in event.guards:
        for node in ast.walk(test):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                return not (isinstance(node.right, ast.Constant) and node.right.value == 1)
    return any(_is_counter(test, tree) for test in event.guards)


def _is_counter(test: ast.expr, tree: ast.Module) -> bool:
    """Return whether a condition is ``count >= n``, and the count goes up by 1 and is set to 0 after the condition."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.GtE | ast.Eq | ast.Gt):
        return False
    name = dotted(test.left)
    counted = reset = False
    for node in nodes_of(tree) if name else ():
        if isinstance(node, ast.AugAssign) and dotted(node.target) == name:
            counted = counted or (isinstance(node.value, ast.Constant) and node.value.value == 1)
        elif isinstance(node, ast.Assign) and dotted(node.targets[0]) == name and node.lineno > test.lineno:
            reset = reset or (isinstance(node.value, ast.Constant) and node.value.value == 0)
    return counted and reset


def _loops_around(loop: int, tree: ast.Module) -> set[int]:
    """Return the loops around a loop."""
    loops = [node for node in nodes_of(tree) if isinstance(node, ast.For | ast.While)]
    inner = next((node for node in loops if id(node) == loop), None)
    if inner is None:
        return set()
    return {id(one) for one in loops if one.lineno < inner.lineno <= (one.end_lineno or 0)}


def _is_over_microbatches(loop: int, tree: ast.Module) -> bool:
    """Return whether a loop is ``for ... in range(accumulation_steps)``."""
    for node in nodes_of(tree):
        if id(node) == loop and isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
            is_range = isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range"
            return is_range and any("accum" in word or "micro" in word for word in words_of(node.iter))
    return False


def _counts_epochs(loop: ast.For | ast.AsyncFor) -> bool:
    """Return whether an iteration is an epoch: ``for epoch in ...``, or ``for ... in range(epochs)``."""
    counted = [loop.target]
    for call in ast.walk(loop.iter):
        if isinstance(call, ast.Call) and (dotted(call.func) or "").split(".")[-1] in ("range", "trange"):
            counted += call.args
    return any("epoch" in word.lower() for part in counted for word in words_of(part))
