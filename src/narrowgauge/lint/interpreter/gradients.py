"""The training step: scale, backward, unscale, clip, step, update, zero_grad, and the phase of gradients after each.

GradScaler has a state for each optimizer between two updates: ready, unscaled (after unscale_), stepped. A second
unscale_ raises, as does unscale_ after step. step unscales if unscale_ was not called. update needs a step or an
unscale_ before it.
"""

from __future__ import annotations

import ast

from narrowgauge.lint.interpreter.call import NOT_HANDLED, Call, Handled
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.modules import note_trained_format
from narrowgauge.lint.interpreter.names import CLIPS
from narrowgauge.lint.interpreter.observer import Observer
from narrowgauge.lint.interpreter.values import (
    Function,
    Module,
    Optimizer,
    ScaleNumber,
    Scaler,
    Site,
    Tensor,
    Value,
)

_FRESH = ("plain", "scaled", "unscaled")


class Gradients:
    """Handles calls of scalers, optimizers and backward."""

    def __init__(self, context: Context) -> None:
        self.context, self.observations = context, context.observations

    def call(self, call: Call) -> Handled:
        """Apply the effect of a call on gradients."""
        receiver, method = call.receiver, call.method
        if call.name in CLIPS or (method == "clip_grad_norm_" and isinstance(receiver, Module)):
            self.context.notify(Observer.on_clip, call)
            return True, None
        if isinstance(receiver, Scaler):
            return True, self._scaler(call, receiver)
        if isinstance(receiver, Optimizer):
            return True, self._optimizer(call, receiver)
        if isinstance(call.target, Function):
            return NOT_HANDLED  # a function of the script: followed
        if method == "backward" or call.name == "torch.autograd.backward":
            return self._backward(call)
        if method == "zero_grad" and isinstance(receiver, Module):
            self.context.event("model-zero-grad", call.node, value=receiver)
            if any(phase in _FRESH for phase, _ in call.state.grads):
                call.state.move("lost")
            return True, None
        owner = call.receiver_node
        changes = method.endswith("_") and not method.startswith("_")
        if isinstance(owner, ast.Attribute) and owner.attr == "data":
            owner = owner.value
        if isinstance(owner, ast.Attribute) and owner.attr == "grad" and changes:
            if method in ("clamp_", "clip_") or (method in ("mul_", "div_") and self._is_clip(call)):
                self.context.notify(Observer.on_clip, call)
            elif method not in ("add_", "sub_", "nan_to_num_"):  # these do not change the scale
                call.state.move("lost")
            return True, None
        if call.name.startswith("torch._foreach_") and call.name.endswith("_"):
            call.state.move("lost")
        return NOT_HANDLED

    def _is_clip(self, call: Call) -> bool:
        """Return whether gradients are multiplied by a factor that was compared with a limit: clipped by hand."""
        factors = {node.id for arg in call.node.args for node in ast.walk(arg) if isinstance(node, ast.Name)}
        for _, test in self.context.guards:
            if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Lt | ast.Gt | ast.LtE | ast.GtE):
                compared = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
                if factors & compared:
                    return True
        return any("clip" in name for name in factors)

    def _backward(self, call: Call) -> Handled:
        loss = call.receiver if call.method == "backward" else call.arg(0)
        theirs = call.name != "torch.autograd.backward" and not isinstance(loss, Tensor)
        if theirs and (loss is not None or call.args):  # accelerator.backward(loss)
            call.state.move("lost")
            self.context.event("backward", call.node, text="elsewhere")
            return True, None
        tensor = loss if isinstance(loss, Tensor) else None
        scaler = tensor.scaler if tensor else None
        self.context.notify(Observer.on_backward, call, tensor)
        self.context.event(
            "backward", call.node, scaler=scaler, value=tensor, text=ast.unparse(call.receiver_node or call.node)
        )
        call.state.move("plain" if scaler is None else "scaled")
        return True, None

    def _scaler(self, call: Call, scaler: Scaler) -> Value | None:
        method, state = call.method, call.state
        off = scaler.enabled == "False"
        if method == "scale":
            self.context.event("scale", call.node, scaler=scaler.site)
            self.context.notify(Observer.on_scale, call, scaler)
            given = call.arg(0)
            base = given if isinstance(given, Tensor) else Tensor()
            site = None if off else scaler.site
            return Tensor(base.dtype, base.under, loss=base.loss, scaler=site, divided=base.divided)
        if method in ("get_scale", "state_dict", "load_state_dict", "is_enabled"):
            if method == "state_dict":
                self.context.event("scaler-state", call.node)
            return ScaleNumber() if method == "get_scale" else None
        if off:
            state.move("used" if method == "step" else "lost")
            return None
        if method == "unscale_":
            self._unscale(call, scaler)
        elif method == "step":
            self._step_by_scaler(call, scaler)
        elif method == "update":
            self.context.notify(Observer.on_scaler_update, call, scaler)
            self.context.event("update", call.node, scaler=scaler.site)
            state.stages = {pair: stage for pair, stage in state.stages.items() if pair[0] != scaler.site}
        elif not method.startswith(("get_", "set_", "_found_inf")):
            state.move("lost")
            self.observations.escaped.add(scaler.site)
        return None

    def _unscale(self, call: Call, scaler: Scaler) -> None:
        optimizer = _optimizer_site(call)
        self.context.notify(Observer.on_unscale, call, scaler, optimizer)
        self.context.event("unscale", call.node, scaler=scaler.site, optimizer=optimizer)
        call.state.stages[scaler.site, optimizer] = frozenset({"unscaled"})
        call.state.move("unscaled")

    def _step_by_scaler(self, call: Call, scaler: Scaler) -> None:
        optimizer, given = _optimizer_site(call), call.arg(0, "optimizer")
        self.context.notify(Observer.on_scaler_step, call, scaler, optimizer)
        if isinstance(given, Optimizer):
            note_trained_format(self.context, given, call.state)
        self.context.event("scaler-step", call.node, scaler=scaler.site, optimizer=optimizer)
        call.state.stages[scaler.site, optimizer] = frozenset({"stepped"})
        call.state.move("used")

    def _optimizer(self, call: Call, optimizer: Optimizer) -> Value | None:
        state = call.state
        if call.method == "step":
            self.context.notify(Observer.on_optimizer_step, call, optimizer)
            note_trained_format(self.context, optimizer, state)
            self.context.event("step", call.node, optimizer=optimizer.site)
            state.move("used")
        elif call.method == "zero_grad":
            self.context.event("zero-grad", call.node, optimizer=optimizer.site)
            state.grads = frozenset(
                ("wiped", optimizer.site) if phase in _FRESH else (("start", None) if phase == "used" else (phase, of))
                for phase, of in state.grads
            )
        elif call.method == "state_dict":
            self.context.event("optimizer-state", call.node)
        return None


def _optimizer_site(call: Call) -> Site:
    """Return the identity of the optimizer that a scaler's method gets."""
    given = call.arg(0, "optimizer")
    if isinstance(given, Optimizer):
        return given.site
    return ast.unparse(call.node.args[0]) if call.node.args else "?"
