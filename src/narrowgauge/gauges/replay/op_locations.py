"""OpLocator: finds where in a model an op runs, by module in forward and by autograd node in backward.

    forward    Hooks on every module keep a stack of paths. Ops outside of any module belong to the loss.
               After each torch function, the autograd nodes it created are assigned to the module on top of the stack.
    backward   Hooks on each node mark its start and end. The ops in between belong to the node and to its module.
               After a node ends, autograd may add its gradient to those from other users of the same tensor.

A module that is recomputed in backward (torch.utils.checkpoint) is pushed on the stack again and takes precedence over
the node. A backward inside forward (a gradient penalty) has nodes that start and end in the same way; they take
precedence over the modules on the stack.
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

from narrowgauge.gauges.transforms import list_levels

LOSS, MODEL, BATCH, HOOK = "(loss)", "(model)", "(batch)", "(hook)"
"""Locations without a module path: code outside the model, the outermost module, the data, and gradient hooks."""
_PACKAGE = Path(__file__).parents[2]
_OURS = (_PACKAGE / name for name in ("gauges", "nn", "engine", "events.py"))
_PASSED_OVER = tuple(map(str, (Path(torch.__file__).parent, *_OURS)))
"""Code that calls ops on behalf of other code."""
_REPLAY = str(Path(__file__).with_name("replay.py"))


@dataclass(frozen=True)
class OpLocation:
    """Where an op was called."""

    module: str
    source: str | None
    """file:line of the calling code."""
    node: str | None = None
    """In backward, the autograd node that the op is part of."""


class OpLocator:
    """Tracks one model through forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._paths = {module: _remove_wrappers(path) for path, module in model.named_modules()}
        self._owners = {
            id(parameter): path
            for module, path in self._paths.items()
            for parameter in module.parameters(recurse=False)
        }
        self._stack: list[str] = []
        self._nodes: dict[Any, OpLocation] = {}
        self._users: Counter[Any] = Counter()
        """Number of nodes that send a gradient to each node."""
        self._handles: list[Any] = []
        self._current: OpLocation | None = None
        self._base = 0
        """Depth of the stack when the current node started: modules above it are being recomputed."""
        self._in_backward = False

    @contextlib.contextmanager
    def track_modules(self) -> Iterator[None]:
        """Register hooks on every module, and remove them on exit."""
        hooks = []
        for module in self._paths:
            hooks.append(module.register_forward_pre_hook(self._enter_module, prepend=True))
            hooks.append(module.register_forward_hook(self._leave_module, always_call=True))  # also if forward raises
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()
            self.clear_graph()

    def track_functions(self) -> TorchFunctionMode:
        """Return a mode that assigns nodes as they are created. Enter it innermost: it must see the user's calls."""
        return _FunctionMode(self.assign_nodes)

    @contextlib.contextmanager
    def track_backward(self) -> Iterator[None]:
        """The backward pass of the step, in which only autograd nodes run."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward, self._current, self._base = False, None, 0
            self._stack.clear()

    def clear_graph(self) -> None:
        """Drop the autograd graph of a microbatch."""
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()
        self._users.clear()
        self._handles.clear()

    def locate(self) -> OpLocation:
        """Return the location of the op that is running."""
        if self._current is not None and len(self._stack) <= self._base:
            line = find_source_line()
            if self._in_backward and line is not None and find_running_function() is None:
                return OpLocation(HOOK, line, "gradient hook")  # user code that autograd calls between two nodes
            return replace(self._current, source=line or self._current.source)
        return OpLocation(self._stack[-1] if self._stack else LOSS, find_source_line())

    @property
    def phase(self) -> str:
        """forward or backward."""
        return "backward" if self._in_backward or self._current is not None else "forward"

    def find_owner(self, parameter: Tensor) -> str:
        """Return the path of the module that has the parameter."""
        return self._owners.get(id(parameter), LOSS)

    def assign_nodes(self, values: Any, location: OpLocation | None = None, called: str | None = None) -> None:
        """Assign all new nodes behind these tensors to the running module, or to ``location``.

        ``called`` is the torch function that created them. The derivative of an in-place op on a view is hidden in a
        node CopySlices, which is named after the function.
        """
        tensors = [level for leaf in tree_leaves(values) if isinstance(leaf, Tensor) for level in list_levels(leaf)]
        todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        place = location
        while todo:
            node = todo.pop()
            if node in self._nodes:
                continue
            place = place or OpLocation(self._stack[-1] if self._stack else LOSS, find_source_line())
            name = node.name().removeprefix("torch::autograd::")
            if name == "CopySlices" and called is not None and not called.startswith("__"):
                name = f"{name} of {called}"
            if name.endswith("AccumulateGrad"):  # belongs to the parameter and outlives the graph
                variable: Tensor = node.variable  # type: ignore[attr-defined]
                own = OpLocation(self.find_owner(variable), None, "AccumulateGrad")
                self._handles.append(node.register_prehook(self._make_start_hook(own)))
            else:
                own = OpLocation(place.module, place.source, name)
                node.register_prehook(self._make_start_hook(own))
                node.register_hook(self._make_end_hook(node, own))
            self._nodes[node] = own
            receivers = [receiver for receiver, _ in node.next_functions if receiver is not None]
            self._users.update(receivers)
            todo += receivers

    def _make_start_hook(self, place: OpLocation) -> Callable[[Any], None]:
        def start(gradients: Any) -> None:
            self._current = place
            if self._in_backward:
                self._stack.clear()  # a recomputation may have stopped early
            self._base = len(self._stack)

        return start

    def _make_end_hook(self, node: Any, place: OpLocation) -> Callable[[Any, Any], None]:
        receivers = [receiver for receiver, _ in node.next_functions if receiver is not None]

        def end(grad_inputs: Any, grad_outputs: Any) -> None:
            if torch.is_grad_enabled():
                self.assign_nodes(grad_inputs, place)  # double backward
            shared = next((receiver for receiver in receivers if self._users[receiver] > 1), None)
            if shared is not None and shared in self._nodes:
                own = self._nodes[shared]
                self._current = OpLocation(own.module, own.source, "gradient sum")
            elif not self._in_backward:
                self._current = None

        return end

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._paths[module])

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            if output is not None:
                self.assign_nodes(output)
            self._stack.pop()


class _FunctionMode(TorchFunctionMode):
    def __init__(self, assign_nodes: Callable[[Any, OpLocation | None, str | None], None]) -> None:
        super().__init__()
        self._assign_nodes = assign_nodes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            name = getattr(func, "__name__", None)
            self._assign_nodes((args[:1], result), None, name)  # an in-place op may return nothing
        return result


def _remove_wrappers(path: str) -> str:
    """The module's path without the wrappers that torch.compile adds."""
    parts = [part for part in path.split(".") if part and part != "_orig_mod"]
    return ".".join(parts) or MODEL


def _iterate_frames() -> Iterable[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def find_source_line() -> str | None:
    """Return file:line of the innermost frame that belongs to the model or the user.

    Returns None for ops that autograd runs without Python code: frames outside the replay only called backward.
    """
    for frame in _iterate_frames():
        name = frame.f_code.co_filename
        if name == _REPLAY:
            return None
        if not name.startswith((*_PASSED_OVER, "<")) and Path(name).name not in ("contextlib.py", "threading.py"):
            return f"{name}:{frame.f_lineno}"
    return None


def find_running_function() -> str | None:
    """Return the name of the torch.autograd.Function that the running op is part of.

    The Python stack is searched for its code, because a Function may be called through any earlier reference to
    ``apply``, which cannot be intercepted.
    """
    codes = {}
    todo: list[type] = [torch.autograd.Function]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        for method in ("forward", "backward"):
            function = getattr(vars(kind).get(method), "__func__", None)
            if function is not None and not kind.__module__.startswith("torch."):  # for example those of checkpoint
                codes[function.__code__] = kind.__name__
    return next((codes[frame.f_code] for frame in _iterate_frames() if frame.f_code in codes), None)
