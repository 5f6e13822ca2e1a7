"""Rules about narrowgauge's Engine: only the engine runs backward, scales, clips, steps and clears for its model."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from narrowgauge.findings import NOTE, ORDER, SERIOUS, WARNING
from narrowgauge.lint.detector import Detector
from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.engines import backward_loss, engine_of, engines_of, is_plain_backward
from narrowgauge.lint.interpreter.names import CLIPS
from narrowgauge.lint.interpreter.syntax import has_modulo, nodes_of
from narrowgauge.lint.interpreter.values import Engine, Module, Optimizer, Params, Scaler, Tensor, heap
from narrowgauge.lint.rule import Rule
from narrowgauge.lint.verdicts import Verdicts

ENGINE_BACKWARD = Rule(
    name="engine-backward",
    severity=SERIOUS,
    about="loss.backward() is called on a loss that comes from an engine's model",
    why="the engine does not see it: the loss is neither scaled nor divided by accumulate, and engine.step() raises "
    "UsageError: engine.step before engine.backward",
    fix="engine.backward(loss)",
)
ENGINE_NO_BACKWARD = Rule(
    name="engine-no-backward",
    severity=SERIOUS,
    about="engine.step() is called without an engine.backward() before it",
    why="it raises UsageError: engine.step before engine.backward, because there are no gradients",
    fix="call engine.backward(loss) instead of loss.backward(), once before each engine.step()",
)
ENGINE_OPTIMIZER = Rule(
    name="engine-optimizer",
    severity=SERIOUS,
    about="optimizer.step() is called on an optimizer that an engine steps",
    why="the weights are updated twice, or with gradients that were neither unscaled, clipped nor checked for inf and "
    "NaN; after engine.step() there are no gradients, and it does nothing",
    fix="remove it: engine.step() unscales, checks, clips and steps",
)
ENGINE_ZERO_GRAD = Rule(
    name="engine-zero-grad",
    severity=WARNING,
    about="zero_grad() is called on a model or optimizer of an engine",
    why="engine.step() drops the gradients after each update; if they are dropped earlier, microbatches are missing "
    "from the update, which then fails or uses too few of them",
    fix="remove it",
)
ENGINE_SCALER = Rule(
    name="engine-scaler",
    severity=SERIOUS,
    about="a GradScaler is used together with an engine",
    why="the engine scales the loss itself if the recipe needs it (FP16), and divides gradients by its own scale only: "
    "the factor of another scaler is not removed, or removed twice",
    fix="remove the scaler: engine.backward(loss), then engine.step()",
)
ENGINE_CLIP = Rule(
    name="engine-clip",
    severity=WARNING,
    about="gradients of an engine's model are clipped by hand",
    why="the engine clips while it unscales and checks. By hand, gradients are clipped while they are multiplied by "
    "the loss scale (FP16), and with gradient accumulation a partial sum is clipped",
    fix="remove it, and create the engine with clip_norm=...; step.grad_norm is the norm before clipping",
)
ENGINE_DIVIDED = Rule(
    name="engine-divided",
    severity=SERIOUS,
    about="the loss is divided by the number of microbatches before engine.backward() divides it again",
    why="gradients are too small by that factor: clipping, epsilon and SGD's learning rate have another effect",
    fix="engine.backward(loss) with the undivided loss",
)
ENGINE_TWO_NETWORKS = Rule(
    name="engine-two-networks",
    severity=SERIOUS,
    about="one engine has the optimizers of two networks that are trained in turns",
    why="engine.step() steps every optimizer whose parameters have gradients, and the generator's loss gives the "
    "discriminator gradients as well: each network is trained on the other's loss",
    fix="pass the optimizer that should step: engine.step(discriminator_optimizer), "
    "engine.step(generator_optimizer); the gradients of the other are dropped",
)


class EngineBackward(Detector):
    """Checks calls of backward and step: of the engine, and of losses from its model."""

    def on_call(self, call: Call) -> None:
        if not is_plain_backward(call) or isinstance(call.target, Module):
            return
        loss = call.arg(0) if call.name else call.receiver
        if not (isinstance(loss, Tensor) and loss.scaler is not None):  # else engine-scaler reports it
            owners = engines_of(backward_loss(call), call.state)
            detail = "backward() is called on a loss that comes from an engine's model"
            self.judge(ENGINE_BACKWARD, call.node, bool(owners), detail)

    def on_engine_method(self, call: Call, engine: Engine, method: str) -> None:
        if method != "step":
            return
        for phase in call.state.engines.get(engine.site, ()):
            empty = phase == "fresh" or (phase == "stepped" and engine.accumulate == "1")
            when = "before any engine.backward()" if phase == "fresh" else "twice after one engine.backward()"
            self.judge(ENGINE_NO_BACKWARD, call.node, empty, f"engine.step() is called {when}")

    def on_end(self) -> None:
        seen = self.observations
        if not seen.of("engine"):
            return
        inputs = [scope for scope in _functions(self.context.tree) if _reads_input_gradients(scope)]
        for verdict in self.verdicts.of(ENGINE_BACKWARD):
            if any(_contains(scope, verdict.line) for scope in inputs):
                verdict.good = True
        explained = self.verdicts.are_bad(ENGINE_BACKWARD)
        elsewhere = any(event.text == "elsewhere" for event in seen.of("backward"))  # it may be this engine's
        if explained or elsewhere:
            return
        called = {event.optimizer for event in seen.of("engine-backward")}
        for event in seen.of("engine-step"):
            if event.optimizer not in called and event.optimizer not in seen.escaped:
                detail = "engine.step() is called, and nothing in the script calls engine.backward()"
                self.verdicts.judge(ENGINE_NO_BACKWARD, event.node, True, detail, certain=True)


class EngineOptimizer(Detector):
    """Checks steps and clipping by hand, and scalers."""

    def on_call(self, call: Call) -> None:
        receiver, state = call.receiver, call.state
        if isinstance(receiver, Scaler):
            self._check_scaler(call, receiver)
        elif call.method == "step" and isinstance(receiver, Optimizer):
            detail = "step() is called on an optimizer that an engine steps"
            self.judge(ENGINE_OPTIMIZER, call.node, engine_of(receiver, state) is not None, detail)
        elif call.name in CLIPS:
            self._check_clip(call)

    def _check_scaler(self, call: Call, scaler: Scaler) -> None:
        given = call.arg(0)
        if scaler.enabled == "False" or call.method not in ("scale", "unscale_", "step"):
            return
        if call.method == "scale":
            is_engines = bool(engines_of(given, call.state))
            detail = "a scaler scales a loss that comes from an engine's model"
        else:
            is_engines = engine_of(given, call.state) is not None
            detail = f"scaler.{call.method}() gets an optimizer that an engine steps"
        self.judge(ENGINE_SCALER, call.node, is_engines, detail)

    def _check_clip(self, call: Call) -> None:
        given = call.arg(0, "parameters")
        sites = given.models if isinstance(given, Params) else ()
        owners = [call.state.env.get(heap(site, "!engine")) for site in sites]
        engine = next((one for one in owners if isinstance(one, Engine)), None)
        limit = call.written(1, "max_norm")
        unlimited = limit is not None and "inf" in ast.unparse(limit)  # only to read the norm
        scaled = engine is not None and engine.compute == "fp16"
        by_value = call.name.endswith("clip_grad_value_")
        if engine is None or (not scaled and (unlimited or by_value)):
            self.judge(ENGINE_CLIP, call.node, False)
            return
        detail = f"{call.name.split('.')[-1]} is called on the parameters of an engine's model"
        if scaled:
            detail += ", whose gradients are multiplied by the loss scale (recipe fp16)"
        elif call.state.engines.get(engine.site) == frozenset({"stepped"}):
            detail += " after engine.step(), which has dropped the gradients"
        self.judge(ENGINE_CLIP, call.node, True, detail, severity=SERIOUS if scaled else "")


class EngineZeroGrad(Detector):
    """Checks where the gradients of an engine's model are cleared by hand."""

    def __init__(self, context: Context, verdicts: Verdicts) -> None:
        super().__init__(context, verdicts)
        self._worst: dict[ast.AST, str] = {}
        """The worst severity of each zero_grad() so far: paths differ in what is lost."""

    def on_call(self, call: Call) -> None:
        if call.method != "zero_grad" or not isinstance(call.receiver, Optimizer | Module):
            return
        engine = engine_of(call.receiver, call.state)
        if engine is None:
            self.judge(ENGINE_ZERO_GRAD, call.node, False)
            return
        phases = call.state.engines.get(engine.site, frozenset())
        here = any(node is engine.node for node in ast.walk(self.context.scopes[-1]))
        if phases == {"fresh"} or (not phases and here):
            return  # drops gradients from before the engine
        if self.context.handling or self.context.checks_nonfinite:
            return  # skips an update on purpose
        detail, severity = self._describe(ast.unparse(call.node.func), engine, "backward" in phases)
        worst = self._worst.setdefault(call.node, severity)
        if ORDER[severity] <= ORDER[worst]:
            self._worst[call.node] = severity
            self.judge(ENGINE_ZERO_GRAD, call.node, True, detail, severity=severity)

    def _describe(self, name: str, engine: Engine, has_gradients: bool) -> tuple[str, str]:
        if has_gradients:
            return f"{name}() is called between engine.backward() and engine.step()", SERIOUS
        if engine.accumulate != "1" and not has_modulo(test for _, test in self.context.guards):
            detail = f"{name}() drops the gradients of earlier microbatches (accumulate={engine.accumulate})"
            return detail, SERIOUS if engine.accumulate.isdigit() else WARNING
        return f"{name}() is called, and the engine's step() drops the gradients itself", NOTE

    def on_end(self) -> None:
        engines = self.observations.of("engine")
        for verdict in self.verdicts.of(ENGINE_ZERO_GRAD):
            # The generator's step leaves gradients in the discriminator, which the script has to clear.
            if len(engines) > 1 and verdict.severity != SERIOUS:
                verdict.good = True


class EngineDivided(Detector):
    """Checks losses that are divided by the number of microbatches before the engine divides them."""

    def on_engine_method(self, call: Call, engine: Engine, method: str) -> None:
        divisor = self._divisor(call.written(0, "loss"), engine) if method == "backward" else None
        if divisor is not None:
            detail = f"the loss is divided by {divisor}, and the engine divides it by accumulate={divisor} again"
            self.judge(ENGINE_DIVIDED, call.node, True, detail)

    def _divisor(self, loss: ast.expr | None, engine: Engine) -> str | None:
        """Return the divisor of a loss, if it is the one that the engine divides by."""
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
        """Return an expression, or the last assignment to a name in the same function."""
        if not isinstance(loss, ast.Name):
            return [loss]
        own = [
            node
            for node in ast.walk(self.context.scopes[-1])
            if isinstance(node, ast.Assign | ast.AugAssign) and _assigns(node, loss.id) and node.lineno <= loss.lineno
        ]
        last = max(own, key=lambda node: node.lineno, default=None)
        return [] if last is None else [last, last.value]


class EngineTwoNetworks(Detector):
    """Checks engines with an optimizer for each of two networks, and a backward and a step for each in one loop."""

    def on_end(self) -> None:
        for event in self.observations.of("engine"):
            if isinstance(event.value, Engine):
                self._check(event.value)

    def _check(self, engine: Engine) -> None:
        trained = {self._network_of(optimizer) for optimizer in engine.optimizers}
        if len(engine.optimizers) < 2 or None in trained or len(trained) < 2:
            return
        seen = self.observations
        for loop in {event.loop for event in seen.of("engine-step")} - {0}:
            steps, backwards = (
                {event.node for event in seen.of(kind) if event.loop == loop and event.optimizer == engine.site}
                for kind in ("engine-step", "engine-backward")
            )
            steps = {node for node in steps if not getattr(node, "args", ())}  # step(optimizer) steps only that one
            if len(steps) > 1 and len(backwards) > 1:
                lines = " and ".join(str(line) for line in sorted(getattr(node, "lineno", 0) for node in steps))
                names = " and ".join(sorted(str(name) for name in trained))
                detail = f"one engine has optimizers for {names}, and each step (lines {lines}) steps both"
                self.judge(ENGINE_TWO_NETWORKS, engine.node, True, detail)

    def _network_of(self, optimizer: Optimizer) -> str | None:
        """Return the network whose ``parameters()`` is the first argument of an optimizer."""
        call = self.observations.optimizers.get(optimizer.site)
        given = call.args[0] if call and call.args else None
        if isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) and given.func.attr == "parameters":
            return ast.unparse(given.func.value)
        return None


def _assigns(node: ast.Assign | ast.AugAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _functions(tree: ast.Module) -> Iterator[ast.AST]:
    yield from (node for node in nodes_of(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _contains(scope: ast.AST, line: int) -> bool:
    return getattr(scope, "lineno", 0) <= line <= (getattr(scope, "end_lineno", 0) or 0)


def _reads_input_gradients(scope: ast.AST) -> bool:
    """Return whether a function computes the gradient of an input, as for adversarial examples and saliency maps."""
    asked: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and _requires_grad(node.value):
            asked |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.Assign):
            owners = [target.value for target in node.targets if isinstance(target, ast.Attribute)]
            wanted = any(getattr(target, "attr", "") == "requires_grad" for target in node.targets)
            asked |= {ast.unparse(owner) for owner in owners} if wanted else set()
        elif isinstance(node, ast.Expr) and _requires_grad(node.value):
            func = node.value.func if isinstance(node.value, ast.Call) else None
            asked |= {ast.unparse(func.value)} if isinstance(func, ast.Attribute) else set()
    read = (node for node in ast.walk(scope) if isinstance(node, ast.Attribute) and node.attr == "grad")
    return any(ast.unparse(node.value) in asked for node in read)


def _requires_grad(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    by_method = isinstance(node.func, ast.Attribute) and node.func.attr in ("requires_grad_", "retain_grad")
    return by_method or any(one.arg == "requires_grad" for one in node.keywords)
