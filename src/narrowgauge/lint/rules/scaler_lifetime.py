"""Rules about where a scaler is created, and what else than a step uses scaled numbers."""

from __future__ import annotations

import ast

from narrowgauge.findings import SERIOUS, WARNING
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.names import SCALERS
from narrowgauge.lint.interpreter.names import is_optimizer as is_optimizer_name
from narrowgauge.lint.interpreter.values import Scaler, Seq, Tensor, Value
from narrowgauge.lint.rule import PYTORCH, Rule

SCALER_RECREATED = Rule(
    name="scaler-recreated",
    severity=WARNING,
    about="a GradScaler is created anew in every iteration of a loop",
    why="the loss scale starts at 65,536 again each time, so the steps that it takes to come down are skipped again",
    fix="create the scaler once, before the loop, next to the optimizer",
    url=f"{PYTORCH}/amp.html#gradient-scaling",
)
SCALED_PENALTY = Rule(
    name="scaled-penalty",
    severity=SERIOUS,
    about="gradients of a scaled loss are used in a penalty, without removing the scale",
    why="the gradients are 65,536 times too large, and so is their norm: the penalty dominates the loss or overflows",
    fix="multiply them by 1 / scaler.get_scale() before computing the penalty",
    url=f"{PYTORCH}/notes/amp_examples.html#gradient-penalty",
)
SCALED_LOSS_READ = Rule(
    name="scaled-loss-read",
    severity=WARNING,
    about="the value of a scaled loss is read",
    why="it is multiplied by the loss scale, 65,536 at the start, which changes during training: curves show the scale",
    fix="read the loss before scaler.scale(loss)",
    url=f"{PYTORCH}/amp.html#gradient-scaling",
)


SCALED_NORM_READ = Rule(
    name="scaled-norm-read",
    severity=WARNING,
    about="the norm of gradients is computed while they are multiplied by the loss scale",
    why="it is 65,536 times too large at the start, and jumps whenever the scale changes",
    fix="call scaler.unscale_(optimizer) before, or divide the norm by scaler.get_scale()",
    url=f"{PYTORCH}/notes/amp_examples.html#working-with-unscaled-gradients",
)


def _is_option(tests: tuple[ast.expr, ...]) -> bool:
    """Return whether conditions are plain options, ``if args.amp``, and not ``if scaler is None``."""
    return all(isinstance(test, ast.Name | ast.Attribute) for test in tests)


class ScalerRecreated(Detector):
    """Checks scalers that are created in a loop in which no optimizer is created: not for each model or fold."""

    def on_result(self, call: Call, value: Value | None) -> None:
        if is_optimizer_name(call.name):
            self.context.event("optimizer-made", call.node)
        elif call.name in SCALERS and isinstance(value, Scaler) and value.enabled != "False":
            self.context.event("scaler-made", call.node, scaler=value.site)

    def on_end(self) -> None:
        seen = self.observations
        with_optimizer = {event.loop for event in seen.of("optimizer-made")}
        stepped = {event.scaler for event in seen.of("scaler-step")}
        for event in seen.of("scaler-made"):
            if event.loop and event.loop not in with_optimizer and _is_option(event.guards) and event.scaler in stepped:
                detail = "the scaler is created inside a loop, and the optimizer outside of it"
                self.judge(SCALER_RECREATED, event.node, True, detail)


class ScaledPenalty(Detector):
    """Checks the first argument of ``torch.autograd.grad``, in scripts that never read the scale."""

    def on_call(self, call: Call) -> None:
        if call.name != "torch.autograd.grad":
            return
        given = call.arg(0, "outputs")
        parts = given.items if isinstance(given, Seq) else (given,)
        if any(isinstance(part, Tensor) and part.scaler is not None for part in parts):
            self.judge(SCALED_PENALTY, call.node, "get_scale" not in self.context.words, SCALED_PENALTY.about)


class ScaledLossRead(Detector):
    """Checks reads of losses that a scaler multiplied."""

    def on_number_read(self, call: Call, tensor: Tensor) -> None:
        if tensor.scaler is not None and "get_scale" not in self.context.words:
            self.judge(SCALED_LOSS_READ, call.node, True, "the loss that is read was multiplied by the loss scale")


class ScaledNormRead(Detector):
    """Checks norms of gradients, in scripts that never read the scale."""

    def on_call(self, call: Call) -> None:
        if call.method not in ("norm", "vector_norm") or "get_scale" in self.context.words:
            return
        if any(_is_gradient(node) for node in (call.receiver_node, *call.node.args)):
            phases = {phase for phase, _ in call.state.grads}
            if phases & {"scaled", "unscaled"}:
                self.judge(SCALED_NORM_READ, call.node, phases == {"scaled"}, SCALED_NORM_READ.about)


def _is_gradient(node: ast.expr | None) -> bool:
    """Return whether an expression is ``p.grad``, ``p.grad.data`` or ``p.grad.detach()``."""
    while isinstance(node, ast.Call | ast.Attribute):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            return True
        if isinstance(node, ast.Attribute) and node.attr not in ("data", "detach", "float", "view", "flatten"):
            return False
        node = node.func if isinstance(node, ast.Call) else node.value
    return False
