"""Rules about narrowgauge's Engine: how it is made, and in which order its methods are called.

An engine has its model and its optimizers in its care from the line that makes it. A call of the model gives tensors
that remember it (``Tensor.makers``), so that a loss is known as the engine's wherever its backward is called. For each
engine that was made on a way, the way knows whether a microbatch is in (``State.engines``) and whether its forward() or
evaluating() is open (``State.contexts``). In a function that nobody in the script calls neither is known, and rules
that need them are silent there.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from narrowgauge.lint.engine_care import Care
from narrowgauge.lint.making import MINE_NOT, Handled
from narrowgauge.lint.names import words
from narrowgauge.lint.state import State
from narrowgauge.lint.values import (
    Autocast,
    Const,
    Engine,
    EngineContext,
    EngineMethod,
    Instance,
    Module,
    Optimizer,
    Seq,
    Site,
    StateDict,
    Tensor,
    Value,
    heap,
)

if TYPE_CHECKING:
    from narrowgauge.lint.evaluate import Call, Evaluator

_METHODS = set(words("forward evaluating backward scaled step flush state_dict load_state_dict save load no_sync"))
"""Methods after which an engine still has what it had; any other may let it go, as detach() would."""
_CRITERIA = ("loss", "criterion")


class Engines:
    """Follows engines and what is in their care."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.notebook, self.follower = evaluator, evaluator.notebook, evaluator.follower
        self.care = Care(evaluator)

    def call(self, call: Call) -> Handled:
        if call.name.startswith("narrowgauge.") and call.name.endswith(".Engine"):
            return True, self._make(call)
        if call.name == "narrowgauge.recipe":
            return True, call.arg(0, "text")
        if isinstance(call.target, EngineMethod):
            return True, self._method(call, call.target)
        if isinstance(call.receiver, Engine) and call.target is None:
            self._release(call.receiver, call.state)  # such as detach(): what it is leaves the engine's care
            return True, None
        self.care.look(call)
        kind = self.care.of(call.receiver, call.state)
        if call.method == "state_dict" and kind is not None:
            what = "model" if isinstance(call.receiver, Module) else "optimizer"
            self.evaluator.protocol.call(call)  # an optimizer's is noted there
            return True, StateDict(kind, call.node, what)
        return MINE_NOT

    def attribute(self, engine: Engine, name: str) -> Value | None:
        if name in _METHODS:
            return EngineMethod(engine, name)
        if name in ("model", "inner"):
            return engine.model
        return Seq(engine.optimizers) if name == "optimizers" else None

    def makers(self, call: Call) -> tuple[Site, ...]:
        """The models in an engine's care that a call's result comes from."""
        target = call.target
        if self.follower.without_grad:
            return ()
        if isinstance(target, Module) and self.care.of(target, call.state) is not None:
            return (target.site,)
        if isinstance(target, Module) and not target.name.lower().endswith(_CRITERIA):
            return ()  # another network: whoever trains it may go backward as they like
        given = [value for value in (*call.values, call.receiver) if isinstance(value, Tensor)]
        return tuple(dict.fromkeys(site for value in given for site in value.makers))

    def escape(self, engine: Engine, call: Call, method: str = "") -> None:
        """An engine, or a method of one, is handed to something that cannot be followed."""
        self.notebook.escaped.add(engine.site)
        call.state.engines.pop(engine.site, None)
        if method in ("forward", "evaluating"):
            self.notebook.contexts[call.node] = (engine.site, False)

    def enter(self, value: Value | None, at: ast.expr, state: State) -> None:
        """A ``with`` opens something."""
        if isinstance(value, EngineContext):
            self.notebook.contexts[value.node] = (value.engine, True)
            outer = state.casting
            if outer is not None and not outer.enabled:
                detail = "the engine's context is opened under torch.autocast"
                self.notebook.judge("engine-autocast", at, True, detail)
            state.contexts = (*state.contexts, value.engine)
        elif isinstance(value, Autocast) and state.contexts:
            wide = value.dtype in ("fp32", "fp64") or bool(value.enabled)
            detail = "torch.autocast is opened inside the engine's context"
            self.notebook.judge("engine-autocast", at, not wide, detail)

    # What engines are asked to do

    def _make(self, call: Call) -> Engine:
        model, given, recipe = call.arg(0, "model"), call.arg(1, "optimizer"), call.arg(2, "recipe")
        optimizers = given.items if isinstance(given, Seq) else (given,)
        text = recipe.value if isinstance(recipe, Const) and isinstance(recipe.value, str) else None
        if call.written(2, "recipe") is None and "**" not in call.keywords:
            text = "auto"
        made = Engine(
            self.follower.site(call.node),
            call.node,
            model if isinstance(model, Module) else None,
            tuple(one for one in optimizers if isinstance(one, Optimizer)),
            text,
            _accumulate(call),
        )
        if made.compute in ("fp16", "bf16", "fp8"):
            self.notebook.formats.add(made.compute)
        for one in (made.model, *made.optimizers):
            if one is not None:
                call.state.bind(heap(one.site, "!engine"), made)
        self._remember(call.written(0, "model"), made.model, call.state)
        if len(made.optimizers) == 1:
            self._remember(call.written(1, "optimizer"), made.optimizers[0], call.state)
        call.state.engines[made.site] = frozenset({"fresh"})
        self.follower.event("engine", call.node, value=made)
        line = call.state.env.get(heap(made.model.site, "!compiled")) if made.model else None
        if isinstance(line, Const):
            detail = f"torch.compile wraps the model in line {line.value}, before the engine gets it"
            self.notebook.judge("engine-compiled", call.node, True, detail)
        return made

    def _remember(self, node: ast.expr | None, value: Value | None, state: State) -> None:
        """An attribute that comes from elsewhere is the same thing in all methods of its object."""
        owner = self.evaluator.value(node.value, state) if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.Attribute) and isinstance(owner, Instance | Module):
            state.bind(heap(owner.site, node.attr), value)

    def _method(self, call: Call, method: EngineMethod) -> Value | None:
        engine, state, name = method.engine, call.state, method.name
        if name in ("forward", "evaluating"):
            self.notebook.contexts.setdefault(call.node, (engine.site, False))
            return EngineContext(engine.site, call.node, name == "evaluating")
        if name == "backward":
            self._backward(call, engine)
        elif name == "step":
            self._step(call, engine)
        elif name in ("state_dict", "save"):
            self.follower.event("engine-state", call.node)
        if name in ("step", "flush", "load_state_dict", "load") and engine.site in state.engines:
            state.engines[engine.site] = frozenset({"stepped"})
        return Tensor() if name == "scaled" else None

    def _backward(self, call: Call, engine: Engine) -> None:
        state = call.state
        state.move("lost")
        self.follower.event("backward", call.node, text="engine")
        self.follower.event("engine-backward", call.node, optimizer=engine.site)
        if state.casting is not None or engine.site in state.contexts:
            where = "torch.autocast" if state.casting is not None else "engine.forward()"
            detail = f"engine.backward() is called inside {where}"
            fix = "end the with block after the loss, and call engine.backward(loss) outside of it"
            self.notebook.judge("autocast-backward", call.node, True, detail, fix)
        divisor = self._divisor(call.written(0, "loss"), engine)
        if divisor is not None:
            detail = f"the loss is divided by {divisor}, and the engine divides it by accumulate={divisor} again"
            self.notebook.judge("engine-divided", call.node, True, detail)
        if engine.site in state.engines:
            state.engines[engine.site] = frozenset({"backward"})

    def _divisor(self, loss: ast.expr | None, engine: Engine) -> str | None:
        """What a loss is divided by before the engine gets it, where that is what the engine divides by as well."""
        wanted = {engine.accumulate}
        wanted |= {ast.unparse(one.value) for one in engine.node.keywords if one.arg == "accumulate"}
        if engine.accumulate in ("1", "?") or loss is None:
            return None
        for node in self._values_of(loss):
            if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
                divisor = ast.unparse(node.right if isinstance(node, ast.BinOp) else node.value)
                if divisor in wanted:
                    return divisor
        return None

    def _values_of(self, loss: ast.expr) -> list[ast.AST]:
        """An expression, or what the name that it is was last given in the same function."""
        if not isinstance(loss, ast.Name):
            return [loss]
        own = [
            node
            for node in ast.walk(self.follower.scopes[-1])
            if isinstance(node, ast.Assign | ast.AugAssign) and _names(node, loss.id) and node.lineno <= loss.lineno
        ]
        last = max(own, key=lambda node: node.lineno, default=None)
        return [] if last is None else [last, last.value]

    def _step(self, call: Call, engine: Engine) -> None:
        self.follower.event("engine-step", call.node, optimizer=engine.site)
        for phase in call.state.engines.get(engine.site, ()):
            empty = phase == "fresh" or (phase == "stepped" and engine.accumulate == "1")
            after = "before any engine.backward()" if phase == "fresh" else "twice after one engine.backward()"
            self.notebook.judge("engine-no-backward", call.node, empty, f"engine.step() is called {after}")

    def may_be_made(self, value: Value | None, at: ast.expr, state: State) -> None:
        """One side of a choice: an engine that is made there is not known to be made at all."""
        if isinstance(value, Engine) and value.node is at:
            self._release(value, state)

    def _release(self, engine: Engine, state: State) -> None:
        state.engines.pop(engine.site, None)
        for key in [key for key, value in state.env.items() if value == engine and key.endswith(".!engine")]:
            state.env.pop(key)


def _accumulate(call: Call) -> str:
    """How many microbatches make an update, as far as the script says; ``?`` where it does not."""
    written, known = call.written(-1, "accumulate"), call.arg(-1, "accumulate")
    if "**" in call.keywords:
        return "?"
    if isinstance(known, Const):
        return str(known.value)
    return "1" if written is None else ast.unparse(written)


def _names(node: ast.Assign | ast.AugAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)
