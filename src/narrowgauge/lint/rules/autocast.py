"""Rules about torch.autocast: backward inside of it, wrong arguments, deprecated names, losses that it refuses."""

from __future__ import annotations

import ast

from narrowgauge.findings import SERIOUS, WARNING
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.constructors import init_scale_position, is_old_amp
from narrowgauge.lint.interpreter.names import AUTOCASTS, DTYPES, SCALERS
from narrowgauge.lint.interpreter.values import Autocast, Const, Engine, Ref, Scaler, Tensor, Value
from narrowgauge.lint.rule import PYTORCH, Rule

AUTOCAST_BACKWARD = Rule(
    name="autocast-backward",
    severity=WARNING,
    about="backward runs inside autocast",
    why="backward uses the formats that forward chose; autocast around it is slower and not supported",
    fix="end the with block after the loss, and call backward outside of it",
    url=f"{PYTORCH}/amp.html#autocasting",
)
AUTOCAST_ARGUMENT = Rule(
    name="autocast-argument",
    severity=SERIOUS,
    about="an argument of autocast or GradScaler is in the wrong position",
    why="the first argument of torch.cuda.amp.autocast is `enabled`, that of torch.cuda.amp.GradScaler is `init_scale`",
    fix="pass it by keyword",
    url=f"{PYTORCH}/amp.html",
)
DEPRECATED_AMP = Rule(
    name="deprecated-amp",
    severity=WARNING,
    about="a deprecated part of AMP",
    why="it warns at every call, and will be removed",
    fix="use torch.amp, with the device type as first argument",
    url=f"{PYTORCH}/amp.html",
    advice=True,
)
BCE_AUTOCAST = Rule(
    name="bce-autocast",
    severity=SERIOUS,
    about="binary cross-entropy on probabilities inside autocast",
    why="CUDA's autocast raises RuntimeError: binary_cross_entropy is unsafe to autocast",
    fix="remove the sigmoid from the model, and use BCEWithLogitsLoss (F.binary_cross_entropy_with_logits) on the "
    "logits",
    url=f"{PYTORCH}/amp.html#prefer-binary-cross-entropy-with-logits-over-binary-cross-entropy",
)
REPLACEMENTS = {
    "torch.cuda.amp.autocast": "torch.autocast('cuda')",
    "torch.cuda.amp.autocast_mode.autocast": "torch.autocast('cuda')",
    "torch.cpu.amp.autocast": "torch.autocast('cpu')",
    "torch.cuda.amp.GradScaler": "torch.amp.GradScaler('cuda')",
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.amp.GradScaler('cuda')",
    "torch.cpu.amp.GradScaler": "torch.amp.GradScaler('cpu')",
    "torch.cuda.amp.custom_fwd": "torch.amp.custom_fwd(device_type='cuda')",
    "torch.cuda.amp.custom_bwd": "torch.amp.custom_bwd(device_type='cuda')",
    "apex.amp.initialize": "torch.autocast and torch.amp.GradScaler",
    "apex.amp.scale_loss": "torch.amp.GradScaler",
}
"""Deprecated names, and what to use instead."""
_VERSIONS = ("hasattr", "version", "TORCH_")
"""Words in a condition that selects code by the version of torch."""
_BCE = ("torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss")


class AutocastBackward(Detector):
    """Checks that backward runs outside of autocast and of engine.forward()."""

    def on_backward(self, call: Call, loss: Tensor | None) -> None:
        casting = call.state.casting
        if casting is not None:
            detail = f"backward() is called under autocast({casting.device or '...'})"
            self.judge(AUTOCAST_BACKWARD, call.node, True, detail)

    def on_engine_method(self, call: Call, engine: Engine, method: str) -> None:
        state = call.state
        if method == "backward" and (state.casting is not None or engine.site in state.contexts):
            where = "torch.autocast" if state.casting is not None else "engine.forward()"
            fix = "end the with block after the loss, and call engine.backward(loss) outside of it"
            self.judge(AUTOCAST_BACKWARD, call.node, True, f"engine.backward() is called inside {where}", fix)


class AutocastArgument(Detector):
    """Checks the first positional argument of the deprecated autocast and of scalers."""

    def on_result(self, call: Call, value: Value | None) -> None:
        if call.name in AUTOCASTS and isinstance(value, Autocast):
            first = call.arg(0)
            if is_old_amp(call) and isinstance(first, Ref) and first.name in DTYPES:
                detail = f"{first.name} is passed as `enabled`, so the format is FP16, not the one that was passed"
                fix = f"torch.autocast('{value.device}', dtype={first.name})"
                self.judge(AUTOCAST_ARGUMENT, call.node, True, detail, fix)
        elif call.name in SCALERS and isinstance(value, Scaler) and value.enabled != "False":
            start = call.arg(init_scale_position(call), "init_scale")
            if isinstance(start, Const) and isinstance(start.value, bool):
                detail = f"{start.value} is passed as `init_scale`, so the loss scale starts at {float(start.value):g}"
                self.judge(AUTOCAST_ARGUMENT, call.node, True, detail, f"enabled={start.value}")


class DeprecatedAmp(Detector):
    """Checks names, outside of code for another version of torch."""

    def on_call(self, call: Call) -> None:
        self._check(call.name, call.node)

    def on_decorator(self, node: ast.expr, value: Value | None) -> None:
        if isinstance(value, Ref):
            self._check(value.name, node)

    def _check(self, name: str, node: ast.AST) -> None:
        if name not in REPLACEMENTS or self.context.compatible:
            return
        tests = [ast.unparse(test) for _, test in self.context.guards]
        if not any(word in test for test in tests for word in _VERSIONS):
            self.judge(DEPRECATED_AMP, node, True, f"{name} is deprecated", f"use {REPLACEMENTS[name]} instead")


class BceAutocast(Detector):
    """Checks binary cross-entropy under CUDA's autocast."""

    def on_loss(self, call: Call, name: str) -> None:
        casting = call.state.casting
        if name in _BCE and casting is not None and casting.device in ("cuda", None):
            self.judge(BCE_AUTOCAST, call.node, True, f"{name.split('.')[-1]} is called under CUDA's autocast")
