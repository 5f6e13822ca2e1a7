"""Rules about narrowgauge's Engine: its model runs in its contexts, in its formats, and is saved by it."""

from __future__ import annotations

import ast

from narrowgauge.findings import NOTE, WARNING
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.engines import engine_of
from narrowgauge.lint.interpreter.state import State
from narrowgauge.lint.interpreter.values import (
    Autocast,
    Const,
    Engine,
    EngineContext,
    Module,
    Seq,
    StateDict,
    Value,
    heap,
)
from narrowgauge.lint.rule import Rule

ENGINE_AUTOCAST = Rule(
    name="engine-autocast",
    severity=WARNING,
    about="torch.autocast is used together with engine.forward() or engine.evaluating()",
    why="the engine's context opens the autocast of its recipe. Another one inside of it computes in another format "
    "than the recipe's; one around it casts where the recipe uses FP32",
    fix="remove it, and set the format in the recipe; torch.autocast(..., enabled=False) keeps a part in FP32",
)
ENGINE_OUTSIDE = Rule(
    name="engine-outside",
    severity=WARNING,
    about="an engine's model is called outside of engine.forward() and engine.evaluating()",
    why="without the engine's context there is no autocast: matrix products that should be 16-bit run in FP32 (lean "
    "models and models in FP8 open their own), and the loss is not computed in the recipe's formats",
    fix="compute the model's output and the loss inside `with engine.forward():`",
)
ENGINE_EVALUATION = Rule(
    name="engine-evaluation",
    severity=WARNING,
    about="an engine's model is evaluated outside of engine.evaluating()",
    why="the model is not evaluated in the formats it is trained in: matrix products that should be 16-bit run in FP32 "
    "(lean models and models in FP8 open their own autocast), and the model may be left in training mode",
    fix="use `with engine.evaluating():`, which disables gradients, sets evaluation mode, and restores both",
)
ENGINE_LEAN_SAVE = Rule(
    name="engine-lean-save",
    severity=WARNING,
    about="a checkpoint contains a lean model's state_dict() instead of the engine's",
    why="the weights of a lean recipe are BF16, and the low bits of each FP32 number are stored separately: a run that "
    "is resumed from the BF16 weights has lost 16 bits of each",
    fix="save engine.state_dict(), which has FP32 weights and all optimizer states; engine.load_state_dict() reads it",
)
ENGINE_COMPILED = Rule(
    name="engine-compiled",
    severity=NOTE,
    about="the model is compiled before it is passed to the engine",
    why="names in engine.state_dict() begin with _orig_mod., which the recipe's keep= and other programs do not "
    "expect, and the compiled code does not know which attention backends the recipe allows",
    fix="ng.Engine(model, optimizer, ..., compile=True) with the uncompiled model",
)
_SAVES = {"torch.save", "safetensors.torch.save_file", "safetensors.torch.save"}


class EngineAutocast(Detector):
    """Checks autocasts around and inside of an engine's contexts."""

    def on_with(self, node: ast.expr, value: Value | None, state: State) -> None:
        if isinstance(value, EngineContext):
            outer = state.casting
            if outer is not None and not outer.enabled:
                self.judge(ENGINE_AUTOCAST, node, True, "the engine's context is opened under torch.autocast")
        elif isinstance(value, Autocast) and state.contexts:
            wide = value.dtype in ("fp32", "fp64") or bool(value.enabled)
            self.judge(ENGINE_AUTOCAST, node, not wide, "torch.autocast is opened inside the engine's context")


class EngineOutside(Detector):
    """Checks that an engine's model is called inside of one of its contexts."""

    def on_call(self, call: Call) -> None:
        receiver = call.receiver
        if isinstance(call.target, Module):
            self._check(call, engine_of(call.target, call.state))
        elif isinstance(receiver, Module) and call.method in ("forward", "generate"):
            self._check(call, engine_of(receiver, call.state))

    def _check(self, call: Call, engine: Engine | None) -> None:
        state = call.state
        if engine is None or state.contexts or engine.compute == "fp32":
            for rule in (ENGINE_OUTSIDE, ENGINE_EVALUATION):
                self.judge(rule, call.node, False)
            return
        if engine.site not in state.engines:
            return  # the caller may have opened a context
        name = ast.unparse(call.node.func)
        if self.context.without_grad:
            severity = NOTE if engine.compute in ("bf16", "fp16", "tf32") else WARNING
            detail = f"{name}() is called without gradients, outside of engine.evaluating()"
            self.judge(ENGINE_EVALUATION, call.node, True, detail, severity=severity)
        else:
            detail = f"{name}() is called outside of engine.forward() and engine.evaluating()"
            self.judge(ENGINE_OUTSIDE, call.node, True, detail)

    def on_end(self) -> None:
        if any(not opened for _, opened in self.observations.contexts.values()):  # an ExitStack, a decorator, a choice
            self.verdicts.clear(ENGINE_OUTSIDE, ENGINE_EVALUATION)


class EngineLeanSave(Detector):
    """Checks which state_dict() is saved."""

    def on_call(self, call: Call) -> None:
        given = call.arg(0, "obj") if call.name in _SAVES else None
        for one in given.items if isinstance(given, Seq) else (given,):
            if isinstance(one, StateDict):
                detail = f"the model's weights are only BF16 with recipe {one.engine.recipe}"
                self.judge(ENGINE_LEAN_SAVE, one.node, one.engine.is_lean and one.what == "model", detail)

    def on_end(self) -> None:
        if self.observations.of("engine-state"):
            self.verdicts.clear(ENGINE_LEAN_SAVE)


class EngineCompiled(Detector):
    """Checks that the engine compiles the model itself."""

    def on_result(self, call: Call, value: Value | None) -> None:
        if not isinstance(value, Engine) or value.node is not call.node or value.model is None:
            return
        line = call.state.env.get(heap(value.model.site, "!compiled"))
        if isinstance(line, Const):
            detail = f"torch.compile wraps the model in line {line.value}, before it is passed to the engine"
            self.judge(ENGINE_COMPILED, call.node, True, detail)
