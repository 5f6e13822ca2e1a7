"""Rules about what is cast to 16 bits: models that are trained, norms, weights that two modules share."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from narrowgauge.lint.making import MINE_NOT, SMALLEST_FP16, Handled
from narrowgauge.lint.names import CASTS, DTYPES, NORMS, WITH_NORMS
from narrowgauge.lint.state import State
from narrowgauge.lint.values import (
    Cast,
    Class,
    Const,
    Module,
    Optimizer,
    Params,
    Ref,
    Site,
    Tensor,
    Value,
    dotted,
    heap,
)

if TYPE_CHECKING:
    from narrowgauge.lint.evaluate import Call, Evaluator

_SAME = {"cuda", "cpu", "to", "train", "eval", "requires_grad_", "apply", "share_memory", "to_empty", "type", "xpu"}
"""Methods of a module that give the module back."""
_WRAPPERS = ("torch.compile", "torch.nn.parallel.DistributedDataParallel", "torch.nn.DataParallel",
             "torch.nn.SyncBatchNorm.convert_sync_batchnorm")  # fmt: skip
DIMENSIONS = {
    "Linear": ("in_features", "out_features"),
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), ("in_channels", "out_channels")),
}
"""Layers, and which arguments are dimensions of products."""


class Casts:
    """Follows the formats of modules."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.notebook, self.follower = evaluator, evaluator.notebook, evaluator.follower
        self.follows: dict[tuple[ast.AST, str], tuple[ast.AST, str]] = {}
        """What else is wrong where an optimizer, by the call that makes it, has 16-bit parameters."""

    def call(self, call: Call) -> Handled:
        name = call.name
        if name == "torch.set_default_dtype":
            given = call.arg(0)
            dtype = DTYPES.get(given.name) if isinstance(given, Ref) else None
            call.state.bind("!default", Cast(dtype, call.node) if dtype in ("fp16", "bf16") else None)
            return True, None
        if name in _WRAPPERS:
            given = call.arg(0)
            if isinstance(given, Module) and name == "torch.compile":
                call.state.bind(heap(given.site, "!compiled"), Const(call.node.lineno))
            return (True, given) if isinstance(given, Module) else MINE_NOT
        if call.method == "from_pretrained" and name.startswith("transformers."):
            return True, self._pretrained(call)
        if name.startswith("torch.nn.") and name.split(".")[-1][:1].isupper() and not name.endswith("Parameter"):
            return True, self._layer(call)
        if name.startswith("torchvision.models.") or name == "timm.create_model":
            return True, self.made(Module(self._site(call), name if "timm" not in name else "transformers."), call)
        if isinstance(call.receiver, Module):
            return self._method(call, call.receiver)
        return self._tensor(call)

    def made(self, module: Module, call: Call) -> Module:
        """A fresh module: in the default format."""
        call.state.bind(heap(module.site, "!cast"), call.state.env.get("!default"))
        call.state.bind(heap(module.site, "!engine"), None)  # of one that was made here before
        call.state.bind(heap(module.site, "!compiled"), None)
        return module

    def _site(self, call: Call) -> Site:
        return self.follower.site(call.node)

    def _layer(self, call: Call) -> Value | None:
        kind = call.name.split(".")[-1]
        for place, keyword in enumerate(DIMENSIONS.get(kind, ())):
            size = call.arg(place, keyword)
            if isinstance(size, Const) and isinstance(size.value, int):
                self.follower.event(f"dimension-{place}", call.node, value=size, text=f"{kind}'s {keyword}")
        return self.made(Module(self._site(call), call.name, parts=tuple(call.args)), call)

    def _pretrained(self, call: Call) -> Module:
        module = self.made(Module(self._site(call), "transformers."), call)
        for keyword in ("torch_dtype", "dtype"):
            given = call.arg(-1, keyword)
            if isinstance(given, Ref) and DTYPES.get(given.name) in ("fp16", "bf16"):
                call.state.bind(heap(module.site, "!cast"), Cast(DTYPES[given.name], call.node))
        return module

    def _method(self, call: Call, module: Module) -> Handled:
        dtype = cast_of(call)
        if dtype is not None:
            self._cast(call, module, dtype)
            return True, module
        if call.method in _SAME:
            return True, module
        if call.method in ("parameters", "named_parameters"):
            return True, Params((module.site,))
        return MINE_NOT

    def _cast(self, call: Call, module: Module, dtype: str) -> None:
        low = dtype in ("fp16", "bf16")
        call.state.bind(heap(module.site, "!cast"), Cast(dtype, call.node) if low else None)
        part = (dotted(call.receiver_node) if call.receiver_node else None) or ""
        if "." in part:
            self.follower.event("cast-part", call.node, text=f"{part.split('.')[-1]} {dtype}")
        if dtype == "fp16" and module.name in NORMS:
            self._half_norm(call.node, module.name)

    def _tensor(self, call: Call) -> Handled:
        """A cast of something that is not known to be a module."""
        dtype = cast_of(call)
        receiver = call.receiver
        if dtype is None or isinstance(receiver, Ref | Params) or call.name:
            return MINE_NOT
        part = (dotted(call.receiver_node) if call.receiver_node else None) or ""
        if "." in part and receiver is None:
            self.follower.event("cast-part", call.node, text=f"{part.split('.')[-1]} {dtype}")
        for _, test in self.follower.guards if part and dtype in ("fp16", "fp32") else ():
            kind = self._norm_in_test(test, part, call.state)
            if kind and dtype == "fp16":
                self._half_norm(call.node, kind)
            elif kind:
                self.follower.event("norms-kept", call.node)
        base = receiver if isinstance(receiver, Tensor) else Tensor()
        return True, self.evaluator.tensors.cast(base, dtype, call)

    def _norm_in_test(self, test: ast.expr, part: str, state: State) -> str | None:
        """The norm that ``isinstance(part, ...)`` asks for."""
        for node in ast.walk(test):
            if isinstance(node, ast.Call) and dotted(node.func) == "isinstance" and len(node.args) == 2:
                if dotted(node.args[0]) != part:
                    continue
                for inner in ast.walk(node.args[1]):
                    value = self.evaluator.value(inner, state) if isinstance(inner, ast.Attribute | ast.Name) else None
                    if isinstance(value, Ref) and value.name in NORMS:
                        return value.name
        return None

    def _half_norm(self, node: ast.AST, kind: str) -> None:
        self.notebook.judge("half-norms", node, True, f"{kind.split('.')[-1]} is cast to FP16")

    def named(self, target: ast.Name, value: Value | None, state: State) -> None:
        """A model from elsewhere gets its name: what was cast on the way is cast."""
        frame = self.follower.frames[-1]
        if not self.evaluator.ducks.is_module(target.id) or not (value is None or isinstance(value, Tensor)):
            return
        cast = None
        if isinstance(value, Tensor) and value.dtype in ("fp16", "bf16") and not value.output:
            cast = Cast(value.dtype, target)
            state.bind(f"{frame}|{target.id}", Module(f"{frame}|{target.id}", ""))
        state.bind(heap(f"{frame}|{target.id}", "!cast"), cast)

    def tie(self, target: ast.expr, source: ast.expr, node: ast.Assign, state: State) -> None:
        """``a.weight = b.weight``."""
        pair = [one.value for one in (target, source) if isinstance(one, ast.Attribute) and one.attr == "weight"]
        names = [(dotted(owner) or "").split(".")[-1] for owner in pair]
        if len(names) == 2 and all(names):
            self.follower.event("tie", node, text=" ".join(names))

    def trained(self, optimizer: Optimizer, state: State, when: str) -> None:
        """An optimizer is made or steps: what format do its parameters have?

        The two are judged apart: the model may be cast in between. Where only some ways cast it, it is an option.
        """
        known = self.evaluator.making.optimizers.get(optimizer.site)
        if known is None or not optimizer.models:
            return
        node, kind, eps = known
        casts = [(site, state.env.get(heap(site, "!cast"))) for site in optimizer.models]
        found = [(site, cast) for site, cast in casts if isinstance(cast, Cast)]
        if not found:
            self.notebook.judge(f"states-16bit@{when}", node, False)
            return
        site, cast = found[0]
        bits, line = cast.dtype.upper(), getattr(cast.node, "lineno", 0)
        what = "weights" if kind == "SGD" else "weights and states"
        detail = f"{kind} gets parameters that line {line} made {bits}: its {what} are {bits}"
        self.notebook.judge(f"states-16bit@{when}", node, True, detail)
        if cast.dtype != "fp16":
            return
        self.notebook.formats.add("fp16")
        if eps is not None and eps < SMALLEST_FP16:
            detail = f"eps={eps:g} of {kind} is 0 in FP16, the format of its parameters (line {line})"
            self.follows[node, "eps-below-format"] = (node, detail)
        module = self._module_at(site, state)
        if module is not None and self._has_norms(module, state, set()):
            detail = f"{module.name.split('.')[-1] or 'the model'} has norms, and all of it is cast to FP16"
            self.follows[node, "half-norms"] = (cast.node, detail)

    def stepping(self, optimizer: Optimizer, state: State, scaler_step: ast.AST | None) -> None:
        """A step, by itself or by a scaler."""
        self.trained(optimizer, state, "step")
        casts = [state.env.get(heap(site, "!cast")) for site in optimizer.models]
        half = [cast for cast in casts if isinstance(cast, Cast) and cast.dtype == "fp16"]
        if scaler_step is not None:
            detail = f"the parameters were cast to FP16 in line {getattr(half[0].node, 'lineno', 0)}" if half else ""
            self.notebook.judge("half-with-scaler", scaler_step, bool(half), detail)

    def conclude(self) -> None:
        """What follows where an optimizer has 16-bit parameters for sure."""
        sure = {verdict.node for rule, verdict in self.notebook.judged() if rule == "states-16bit"}
        for (optimizer, rule), (node, detail) in self.follows.items():
            if optimizer in sure:
                self.notebook.judge(rule, node, True, detail)

    def _module_at(self, site: object, state: State) -> Module | None:
        return next((one for one in state.env.values() if isinstance(one, Module) and one.site == site), None)

    def _has_norms(self, module: Module, state: State, seen: set[str]) -> bool:
        if module.name in NORMS or module.name.startswith(WITH_NORMS):
            return True
        if any(isinstance(part, Module) and self._has_norms(part, state, seen) for part in module.parts):
            return True
        return module.definition is not None and self._defines_norms(module.definition, state, seen)

    def _defines_norms(self, definition: ast.ClassDef, state: State, seen: set[str]) -> bool:
        """Whether a class makes norms, or modules of the script that do."""
        if definition.name in seen:
            return False
        seen.add(definition.name)
        for node in ast.walk(definition):
            if not isinstance(node, ast.Call) or dotted(node.func) is None:
                continue
            value = self.evaluator.value(node.func, state)
            if isinstance(value, Ref) and (value.name in NORMS or value.name.startswith("torch.nn.Transformer")):
                return True
            if isinstance(value, Class) and self._defines_norms(value.node, state, seen):
                return True
        return False


def cast_of(call: Call) -> str | None:
    """The format a method casts to; None where it does not cast."""
    if call.method in CASTS and not call.node.args and not call.node.keywords:
        return CASTS[call.method]
    if call.method in ("to", "type"):
        for value in (*call.args, call.keywords.get("dtype")):
            if isinstance(value, Ref) and value.name in DTYPES:
                return DTYPES[value.name]
    return None
