"""Knows where in a model an op runs: in forward by the modules that are entered, in backward by who made the node.

    forward    hooks on every module keep a stack of paths; ops on no module's behalf belong to the loss
               after each torch function: the autograd nodes it has made belong to the module on top of the stack
    backward   each node says when it begins and ends; the ops between are its own, and the module's it belongs to
               after its end autograd adds its gradients to those that other users of the same tensor gave

A module that is recomputed in backward (torch.utils.checkpoint) enters the stack again and goes before the node. A
backward inside forward (a gradient penalty) has nodes that begin and end in the same way, above what is on the stack.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

LOSS, MODEL, BATCH, HOOK = "(loss)", "(model)", "(batch)", "(hook)"
"""Where no module has a path: what the loop computes itself, the outermost module, the data, and gradient hooks."""
_PACKAGE = Path(__file__).parents[2]
_PASSED_OVER = tuple(map(str, (Path(torch.__file__).parent, *(_PACKAGE / name for name in ("gauges", "nn", "engine")))))
"""Folders whose code calls ops on behalf of other code."""
_REPLAY = str(Path(__file__).with_name("replay.py"))


@dataclass(frozen=True)
class Place:
    """Where an op was asked for."""

    module: str
    source: str | None
    """file:line of the code that did."""
    node: str | None = None
    """In backward, the autograd node it is part of."""


class Places:
    """Follows one model through forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._paths = {module: _clean(path) for path, module in model.named_modules()}
        self._owners = {
            id(parameter): path
            for module, path in self._paths.items()
            for parameter in module.parameters(recurse=False)
        }
        self._stack: list[str] = []
        self._nodes: dict[Any, Place] = {}
        self._users: Counter[Any] = Counter()
        """How many nodes hand a gradient to each node."""
        self._handles: list[Any] = []
        self._current: Place | None = None
        self._base = 0
        """How deep the stack was when the current node began: modules above it are being recomputed."""
        self._in_backward = False

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """While open, modules report and nodes are claimed; hooks are gone afterwards."""
        hooks = []
        for module in self._paths:
            hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))  # also where forward raises
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()
            self.forget()

    def functions(self) -> TorchFunctionMode:
        """The mode that claims nodes as they are made; open it innermost, so that it sees what the user called."""
        return _Functions(self.claim)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The step's own backward, which nothing but nodes runs in."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward, self._current, self._base = False, None, 0
            self._stack.clear()

    def forget(self) -> None:
        """Let go of a microbatch's graph."""
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()
        self._users.clear()
        self._handles.clear()

    def here(self) -> Place:
        """Where the op that runs now was asked for."""
        if self._current is not None and len(self._stack) <= self._base:
            line = source_line()
            if self._in_backward and line is not None and running_function() is None:
                return Place(HOOK, line, "gradient hook")  # the user's code, but called by autograd between two nodes
            return replace(self._current, source=line or self._current.source)
        return Place(self._stack[-1] if self._stack else LOSS, source_line())

    @property
    def phase(self) -> str:
        return "backward" if self._in_backward or self._current is not None else "forward"

    def owner(self, parameter: Tensor) -> str:
        return self._owners.get(id(parameter), LOSS)

    def claim(self, values: Any, owner: Place | None = None) -> None:
        """Let the nodes behind these tensors that nobody has yet belong to the module that runs, or to ``owner``."""
        todo = [leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        place = owner
        while todo:
            node = todo.pop()
            if node in self._nodes:
                continue
            place = place or Place(self._stack[-1] if self._stack else LOSS, source_line())
            name = node.name()
            if name.endswith("AccumulateGrad"):  # it belongs to the parameter, and outlives the graph
                variable: Tensor = node.variable  # type: ignore[attr-defined]
                own = Place(self.owner(variable), None, "AccumulateGrad")
                self._handles.append(node.register_prehook(self._begins(own)))
            else:
                own = Place(place.module, place.source, name)
                node.register_prehook(self._begins(own))
                node.register_hook(self._ends(node, own))
            self._nodes[node] = own
            receivers = [receiver for receiver, _ in node.next_functions if receiver is not None]
            self._users.update(receivers)
            todo += receivers

    def _begins(self, place: Place) -> Callable[[Any], None]:
        def begins(gradients: Any) -> None:
            self._current = place
            if self._in_backward:
                self._stack.clear()  # a recomputation that stopped early leaves nothing behind
            self._base = len(self._stack)

        return begins

    def _ends(self, node: Any, place: Place) -> Callable[[Any, Any], None]:
        receivers = [receiver for receiver, _ in node.next_functions if receiver is not None]

        def ends(grad_inputs: Any, grad_outputs: Any) -> None:
            if torch.is_grad_enabled():
                self.claim(grad_inputs, place)  # a slope that is to be differentiated again
            shared = next((receiver for receiver in receivers if self._users[receiver] > 1), None)
            if shared is not None and shared in self._nodes:
                own = self._nodes[shared]
                self._current = Place(own.module, own.source, "gradient sum")
            elif not self._in_backward:
                self._current = None

        return ends

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._paths[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            if output is not None:
                self.claim(output)
            self._stack.pop()


class _Functions(TorchFunctionMode):
    def __init__(self, claim: Callable[[Any], None]) -> None:
        super().__init__()
        self._claim = claim

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            self._claim((args[:1], result))  # an op in place may return nothing
        return result


def _clean(path: str) -> str:
    """The module's path as its author knows it: torch.compile puts a wrapper around what it compiles."""
    parts = [part for part in path.split(".") if part and part != "_orig_mod"]
    return ".".join(parts) or MODEL


def _frames() -> Iterable[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def source_line() -> str | None:
    """file:line of the innermost code that computes on its own behalf: the model's, or the user's.

    None where autograd runs an op by itself: code that lies further out than the replay only asked for that.
    """
    for frame in _frames():
        name = frame.f_code.co_filename
        if name == _REPLAY:
            return None
        if not name.startswith((*_PASSED_OVER, "<")) and Path(name).name not in ("contextlib.py", "threading.py"):
            return f"{name}:{frame.f_lineno}"
    return None


def running_function() -> str | None:
    """The name of the torch.autograd.Function that the op which runs now is part of.

    Found by the code on the Python stack: a Function may be called by a reference to ``apply`` from long ago, so there
    is no one place to watch.
    """
    codes = {}
    todo: list[type] = [torch.autograd.Function]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        for method in ("forward", "backward"):
            function = getattr(vars(kind).get(method), "__func__", None)
            if function is not None and not kind.__module__.startswith("torch."):  # not checkpoint's own, say
                codes[function.__code__] = kind.__name__
    return next((codes[frame.f_code] for frame in _frames() if frame.f_code in codes), None)
