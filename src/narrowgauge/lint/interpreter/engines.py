"""narrowgauge's Engine: how it is created, what it owns, and the order of its methods.

An engine owns its model and its optimizers from the line that creates it. Tensors remember which engine's model
computed them (``Tensor.makers``), so that a loss is known as the engine's wherever its backward is called. For each
engine created on a path, the path knows whether a microbatch was accumulated (``State.engines``) and whether its
forward() or evaluating() is open (``State.contexts``). Neither is known in a function that nothing in the script calls.
"""

from __future__ import annotations

import ast

from narrowgauge.lint.interpreter.call import NOT_HANDLED, Call, Handled
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.names import words
from narrowgauge.lint.interpreter.observer import Observer
from narrowgauge.lint.interpreter.state import State
from narrowgauge.lint.interpreter.values import (
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

_METHODS = set(words("forward evaluating backward scaled step flush state_dict load_state_dict save load no_sync"))
"""Methods after which an engine still owns its model; any other may release it, as detach() would."""
_CRITERIA = ("loss", "criterion")


class Engines:
    """Handles engines, and calls that use what they own."""

    def __init__(self, context: Context) -> None:
        self.context, self.observations = context, context.observations

    def call(self, call: Call) -> Handled:
        """Apply the effect of a call on engines."""
        if call.name.startswith("narrowgauge.") and call.name.endswith(".Engine"):
            return True, self._create(call)
        if call.name == "narrowgauge.recipe":
            return True, call.arg(0, "text")
        if isinstance(call.target, EngineMethod):
            return True, self._method(call, call.target)
        if isinstance(call.receiver, Engine) and call.target is None:
            self._release(call.receiver, call.state)  # such as detach(), after which the engine owns nothing
            return True, None
        if is_plain_backward(call):
            self._plain_backward(call)
        owner = engine_of(call.receiver, call.state)
        if call.method == "state_dict" and owner is not None:
            what = "model" if isinstance(call.receiver, Module) else "optimizer"
            if what == "optimizer":
                self.context.event("optimizer-state", call.node)
            return True, StateDict(owner, call.node, what)
        return NOT_HANDLED

    def attribute(self, engine: Engine, name: str) -> Value | None:
        """Return the value of an engine's attribute."""
        if name in _METHODS:
            return EngineMethod(engine, name)
        if name in ("model", "inner"):
            return engine.model
        return Seq(engine.optimizers) if name == "optimizers" else None

    def makers(self, call: Call) -> tuple[Site, ...]:
        """Return the models of engines that computed the result of a call."""
        target = call.target
        if self.context.without_grad:
            return ()
        if isinstance(target, Module) and engine_of(target, call.state) is not None:
            return (target.site,)
        if isinstance(target, Module) and not target.name.lower().endswith(_CRITERIA):
            return ()  # another network, which another loop may train
        given = [value for value in (*call.values, call.receiver) if isinstance(value, Tensor)]
        return tuple(dict.fromkeys(site for value in given for site in value.makers))

    def escape(self, engine: Engine, call: Call, method: str = "") -> None:
        """Record that an engine, or a method of one, is passed to code that cannot be followed."""
        self.observations.escaped.add(engine.site)
        call.state.engines.pop(engine.site, None)
        if method in ("forward", "evaluating"):
            self.observations.contexts[call.node] = (engine.site, False)

    def enter(self, value: Value | None, state: State) -> None:
        """Open an engine's context, if a ``with`` statement enters one."""
        if isinstance(value, EngineContext):
            self.observations.contexts[value.node] = (value.engine, True)
            state.contexts = (*state.contexts, value.engine)

    def _create(self, call: Call) -> Engine:
        model, given, recipe = call.arg(0, "model"), call.arg(1, "optimizer"), call.arg(2, "recipe")
        optimizers = given.items if isinstance(given, Seq) else (given,)
        text = recipe.value if isinstance(recipe, Const) and isinstance(recipe.value, str) else None
        if call.written(2, "recipe") is None and "**" not in call.keywords:
            text = "auto"
        made = Engine(
            self.context.site(call.node),
            call.node,
            model if isinstance(model, Module) else None,
            tuple(one for one in optimizers if isinstance(one, Optimizer)),
            text,
            _accumulate(call),
        )
        if made.compute in ("fp16", "bf16", "fp8"):
            self.observations.formats.add(made.compute)
        for one in (made.model, *made.optimizers):
            if one is not None:
                call.state.bind(heap(one.site, "!engine"), made)
        self._remember(call.written(0, "model"), made.model, call.state)
        if len(made.optimizers) == 1:
            self._remember(call.written(1, "optimizer"), made.optimizers[0], call.state)
        call.state.engines[made.site] = frozenset({"fresh"})
        self.context.event("engine", call.node, value=made)
        return made

    def _remember(self, node: ast.expr | None, value: Value | None, state: State) -> None:
        """Make an attribute that other code created the same object in all methods of its owner."""
        owner = self.context.value(node.value, state) if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.Attribute) and isinstance(owner, Instance | Module):
            state.bind(heap(owner.site, node.attr), value)

    def _method(self, call: Call, method: EngineMethod) -> Value | None:
        engine, state, name = method.engine, call.state, method.name
        self.context.notify(Observer.on_engine_method, call, engine, name)
        if name in ("forward", "evaluating"):
            self.observations.contexts.setdefault(call.node, (engine.site, False))
            return EngineContext(engine.site, call.node, name == "evaluating")
        if name == "backward":
            self._backward(call, engine)
        elif name == "step":
            self.context.event("engine-step", call.node, optimizer=engine.site)
        elif name in ("state_dict", "save"):
            self.context.event("engine-state", call.node)
        if name in ("step", "flush", "load_state_dict", "load") and engine.site in state.engines:
            state.engines[engine.site] = frozenset({"stepped"})
        return Tensor() if name == "scaled" else None

    def _backward(self, call: Call, engine: Engine) -> None:
        state = call.state
        state.move("lost")
        self.context.event("backward", call.node, text="engine")
        self.context.event("engine-backward", call.node, optimizer=engine.site)
        if engine.site in state.engines:
            state.engines[engine.site] = frozenset({"backward"})

    def _plain_backward(self, call: Call) -> None:
        """Count ``loss.backward()`` as the engine's backward: the line has a finding, and the step needs none."""
        for engine in engines_of(backward_loss(call), call.state):
            if engine.site in call.state.engines:
                call.state.engines[engine.site] = frozenset({"backward"})

    def maybe_created(self, value: Value | None, at: ast.expr, state: State) -> None:
        """Forget an engine that is created on one side of a choice: it may not exist."""
        if isinstance(value, Engine) and value.node is at:
            self._release(value, state)

    def _release(self, engine: Engine, state: State) -> None:
        state.engines.pop(engine.site, None)
        for key in [key for key, value in state.env.items() if value == engine and key.endswith(".!engine")]:
            state.env.pop(key)


def _accumulate(call: Call) -> str:
    """Return the expression for the number of microbatches per update; ``?`` if it is unknown."""
    written, known = call.written(-1, "accumulate"), call.arg(-1, "accumulate")
    if "**" in call.keywords:
        return "?"
    if isinstance(known, Const):
        return str(known.value)
    return "1" if written is None else ast.unparse(written)


def engine_of(value: Value | None, state: State) -> Engine | None:
    """Return the engine that owns a model or an optimizer."""
    if not isinstance(value, Module | Optimizer):
        return None
    found = state.env.get(heap(value.site, "!engine"))
    return found if isinstance(found, Engine) else None


def engines_of(tensor: Value | None, state: State) -> list[Engine]:
    """Return the engines whose models computed a tensor; none if another model took part."""
    makers = tensor.makers if isinstance(tensor, Tensor) else ()
    owners = [state.env.get(heap(site, "!engine")) for site in makers]
    known = [one for one in owners if isinstance(one, Engine)]
    return known if len(known) == len(makers) else []


def is_plain_backward(call: Call) -> bool:
    """Return whether a call is ``loss.backward()``, not an engine's."""
    is_backward = call.method == "backward" or call.name == "torch.autograd.backward"
    return is_backward and not isinstance(call.receiver, Engine)


def backward_loss(call: Call) -> Value | None:
    """Return the loss of a plain backward; None if a scaler multiplied it."""
    loss = call.arg(0) if call.name else call.receiver
    return None if isinstance(loss, Tensor) and loss.scaler is not None else loss
