"""Rules about the order of a training step with a GradScaler: scale, backward, unscale_, clip, step, update."""

from __future__ import annotations

import ast

from narrowgauge.findings import SERIOUS, WARNING
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.engines import engine_of
from narrowgauge.lint.interpreter.syntax import has_modulo
from narrowgauge.lint.interpreter.values import Optimizer, ScaleNumber, Scaler, Site
from narrowgauge.lint.rule import PYTORCH, Rule
from narrowgauge.lint.verdicts import Verdicts

CLIP_BEFORE_UNSCALE = Rule(
    name="clip-before-unscale",
    severity=SERIOUS,
    about="gradients are clipped while they are still multiplied by the loss scale",
    why="the norm is 65,536 times too large, so nearly every step is clipped, and after unscaling the update is 65,536 "
    "times too small: the model hardly learns, and nothing fails",
    fix="call scaler.unscale_(optimizer) between backward and clipping",
    url=f"{PYTORCH}/notes/amp_examples.html#gradient-clipping",
)
CLIP_AFTER_STEP = Rule(
    name="clip-after-step",
    severity=WARNING,
    about="gradients are clipped after the step that used them",
    why="the step used unclipped gradients; clipping them afterwards has no effect",
    fix="clip between backward (or unscale_) and the step",
    url=f"{PYTORCH}/notes/amp_examples.html#gradient-clipping",
)
UNSCALE_TWICE = Rule(
    name="unscale-twice",
    severity=SERIOUS,
    about="gradients are unscaled twice between two updates",
    why="GradScaler raises RuntimeError: unscale_() has already been called on this optimizer since the last update()",
    fix="unscale once per update; with gradient accumulation, inside the branch that steps",
    url=f"{PYTORCH}/notes/amp_examples.html#gradient-accumulation",
)
SCALER_WITHOUT_SCALE = Rule(
    name="scaler-without-scale",
    severity=SERIOUS,
    about="scaler.step() unscales gradients that were never scaled",
    why="gradients are divided by 65,536 although nothing multiplied them: updates are too small, or zero",
    fix="call scaler.scale(loss).backward()",
)
STEP_PAST_SCALER = Rule(
    name="step-past-scaler",
    severity=SERIOUS,
    about="optimizer.step() is called on gradients that are still multiplied by the loss scale",
    why="the step uses gradients that are 65,536 times too large, and steps with inf are not skipped",
    fix="call scaler.step(optimizer) instead, then scaler.update()",
)
SCALER_WITHOUT_UPDATE = Rule(
    name="scaler-without-update",
    severity=SERIOUS,
    about="scaler.step() without a scaler.update() anywhere",
    why="the scale never changes, and the second step raises RuntimeError: step() has already been called",
    fix="call scaler.update() once after the step",
)
UPDATE_BEFORE_STEP = Rule(
    name="update-before-step",
    severity=SERIOUS,
    about="scaler.update() is called before the gradients were checked",
    why="step() and unscale_() check the gradients; without one of them it raises AssertionError: No inf checks were "
    "recorded prior to update",
    fix="scaler.step(optimizer) first, then scaler.update()",
)
ZERO_GRAD_ORDER = Rule(
    name="zero-grad-order",
    severity=SERIOUS,
    about="gradients are cleared between backward and the step that should use them",
    why="every step runs without gradients: the model does not learn",
    fix="call zero_grad() before backward or after the step",
)
_READY = frozenset({"ready"})


class ClipOrder(Detector):
    """Checks the phase of the gradients where they are clipped."""

    def on_clip(self, call: Call) -> None:
        knows_scale = any(isinstance(value, ScaleNumber) for value in call.values)
        name = (call.name or call.method).split(".")[-1]
        for phase, _ in call.state.grads:
            if phase in ("scaled", "unscaled", "lost"):
                detail = f"{name} runs after scaler.scale(...).backward(), without unscale_ in between"
                self.judge(CLIP_BEFORE_UNSCALE, call.node, phase == "scaled" and not knows_scale, detail)
            if phase != "start":
                detail = f"{name} runs after the step and before the next backward"
                self.judge(CLIP_AFTER_STEP, call.node, phase == "used", detail)

    def on_end(self) -> None:
        steps = self.observations.of("step", "scaler-step")
        if len({event.optimizer for event in steps}) > 1:  # the clipped gradients may be another optimizer's
            self.verdicts.clear(CLIP_AFTER_STEP)


class ScalerOrder(Detector):
    """Checks the order of the scaler's methods."""

    def __init__(self, context: Context, verdicts: Verdicts) -> None:
        super().__init__(context, verdicts)
        self._again: set[ast.AST] = set()
        """Calls of unscale_() that some path reaches without an update since the last one."""

    def on_unscale(self, call: Call, scaler: Scaler, optimizer: Site) -> None:
        for stage in call.state.stages.get((scaler.site, optimizer), _READY):
            before = "unscale_()" if stage == "unscaled" else "step()"
            detail = f"unscale_() is called after {before}, without update() in between"
            self.judge(UNSCALE_TWICE, call.node, stage != "ready", detail)
        if call.state.stages.get((scaler.site, optimizer)) == frozenset({"unscaled"}):
            self._again.add(call.node)
        self._check_scaled(call, "unscale_()")

    def on_scaler_step(self, call: Call, scaler: Scaler, optimizer: Site) -> None:
        self._check_scaled(call, "scaler.step()")

    def on_scaler_update(self, call: Call, scaler: Scaler) -> None:
        state = call.state
        touched = any(site == scaler.site for site, _ in state.stages)
        unchecked = all(phase == "scaled" for phase, _ in state.grads)
        given = bool(call.node.args or call.node.keywords)  # a new scale, which needs no check
        if not unchecked or not touched:
            detail = "update() is called after backward() and before step() or unscale_()"
            self.judge(UPDATE_BEFORE_STEP, call.node, unchecked and not given, detail)

    def _check_scaled(self, call: Call, method: str) -> None:
        for phase, _ in call.state.grads:
            if phase not in ("start", "wiped"):
                detail = f"{method} follows backward() of a loss that was not scaled"
                self.judge(SCALER_WITHOUT_SCALE, call.node, phase == "plain", detail)

    def on_end(self) -> None:
        seen = self.observations
        updated = {event.scaler for event in seen.of("update")}
        for event in seen.of("scaler-step"):
            known = event.scaler in seen.scalers and event.scaler not in seen.escaped
            if known and event.scaler not in updated and updated <= set(seen.scalers):
                self.judge(
                    SCALER_WITHOUT_UPDATE, event.node, True, "nothing in the script calls this scaler's update()"
                )
        for unscale in seen.of("unscale"):
            updates = [event for event in seen.of("update") if event.scaler == unscale.scaler]
            rare = [event for event in updates if event.loop == unscale.loop and has_modulo(event.guards)]
            if unscale.loop and not unscale.guards and updates and len(rare) == len(updates):
                detail = (
                    f"unscale_() runs for every batch, update() only for some (line {updates[0].line}): the second "
                    "batch finds gradients that are already unscaled"
                )
                self.verdicts.judge(UNSCALE_TWICE, unscale.node, True, detail, certain=True)
            # The same conditions lead to both, so a path from one unscale_() to the next is possible.
            conditions = set(map(ast.unparse, unscale.guards))
            inside = [event for event in updates if conditions <= set(map(ast.unparse, event.guards))]
            joint = len(inside) == len(updates) and all(event.loop == unscale.loop for event in updates)
            if unscale.node in self._again and unscale.loop and updates and joint:
                detail = (
                    f"a path through the loop skips update() in line {updates[0].line}: the next batch calls "
                    "unscale_() a second time"
                )
                fix = "call scaler.update() on every path after unscale_(), also if the step is skipped"
                self.verdicts.judge(UNSCALE_TWICE, unscale.node, True, detail, fix, certain=True)


class StepOrder(Detector):
    """Checks the gradients at each step of an optimizer."""

    def on_scaler_step(self, call: Call, scaler: Scaler, optimizer: Site) -> None:
        self._check_cleared(call, optimizer)

    def on_optimizer_step(self, call: Call, optimizer: Optimizer) -> None:
        if engine_of(optimizer, call.state) is None:
            self._check_scaled(call)
        self._check_cleared(call, optimizer.site)

    def _check_scaled(self, call: Call) -> None:
        checked = self.context.checks_nonfinite
        for phase, _ in call.state.grads:
            if phase == "unscaled" and not checked:
                detail = "optimizer.step() follows unscale_(), so a step with inf or NaN is not skipped"
                self.judge(STEP_PAST_SCALER, call.node, True, detail)
            elif phase not in ("start", "wiped"):
                detail = "optimizer.step() follows scaler.scale(...).backward() and bypasses the scaler"
                self.judge(STEP_PAST_SCALER, call.node, phase == "scaled", detail)

    def _check_cleared(self, call: Call, optimizer: Site) -> None:
        for phase, of in call.state.grads:
            if phase != "start":
                detail = "zero_grad() is called between backward() and this step"
                self.judge(ZERO_GRAD_ORDER, call.node, phase == "wiped" and of == optimizer, detail)
