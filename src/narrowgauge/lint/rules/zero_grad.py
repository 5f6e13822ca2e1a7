"""Rule about gradients that are never cleared, or not in one branch of an if statement."""

from __future__ import annotations

import ast
import re

from narrowgauge.findings import WARNING
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.observations import Event
from narrowgauge.lint.interpreter.syntax import nodes_of
from narrowgauge.lint.rule import PYTORCH, Rule
from narrowgauge.lint.rules.loss_scaling import FRAMEWORKS

MISSING_ZERO_GRAD = Rule(
    name="missing-zero-grad",
    severity=WARNING,
    about="gradients are not cleared between two steps",
    why="backward adds to the gradients of all earlier steps: each step uses their sum",
    fix="call optimizer.zero_grad() once per step, before backward or after the step, on every path",
    url=f"{PYTORCH}/generated/torch.optim.Optimizer.zero_grad.html",
)
_CLEARS = re.compile(r"(zero|clear|reset|del)\w*_?grad|grad\w*_(zero|clear|reset|none)|set_to_none", re.IGNORECASE)


class MissingZeroGrad(Detector):
    """Checks scripts with one optimizer: loops that never clear, and branches of which only one does."""

    def on_end(self) -> None:
        steps = self.observations.of("step", "scaler-step")
        backwards = [event for event in self.observations.of("backward") if event.text not in ("elsewhere", "engine")]
        if len({event.optimizer for event in steps}) != 1 or self.context.libraries & {*FRAMEWORKS, "deepspeed"}:
            return
        calls = [node for node in nodes_of(self.context.tree) if isinstance(node, ast.Call)]
        cleared = [node.lineno for node in calls if getattr(node.func, "attr", "") == "zero_grad"]
        others = {word for word in self.context.words if _CLEARS.search(word)} - {"zero_grad"}
        if others or self._assigns_grad():
            return
        if not cleared:
            loops = {event.loop for event in steps if event.loop}
            for event in backwards:
                if event.loop in loops:
                    detail = "backward() and a step run for every batch, and nothing in the script clears the gradients"
                    self.judge(MISSING_ZERO_GRAD, event.node, True, detail)
        for node in nodes_of(self.context.tree) if cleared else ():
            if isinstance(node, ast.If) and node.orelse:
                self._check_branches(node, cleared, backwards, steps)

    def _assigns_grad(self) -> bool:
        return any(
            isinstance(target, ast.Attribute) and target.attr == "grad"
            for node in nodes_of(self.context.tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
        )

    def _check_branches(self, node: ast.If, cleared: list[int], backwards: list[Event], steps: list[Event]) -> None:
        for branch, other in ((node.body, node.orelse), (node.orelse, node.body)):
            lines, others = _lines(branch), _lines(other)
            inside = [event for event in backwards if event.line in lines]
            complete = all(
                any(event.line in where for event in events)
                for where in (lines, others)
                for events in (backwards, steps)
            )
            if inside and complete and all(line in others for line in cleared):
                detail = f"only the other branch of the condition in line {node.lineno} clears the gradients"
                self.judge(MISSING_ZERO_GRAD, inside[0].node, True, detail)


def _lines(body: list[ast.stmt]) -> range:
    return range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1)
