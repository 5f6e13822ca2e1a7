"""Rules about the order of a training step: scale, backward, unscale, clip, step, update, clear.

GradScaler's own states, for each optimizer between two updates: ready, unscaled (after unscale_), stepped. A second
unscale_ raises, as does unscale_ after step; step unscales what is not; update wants a step or an unscale_ before it.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from narrowgauge.lint.making import MINE_NOT, Handled
from narrowgauge.lint.names import CLIPS
from narrowgauge.lint.state import State
from narrowgauge.lint.values import Function, Module, Optimizer, ScaleNumber, Scaler, Site, Tensor, Value

if TYPE_CHECKING:
    from narrowgauge.lint.evaluate import Call, Evaluator

_READY = frozenset({"ready"})
_FRESH = ("plain", "scaled", "unscaled")


class Protocol:
    """Follows gradients from backward to the step."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.notebook, self.follower = evaluator, evaluator.notebook, evaluator.follower

    def call(self, call: Call) -> Handled:
        receiver, method = call.receiver, call.method
        if call.name in CLIPS or (method == "clip_grad_norm_" and isinstance(receiver, Module)):
            self._clip(call)
            return True, None
        if isinstance(receiver, Scaler):
            return True, self._scaler(call, receiver)
        if isinstance(receiver, Optimizer):
            return True, self._optimizer(call, receiver)
        if isinstance(call.target, Function):
            return MINE_NOT  # the script's own: followed
        if method == "backward" or call.name == "torch.autograd.backward":
            return self._backward(call)
        if method == "zero_grad" and isinstance(receiver, Module):
            if any(phase in _FRESH for phase, _ in call.state.grads):
                call.state.move("lost")
            return True, None
        owner = call.receiver_node
        changes = method.endswith("_") and not method.startswith("_")
        if isinstance(owner, ast.Attribute) and owner.attr == "grad" and changes:
            call.state.move("lost")
            return True, None
        if call.name.startswith("torch._foreach_") and call.name.endswith("_"):
            call.state.move("lost")
        return MINE_NOT

    def _backward(self, call: Call) -> Handled:
        loss = call.receiver if call.method == "backward" else call.arg(0)
        theirs = call.name != "torch.autograd.backward" and not isinstance(loss, Tensor)
        if theirs and (loss is not None or call.args):  # accelerator.backward(loss), engine.backward(loss)
            call.state.move("lost")
            self.follower.event("backward", call.node, text="elsewhere")
            return True, None
        tensor = loss if isinstance(loss, Tensor) else None
        scaler = tensor.scaler if tensor else None
        casting = call.state.casting
        if casting is not None:
            where = f"under autocast({casting.device or '...'})"
            self.notebook.judge("autocast-backward", call.node, True, f"backward() is called {where}")
        if scaler is None:
            self._unscaled_fp16(call, tensor)
        self.follower.event(
            "backward", call.node, scaler=scaler, value=tensor, text=ast.unparse(call.receiver_node or call.node)
        )
        call.state.move("plain" if scaler is None else "scaled")
        return True, None

    def _unscaled_fp16(self, call: Call, tensor: Tensor | None) -> None:
        under = tensor.under if tensor else None
        always = under is not None and under.dtype == "fp16" and not under.enabled
        is_bad = always and tensor is not None and not tensor.multiplied
        detail = "the loss was computed under autocast in FP16, and backward() is called on it as it is"
        self.notebook.judge("fp16-without-scaler", call.node, is_bad, detail)

    def _clip(self, call: Call) -> None:
        self.follower.event("clip", call.node)
        knows_scale = any(isinstance(value, ScaleNumber) for value in call.values)
        name = (call.name or call.method).split(".")[-1]
        for phase, _ in call.state.grads:
            if phase in ("scaled", "unscaled", "lost"):
                detail = f"{name} runs after scaler.scale(...).backward() with no unscale_ in between"
                self.notebook.judge("clip-before-unscale", call.node, phase == "scaled" and not knows_scale, detail)
            if phase != "start":
                detail = f"{name} runs after the step, and before the next backward"
                self.notebook.judge("clip-after-step", call.node, phase == "used", detail)

    def _scaler(self, call: Call, scaler: Scaler) -> Value | None:
        method, state = call.method, call.state
        off = scaler.enabled == "False"
        given = call.arg(0)
        if method == "scale":
            self._scale(call, scaler)
            base = given if isinstance(given, Tensor) else Tensor()
            site = None if off else scaler.site
            return Tensor(base.dtype, base.under, loss=base.loss, scaler=site, divided=base.divided)
        if method in ("get_scale", "state_dict", "load_state_dict", "is_enabled"):
            if method == "state_dict":
                self.follower.event("scaler-state", call.node)
            return ScaleNumber() if method == "get_scale" else None
        if off:
            state.move("used" if method == "step" else "lost")
            return None
        if method == "unscale_":
            self._unscale(call, scaler, self._optimizer_of(call))
        elif method == "step":
            self._step_by_scaler(call, scaler, self._optimizer_of(call))
        elif method == "update":
            self._update(call, scaler)
        elif not method.startswith(("get_", "set_", "_found_inf")):
            state.move("lost")
            self.notebook.escaped.add(scaler.site)
        return None

    def _optimizer_of(self, call: Call) -> Site:
        given = call.arg(0, "optimizer")
        if isinstance(given, Optimizer):
            return given.site
        return ast.unparse(call.node.args[0]) if call.node.args else "?"

    def _scale(self, call: Call, scaler: Scaler) -> None:
        tensor = call.arg(0)
        self.follower.event("scale", call.node, scaler=scaler.site)
        if scaler.enabled == "False":
            return
        place = self.notebook.scalers.get(scaler.site, call.node)
        under = tensor.under if isinstance(tensor, Tensor) else None
        if under is None:
            self.follower.event("scale-unknown", call.node, scaler=scaler.site, text=scaler.enabled)
        else:
            is_bad = under.dtype == "bf16" and scaler.enabled in ("", under.enabled)
            detail = f"the loss that is scaled in line {call.node.lineno} was computed under autocast in BF16"
            self.notebook.judge("scaler-with-bf16", place, is_bad, detail)

    def _unscale(self, call: Call, scaler: Scaler, optimizer: Site) -> None:
        state, pair = call.state, (scaler.site, optimizer)
        for stage in state.stages.get(pair, _READY):
            after = "unscale_()" if stage == "unscaled" else "step()"
            detail = f"unscale_() is called after {after}, with no update() in between"
            self.notebook.judge("unscale-twice", call.node, stage != "ready", detail)
        for phase, _ in state.grads:
            if phase not in ("start", "wiped"):
                detail = "unscale_() follows backward() on a loss that was not scaled"
                self.notebook.judge("scaler-without-scale", call.node, phase == "plain", detail)
        self.follower.event("unscale", call.node, scaler=scaler.site, optimizer=optimizer)
        state.stages[pair] = frozenset({"unscaled"})
        state.move("unscaled")

    def _step_by_scaler(self, call: Call, scaler: Scaler, optimizer: Site) -> None:
        state = call.state
        for phase, _ in state.grads:
            if phase not in ("start", "wiped"):
                detail = "scaler.step() follows backward() on a loss that was not scaled"
                self.notebook.judge("scaler-without-scale", call.node, phase == "plain", detail)
        self._check_wiped(call, optimizer, state)
        given = call.arg(0, "optimizer")
        if isinstance(given, Optimizer):
            self.evaluator.casts.stepping(given, state, call.node)
        self.follower.event("scaler-step", call.node, scaler=scaler.site, optimizer=optimizer)
        state.stages[scaler.site, optimizer] = frozenset({"stepped"})
        state.move("used")

    def _update(self, call: Call, scaler: Scaler) -> None:
        state = call.state
        touched = [stage for (site, _), stage in state.stages.items() if site == scaler.site]
        unlooked = all(phase == "scaled" for phase, _ in state.grads)
        given = bool(call.node.args or call.node.keywords)  # a new scale: nothing needs to be checked for it
        if not unlooked or not touched:
            detail = "update() comes after backward(), before any step() or unscale_()"
            self.notebook.judge("update-before-step", call.node, unlooked and not given, detail)
        self.follower.event("update", call.node, scaler=scaler.site)
        state.stages = {pair: stage for pair, stage in state.stages.items() if pair[0] != scaler.site}

    def _optimizer(self, call: Call, optimizer: Optimizer) -> Value | None:
        state = call.state
        if call.method == "step":
            if self.evaluator.engines.care.of(optimizer, state) is None:
                self._check_passed(call, state)
            self._check_wiped(call, optimizer.site, state)
            self.evaluator.casts.stepping(optimizer, state, None)
            self.follower.event("step", call.node, optimizer=optimizer.site)
            state.move("used")
        elif call.method == "zero_grad":
            state.grads = frozenset(
                ("wiped", optimizer.site) if phase in _FRESH else (("start", None) if phase == "used" else (phase, of))
                for phase, of in state.grads
            )
            self.follower.event("zero-grad", call.node, optimizer=optimizer.site)
        elif call.method == "state_dict":
            self.follower.event("optimizer-state", call.node)
        return None

    def _check_passed(self, call: Call, state: State) -> None:
        """Whether an optimizer steps by itself though a scaler scaled the loss."""
        tests = " ".join(ast.unparse(test) for _, test in self.follower.guards)
        checked = any(word in tests for word in ("finite", "inf", "nan"))
        for phase, _ in state.grads:
            if phase == "unscaled" and not checked:
                detail = "optimizer.step() follows unscale_(), so that a step with inf or NaN in it is taken, too"
                self.notebook.judge("step-past-scaler", call.node, True, detail)
            elif phase not in ("start", "wiped"):
                detail = "optimizer.step() follows scaler.scale(...).backward(); the scaler is passed by"
                self.notebook.judge("step-past-scaler", call.node, phase == "scaled", detail)

    def _check_wiped(self, call: Call, optimizer: Site, state: State) -> None:
        for phase, of in state.grads:
            if phase != "start":
                detail = "zero_grad() stands between backward() and this step"
                self.notebook.judge("zero-grad-order", call.node, phase == "wiped" and of == optimizer, detail)
