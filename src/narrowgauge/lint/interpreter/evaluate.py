"""Values of expressions: names, attributes, calls and operations."""

from __future__ import annotations

import ast
from dataclasses import replace

from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.constructors import Constructors
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.engines import Engines
from narrowgauge.lint.interpreter.gradients import Gradients
from narrowgauge.lint.interpreter.modules import Modules
from narrowgauge.lint.interpreter.names import HARMLESS, LARGEST, PRODUCTS
from narrowgauge.lint.interpreter.observer import Observer
from narrowgauge.lint.interpreter.state import State
from narrowgauge.lint.interpreter.syntax import dotted, is_static
from narrowgauge.lint.interpreter.tensors import Tensors
from narrowgauge.lint.interpreter.values import (
    OPAQUE,
    Class,
    Condition,
    Const,
    Engine,
    EngineMethod,
    Function,
    Instance,
    Module,
    Optimizer,
    Params,
    Ref,
    Scaler,
    Seq,
    StateDict,
    Tensor,
    Value,
    heap,
    is_module,
    join,
)

_BUILTINS = HARMLESS | {"float", "exec"}


class Evaluator:
    """Evaluates expressions."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.engines, self.modules, self.tensors = Engines(context), Modules(context), Tensors(context)
        self._handlers = (self.engines, Constructors(context), Gradients(context), self.modules, self.tensors)
        """Asked in this order; the first that knows a call handles it."""

    def value(self, node: ast.expr, state: State) -> Value | None:
        """Return the value of an expression; None if nothing is known."""
        handler = getattr(self, f"_{type(node).__name__.lower()}", None)
        if handler is not None:
            known: Value | None = handler(node, state)
            return known
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, state)
        return None

    def decorator(self, node: ast.expr, state: State) -> Value | None:
        """Return the value of a decorator."""
        value = self.value(node, state)
        self.context.notify(Observer.on_decorator, node, value)
        return value

    # Names

    def _constant(self, node: ast.Constant, state: State) -> Value | None:
        return Const(node.value)

    def _name(self, node: ast.Name, state: State) -> Value | None:
        value = self.context.lookup(node.id, state)
        if value is None and node.id in _BUILTINS:
            return Ref(f"builtins.{node.id}")
        value = self.context.inferred.guess(node, value, self.context.frames[-1])
        self.context.notify(Observer.on_name_read, node, value)
        return value

    def _attribute(self, node: ast.Attribute, state: State) -> Value | None:
        return self._attribute_of(self.value(node.value, state), node, state)

    def _attribute_of(self, owner: Value | None, node: ast.Attribute, state: State) -> Value | None:
        if isinstance(owner, Ref) and owner.name in LARGEST and node.attr in ("max", "min"):
            return Const(LARGEST[owner.name] if node.attr == "max" else -LARGEST[owner.name])
        if isinstance(owner, Ref):
            known = self.context.lookup(dotted(node) or "", state)
            return self.context.inferred.guess(node, known or Ref(f"{owner.name}.{node.attr}"), self.context.frames[-1])
        if isinstance(owner, Module | Instance):
            value = state.env.get(heap(owner.site, node.attr))
            if value is not None:
                return None if value == OPAQUE else value
            found = self._find_method(owner.definition, node.attr) if owner.definition else None
            if found is not None:
                return self.method(owner, found)
            return self.context.inferred.guess(node, None, self.context.frames[-1])
        if isinstance(owner, Class):
            if node.attr == "apply":
                off = bool(state.autocast) and state.casting is None
                self.context.event("apply", node, value=owner, text="off" if off else "")
            found = self._find_method(owner.node, node.attr)
            return Function(found, owner.frame) if found is not None else None
        if isinstance(owner, Engine):
            return self.engines.attribute(owner, node.attr)
        if isinstance(owner, Params) and node.attr == "data":
            return owner
        if isinstance(owner, Tensor):
            return self.tensors.attribute(owner, node.attr)
        if node.attr == "mT" and owner is None:
            return Tensor(role="transposed")
        known = self.context.lookup(dotted(node) or "", state)
        return self.context.inferred.guess(node, known, self.context.frames[-1])

    def method(self, owner: Value, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
        """Return a bound method, with the autocast of its decorators."""
        definition = getattr(owner, "definition", None)
        frame = self.context.classes[definition].frame if definition in self.context.classes else ""
        return Function(node, frame, owner, self.context.decorated.get(node))

    def _find_method(self, definition: ast.ClassDef, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        for child in definition.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name == name:
                return child
        own = self.context.classes.get(definition)
        for other in self.context.classes.values() if own else ():
            if own and other.node.name in own.bases and other.node is not definition:
                found = self._find_method(other.node, name)
                if found is not None:
                    return found
        return None

    # Calls

    def _call(self, node: ast.Call, state: State) -> Value | None:
        call = Call(node, state)
        if isinstance(node.func, ast.Attribute):
            call.receiver = self.value(node.func.value, state)
            call.method = node.func.attr
            if not isinstance(call.receiver, Tensor):
                call.target = self._attribute_of(call.receiver, node.func, state)
        else:
            call.target = self.value(node.func, state)
        call.args = [self.value(arg, state) for arg in node.args]
        call.keywords = {given.arg or "**": self.value(given.value, state) for given in node.keywords}
        if isinstance(call.target, Ref):
            call.name = call.target.name
        self.context.notify(Observer.on_call, call)
        value = self._result(call)
        self.context.notify(Observer.on_result, call, value)
        return value

    def _result(self, call: Call) -> Value | None:
        for handler in self._handlers:
            handled, value = handler.call(call)
            if handled:
                return value
        return self._unhandled(call)

    def _unhandled(self, call: Call) -> Value | None:
        """Evaluate a call of the script's own functions and classes, of a model, or of an unknown function."""
        target, state = call.target, call.state
        if isinstance(target, Function):
            return self.context.call(target, call, self._arguments(target, call))
        if isinstance(target, Class):
            return self._create(target, call)
        is_product = isinstance(target, Module) and target.name.startswith(PRODUCTS)
        made = Tensor(under=state.casting, output=True, product=is_product, makers=self.engines.makers(call))
        if isinstance(target, Module):
            return self._forward(target, call, made)
        if call.name.startswith("builtins."):
            if call.name == "builtins.exec":
                state.env = {key: value for key, value in state.env.items() if not isinstance(value, Const)}
            elif call.name == "builtins.sum" and made.makers:
                return made
            elif call.name == "builtins.zip" and any(isinstance(value, Params) for value in call.args):
                return Seq(tuple(call.args))
            elif call.name in ("builtins.list", "builtins.filter", "builtins.tuple"):
                return next((value for value in call.args if isinstance(value, Params)), None)
            elif call.name == "builtins.float":
                return self.tensors.read_float(call)
            return None
        if not call.name.startswith("torch."):
            self._escape(call)
        return made if made.makers or (state.casting is not None and not call.name.startswith("torch.")) else None

    def _forward(self, module: Module, call: Call, made: Tensor) -> Value | None:
        """Return the output of a model; the forward of a class of the script is followed under autocast."""
        found = self._find_method(module.definition, "forward") if module.definition is not None else None
        if found is None or made.makers:
            return made
        function = self.method(module, found)
        casting = function.autocast if function.autocast is not None and function.autocast.active else made.under
        if casting is None:
            return made
        result = self.context.call(function, call, self._arguments(function, call))
        known = result if isinstance(result, Tensor) else Tensor()
        output = replace(known, under=known.under or casting, output=True, role="", key="")
        if self.context.splitting is call.node:
            self.context.spilled = [(end, output) for end, _ in self.context.spilled]
        return output

    def _escape(self, call: Call) -> None:
        """Forget what is known about arguments of an unknown function, which may change them."""
        state = call.state
        given = [value for arg in call.values for value in (arg.items if isinstance(arg, Seq) else (arg,))]
        if call.target is None and isinstance(call.receiver, Instance | Module):  # a method of an unknown base class
            given += [value for key, value in state.env.items() if key.startswith(heap(call.receiver.site, ""))]
        for value in given:
            if isinstance(value, Scaler):
                self.context.observations.escaped.add(value.site)
            if isinstance(value, Engine) and not call.name.startswith("narrowgauge."):
                self.engines.escape(value, call)
            if isinstance(value, EngineMethod):
                self.engines.escape(value.engine, call, value.name)
            if isinstance(value, Scaler | Optimizer):
                state.move("lost")
                state.stages = {}
            if isinstance(value, Module) and call.method not in ("append", "info", "debug", "watch", "add_graph"):
                state.env.pop(heap(value.site, "!cast"), None)

    def _arguments(self, function: Function, call: Call) -> dict[str, Value | None]:
        """Return the values of a function's parameters in a call."""
        spec = function.node.args
        names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
        defaults = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        defaults |= {arg.arg: value for arg, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if value}
        given: dict[str, Value | None] = dict.fromkeys([*names, *(arg.arg for arg in spec.kwonlyargs)])
        for name, default in defaults.items():
            given[name] = Const(default.value) if isinstance(default, ast.Constant) else None
        if function.owner is not None and names and not is_static(function.node):
            given[names[0]] = function.owner
            names = names[1:]
        if any(isinstance(arg, ast.Starred) for arg in call.node.args) or "**" in call.keywords:
            given |= dict.fromkeys(names)
        for name, arg, value in zip(names, call.node.args, call.args, strict=False):
            if isinstance(arg, ast.Starred):
                break
            given[name] = value
        given |= {name: value for name, value in call.keywords.items() if name in given}
        for extra in (spec.vararg, spec.kwarg):
            if extra is not None:
                given[extra.arg] = None
        return given

    def _create(self, target: Class, call: Call) -> Value | None:
        """Return a new object of a class of the script, after following ``__init__``."""
        node = target.node
        site = self.context.site(call.node)
        made = Module(site, node.name, node) if is_module(target) else Instance(site, node)
        found = self._find_method(node, "__init__")
        if found is not None:
            function = Function(found, target.frame, made)
            self.context.call(function, call, self._arguments(function, call))
            if self.context.splitting is call.node:  # every path through __init__ returns the object
                self.context.spilled = [(end, made) for end, _ in self.context.spilled]
        if isinstance(made, Module):
            self.modules.create(made, call)
        return made

    # Operations

    def _binop(self, node: ast.BinOp, state: State) -> Value | None:
        return self.tensors.binary(node, self.value(node.left, state), self.value(node.right, state), state)

    def _unaryop(self, node: ast.UnaryOp, state: State) -> Value | None:
        value = self.value(node.operand, state)
        if isinstance(node.op, ast.USub):
            if isinstance(value, Const) and isinstance(value.value, int | float):
                return Const(-value.value)
            return value if isinstance(value, Tensor) else None
        return Condition(node) if isinstance(node.op, ast.Not) else None

    def _ifexp(self, node: ast.IfExp, state: State) -> Value | None:
        self.value(node.test, state)
        return join(self._chosen(node.body, state), self._chosen(node.orelse, state))

    def _chosen(self, node: ast.expr, state: State) -> Value | None:
        value = self.value(node, state)
        self.engines.maybe_created(value, node, state)
        return value

    def _tuple(self, node: ast.Tuple | ast.List, state: State) -> Value | None:
        items = tuple(self.value(element, state) for element in node.elts)
        if items and all(isinstance(item, Params) for item in items):
            return Params(tuple(site for item in items if isinstance(item, Params) for site in item.models))
        return Seq(items)

    _list = _tuple

    def _dict(self, node: ast.Dict, state: State) -> Value | None:
        known: Value | None = None
        saved: list[Value | None] = []
        for key, value in zip(node.keys, node.values, strict=True):
            found = self.value(value, state)
            saved += [found] if isinstance(found, StateDict) else []
            if isinstance(key, ast.Constant) and key.value == "params" and isinstance(found, Params):
                known = found
        return known or (Seq(tuple(saved)) if saved else None)

    def _subscript(self, node: ast.Subscript, state: State) -> Value | None:
        owner, index = self.value(node.value, state), self.value(node.slice, state)
        if isinstance(owner, Seq) and isinstance(index, Const) and isinstance(index.value, int):
            return owner.items[index.value] if -len(owner.items) <= index.value < len(owner.items) else None
        return owner if isinstance(owner, Tensor) else None

    def _namedexpr(self, node: ast.NamedExpr, state: State) -> Value | None:
        value = self.value(node.value, state)
        self.context.assign(node.target, value, state)
        return value

    def _compare(self, node: ast.Compare | ast.BoolOp, state: State) -> Value | None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._chosen(child, state)
        return Condition(node)

    _boolop = _compare

    def _lambda(self, node: ast.Lambda, state: State) -> Value | None:
        return None

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, state: State) -> Value | None:
        inner = state.fork()
        first = None
        for generator in node.generators:
            source = self.value(generator.iter, inner)
            first = first or source
            self.context.assign(generator.target, None, inner)
            for test in generator.ifs:
                self.value(test, inner)
        self.value(node.elt, inner)
        own = {name.id for generator in node.generators for name in _names(generator.target)}
        unchanged = isinstance(node.elt, ast.Name) and node.elt.id in own
        if isinstance(first, Tensor) and first.makers:
            return first
        return first if isinstance(first, Params) and unchanged else None

    _listcomp = _setcomp = _generatorexp = _comprehension

    def _dictcomp(self, node: ast.DictComp, state: State) -> Value | None:
        return None


def _names(node: ast.expr) -> list[ast.Name]:
    return [name for name in ast.walk(node) if isinstance(name, ast.Name)]
