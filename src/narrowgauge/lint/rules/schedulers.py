"""Rule about learning-rate schedulers that step although the scaler skipped the optimizer's step."""

from __future__ import annotations

import re

from narrowgauge.findings import NOTE
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.syntax import dotted
from narrowgauge.lint.interpreter.values import Scheduler
from narrowgauge.lint.rule import PYTORCH, Rule

SCHEDULER_ON_SKIPPED_STEP = Rule(
    name="scheduler-on-skipped-step",
    severity=NOTE,
    about="the learning-rate scheduler also steps when the scaler skips the optimizer's step",
    why="the scale overflows in the first steps, so the schedule is ahead of the optimizer, and PyTorch warns that "
    "lr_scheduler.step() was called before optimizer.step()",
    fix="before = scaler.get_scale(); scaler.step(optimizer); scaler.update(); step the scheduler only if "
    "scaler.get_scale() >= before",
    url=f"{PYTORCH}/amp.html#gradient-scaling",
)
_NAME = re.compile(r"(lr_?)?sched(uler)?(_\w)?|\w_scheduler|\w*lr_scheduler", re.IGNORECASE)
"""Names of learning-rate schedulers that other code creates; a ``weight_scheduler`` is another thing."""


class SkippedSteps(Detector):
    """Checks schedulers that step in the same loop as the scaler, once per loop, if nothing reads the scale."""

    def on_call(self, call: Call) -> None:
        if call.method != "step" or call.node.args or call.node.keywords or call.receiver_node is None:
            return
        name = (dotted(call.receiver_node) or "").split(".")[-1]
        if isinstance(call.receiver, Scheduler) or (call.receiver is None and _NAME.fullmatch(name)):
            self.context.event("scheduler-step", call.node)

    def on_end(self) -> None:
        if {"get_scale", "_found_inf_per_device", "found_inf"} & self.context.words:
            return
        seen: set[int] = set()
        loops = {event.loop: event.line for event in self.observations.of("scaler-step") if event.loop}
        for event in self.observations.of("scheduler-step"):
            if event.loop in loops and event.loop not in seen:
                seen.add(event.loop)
                detail = f"it steps for every batch, also if scaler.step() in line {loops[event.loop]} skips the step"
                self.judge(SCHEDULER_ON_SKIPPED_STEP, event.node, True, detail)
