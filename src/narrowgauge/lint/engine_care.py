"""Rules about what narrowgauge's Engine has in its care: only the engine steps, scales, clips, clears and casts it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from narrowgauge.findings import NOTE, ORDER, SERIOUS, WARNING
from narrowgauge.lint.names import CLIPS
from narrowgauge.lint.notebook import has_modulo
from narrowgauge.lint.state import State
from narrowgauge.lint.values import (
    Engine,
    Module,
    Optimizer,
    Params,
    Scaler,
    Seq,
    StateDict,
    Tensor,
    Value,
    heap,
)

if TYPE_CHECKING:
    from narrowgauge.lint.evaluate import Call, Evaluator

_SAVES = {"torch.save", "safetensors.torch.save_file", "safetensors.torch.save"}


class Care:
    """Looks at what others do to the models and optimizers of engines."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.notebook, self.follower = evaluator.notebook, evaluator.follower
        self.worst: dict[ast.AST, str] = {}
        """The severity of each zero_grad() so far."""

    def of(self, value: Value | None, state: State) -> Engine | None:
        """The engine that trains a model or steps an optimizer."""
        if not isinstance(value, Module | Optimizer):
            return None
        found = state.env.get(heap(value.site, "!engine"))
        return found if isinstance(found, Engine) else None

    def look(self, call: Call) -> None:
        """Judge a call by what it does to what is in an engine's care."""
        state, receiver = call.state, call.receiver
        if call.name in _SAVES:
            self._save(call)
        if isinstance(receiver, Scaler):
            self._scaler(call, receiver)
        elif call.method == "step" and isinstance(receiver, Optimizer):
            theirs = self.of(receiver, state) is not None
            detail = "step() is called on an optimizer that an engine steps"
            self.notebook.judge("engine-optimizer", call.node, theirs, detail)
        elif call.method == "zero_grad" and isinstance(receiver, Optimizer | Module):
            self._zero_grad(call, self.of(receiver, state))
        elif call.name in CLIPS:
            self._clip(call)
        elif isinstance(call.target, Module):
            self._forward(call, self.of(call.target, state))
        elif isinstance(receiver, Module) and call.method in ("forward", "generate"):
            self._forward(call, self.of(receiver, state))
        elif call.method == "backward" or call.name == "torch.autograd.backward":
            self._plain_backward(call, call.arg(0) if call.name else receiver)

    def _plain_backward(self, call: Call, loss: Value | None) -> None:
        if isinstance(loss, Tensor) and loss.scaler is not None:
            return  # the scaler is told of
        owners = self._owners(loss, call.state)
        detail = "backward() is called on a loss that comes from an engine's model"
        self.notebook.judge("engine-backward", call.node, bool(owners), detail)
        for engine in owners:
            if engine.site in call.state.engines:
                call.state.engines[engine.site] = frozenset({"backward"})  # one finding is enough: not the step as well

    def _owners(self, tensor: Value | None, state: State) -> list[Engine]:
        """The engines whose models made a tensor; none where another model had part in it."""
        makers = tensor.makers if isinstance(tensor, Tensor) else ()
        owners = [state.env.get(heap(site, "!engine")) for site in makers]
        known = [one for one in owners if isinstance(one, Engine)]
        return known if len(known) == len(makers) else []

    def _scaler(self, call: Call, scaler: Scaler) -> None:
        given = call.arg(0)
        if scaler.enabled == "False" or call.method not in ("scale", "unscale_", "step"):
            return
        if call.method == "scale":
            theirs = bool(self._owners(given, call.state))
            detail = "a scaler scales a loss that comes from an engine's model"
        else:
            theirs = self.of(given, call.state) is not None
            detail = f"scaler.{call.method}() is given an optimizer that an engine steps"
        self.notebook.judge("engine-scaler", call.node, theirs, detail)

    def _zero_grad(self, call: Call, engine: Engine | None) -> None:
        if engine is None:
            self.notebook.judge("engine-zero-grad", call.node, False)
            return
        phases = call.state.engines.get(engine.site, frozenset())
        here = any(node is engine.node for node in ast.walk(self.follower.scopes[-1]))
        if phases == {"fresh"} or (not phases and here):
            return  # gradients from before the engine are dropped
        tests = " ".join(ast.unparse(test) for _, test in self.follower.guards)
        if self.follower.handling or any(word in tests for word in ("finite", "inf", "nan")):
            return  # an update is given up on purpose
        rare = has_modulo(test for _, test in self.follower.guards)
        name = ast.unparse(call.node.func)
        if "backward" in phases:
            detail = f"{name}() stands between engine.backward() and engine.step()"
            severity = SERIOUS
        elif engine.accumulate != "1" and not rare:
            sure = engine.accumulate.isdigit()
            detail = f"{name}() drops the gradients of earlier microbatches (accumulate={engine.accumulate})"
            severity = SERIOUS if sure else WARNING
        else:
            detail, severity = f"{name}() is called beside an engine, whose step() drops the gradients itself", NOTE
        worst = self.worst.setdefault(call.node, severity)
        if ORDER[severity] <= ORDER[worst]:  # the ways over a line differ in what is lost
            self.worst[call.node] = severity
            self.notebook.judge("engine-zero-grad", call.node, True, detail, severity=severity)

    def _clip(self, call: Call) -> None:
        given = call.arg(0, "parameters")
        sites = given.models if isinstance(given, Params) else ()
        owners = [call.state.env.get(heap(site, "!engine")) for site in sites]
        engine = next((one for one in owners if isinstance(one, Engine)), None)
        limit = call.written(1, "max_norm")
        endless = limit is not None and "inf" in ast.unparse(limit)  # only to read the norm
        scaled = engine is not None and engine.compute == "fp16"
        by_value = call.name.endswith("clip_grad_value_")
        if engine is None or (not scaled and (endless or by_value)):
            self.notebook.judge("engine-clip", call.node, False)
            return
        name = call.name.split(".")[-1]
        detail = f"{name} is called on the parameters of an engine's model"
        if scaled:
            detail += ", whose gradients are multiplied by the loss scale (recipe fp16)"
        elif call.state.engines.get(engine.site) == frozenset({"stepped"}):
            detail += " after engine.step(), which has dropped the gradients"
        self.notebook.judge("engine-clip", call.node, True, detail, severity=SERIOUS if scaled else None)

    def _forward(self, call: Call, engine: Engine | None) -> None:
        """An engine's model is called: inside the context of an engine?"""
        state = call.state
        known = engine is not None and engine.site in state.engines
        if engine is None or state.contexts or engine.compute == "fp32":
            for rule in ("engine-outside", "engine-evaluation"):
                self.notebook.judge(rule, call.node, False)
            return
        if not known:
            return
        if self.follower.without_grad:
            severity = NOTE if engine.compute in ("bf16", "fp16", "tf32") else WARNING
            detail = f"{ast.unparse(call.node.func)}() is called without gradients, outside of engine.evaluating()"
            self.notebook.judge("engine-evaluation", call.node, True, detail, severity=severity)
        else:
            detail = f"{ast.unparse(call.node.func)}() is called outside of engine.forward() and engine.evaluating()"
            self.notebook.judge("engine-outside", call.node, True, detail)

    def _save(self, call: Call) -> None:
        given = call.arg(0, "obj")
        for one in given.items if isinstance(given, Seq) else (given,):
            if isinstance(one, StateDict):
                detail = f"the model's weights are BF16 alone under recipe {one.engine.recipe}"
                self.notebook.judge("engine-lean-save", one.node, one.engine.is_lean and one.what == "model", detail)
