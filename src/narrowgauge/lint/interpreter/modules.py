"""Modules: calls that create, cast and wrap them, and the format of their parameters."""

from __future__ import annotations

import ast
from dataclasses import replace

from narrowgauge.lint.interpreter.call import NOT_HANDLED, Call, Handled
from narrowgauge.lint.interpreter.context import Context
from narrowgauge.lint.interpreter.names import CASTS, DTYPES
from narrowgauge.lint.interpreter.observer import Observer
from narrowgauge.lint.interpreter.state import State
from narrowgauge.lint.interpreter.values import (
    Cast,
    Const,
    Module,
    Optimizer,
    Params,
    Ref,
    Site,
    Tensor,
    Value,
    heap,
)

_SAME = {"cuda", "cpu", "to", "train", "eval", "requires_grad_", "apply", "share_memory", "to_empty", "type", "xpu"}
"""Methods of a module that return the module."""
_WRAPPERS = ("torch.compile", "torch.nn.parallel.DistributedDataParallel", "torch.nn.DataParallel",
             "torch.nn.SyncBatchNorm.convert_sync_batchnorm")  # fmt: skip
LOW = ("fp16", "bf16")


class Modules:
    """Handles calls about modules."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def call(self, call: Call) -> Handled:
        """Return the module that a call creates or returns, and track its format."""
        name = call.name
        if name == "torch.set_default_dtype":
            given = call.arg(0)
            dtype = DTYPES.get(given.name) if isinstance(given, Ref) else None
            call.state.bind("!default", Cast(dtype, call.node) if dtype in LOW else None)
            return True, None
        if name in _WRAPPERS:
            given = call.arg(0)
            if isinstance(given, Module) and name == "torch.compile":
                call.state.bind(heap(given.site, "!compiled"), Const(call.node.lineno))
            return (True, given) if isinstance(given, Module) else NOT_HANDLED
        if name == "copy.deepcopy" and isinstance(call.arg(0), Module):
            return True, self._copied(call, call.arg(0))
        if call.method == "from_pretrained" and name.startswith("transformers."):
            return True, self._pretrained(call)
        if name.startswith("torch.nn.") and name.split(".")[-1][:1].isupper() and not name.endswith("Parameter"):
            return True, self.create(Module(self._site(call), name, parts=tuple(call.args)), call)
        if name.startswith("torchvision.models.") or name == "timm.create_model":
            return True, self.create(Module(self._site(call), name if "timm" not in name else "transformers."), call)
        if isinstance(call.receiver, Module):
            return self._method(call, call.receiver)
        return NOT_HANDLED

    def create(self, module: Module, call: Call) -> Module:
        """Return a new module, after giving it the default format."""
        call.state.bind(heap(module.site, "!cast"), call.state.env.get("!default"))
        call.state.bind(heap(module.site, "!engine"), None)  # belonged to one that was created here before
        call.state.bind(heap(module.site, "!compiled"), None)
        return module

    def _site(self, call: Call) -> Site:
        return self.context.site(call.node)

    def _copied(self, call: Call, given: Value | None) -> Module:
        assert isinstance(given, Module)
        made = replace(given, site=self._site(call))
        call.state.bind(heap(made.site, "!cast"), call.state.env.get(heap(given.site, "!cast")))
        call.state.bind(heap(made.site, "!engine"), None)
        return made

    def _pretrained(self, call: Call) -> Module:
        module = self.create(Module(self._site(call), "transformers."), call)
        for keyword in ("torch_dtype", "dtype"):
            given = call.arg(-1, keyword)
            if isinstance(given, Ref) and DTYPES.get(given.name) in LOW:
                call.state.bind(heap(module.site, "!cast"), Cast(DTYPES[given.name], call.node))
        return module

    def _method(self, call: Call, module: Module) -> Handled:
        dtype = cast_dtype(call)
        if dtype is not None:
            call.state.bind(heap(module.site, "!cast"), Cast(dtype, call.node) if dtype in LOW else None)
            self.context.notify(Observer.on_cast, call, dtype)
            return True, module
        if call.method in _SAME:
            return True, module
        if call.method in ("parameters", "named_parameters"):
            return True, Params((module.site,))
        return NOT_HANDLED

    def name_bound(self, target: ast.Name, value: Value | None, state: State) -> None:
        """Remember the cast of a model that other code created, under the name that the script gives it."""
        frame = self.context.frames[-1]
        if not self.context.inferred.is_module(target.id) or not (value is None or isinstance(value, Tensor)):
            return
        cast = None
        if isinstance(value, Tensor) and value.dtype in LOW and not value.output:
            cast = Cast(value.dtype, target)
            state.bind(f"{frame}|{target.id}", Module(f"{frame}|{target.id}", ""))
        state.bind(heap(f"{frame}|{target.id}", "!cast"), cast)


def cast_dtype(call: Call) -> str | None:
    """Return the format that a method casts to; None if it does not cast."""
    if call.method in CASTS and not call.node.args and not call.node.keywords:
        return CASTS[call.method]
    if call.method in ("to", "type"):
        for value in (*call.args, call.keywords.get("dtype")):
            if isinstance(value, Ref) and value.name in DTYPES:
                return DTYPES[value.name]
    return None


def casts_of(optimizer: Optimizer, state: State) -> list[tuple[Site, Cast]]:
    """Return the modules of an optimizer that are cast to 16 bits, with the casts."""
    casts = [(site, state.env.get(heap(site, "!cast"))) for site in optimizer.models]
    return [(site, cast) for site, cast in casts if isinstance(cast, Cast)]


def note_trained_format(context: Context, optimizer: Optimizer, state: State) -> None:
    """Record that the script computes in FP16 if an optimizer is created for FP16 parameters or updates them."""
    casts = casts_of(optimizer, state) if optimizer.site in context.observations.optimizers else []
    if casts and casts[0][1].dtype == "fp16":
        context.observations.formats.add("fp16")
