"""What fused code reports about itself while it runs, for listeners such as gauges and forecasts.

Fused blocks and the fused head call no modules, so a hook on a module sees nothing of them, and some kernels are
launched without going through torch's dispatcher. They report here instead:

    scope      the fused code of the module at a path is entered and left
    product    one of a layer's three matrix products (output, grad_input, grad_weight) begins and ends
    operands   what such a product is computed from
    rounding   an operand was rounded to an emulated block format
    copy       a weight was written in another format
    launch     a kernel is launched outside of torch's dispatcher
    tensor     an activation or a gradient was computed
    offload    a tensor is copied to host memory until backward

Without listeners, the usual case, an event costs one call that checks an empty tuple. Where the arguments of an event
cost something to make, the caller checks ``is_listening`` first. torch.compile traces the check as a constant: compiled
code has no events and no guard on the listeners.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch.compiler import assume_constant_result, is_compiling

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
PRODUCTS = ("output", "grad_input", "grad_weight")


class Listener:
    """Receives events; a subclass overrides the methods it needs. It must not change the tensors that it is given."""

    def enter_scope(self, path: str) -> None:
        """What follows belongs to the module at ``path``, until the matching ``leave_scope``."""

    def leave_scope(self) -> None:
        """The scope entered last is left."""

    def begin_product(self, product: str, path: str) -> None:
        """One of ``PRODUCTS`` begins, casts of the weight included. ``path`` is the layer's; empty: the scope's."""

    def end_product(self) -> None:
        """The product that began last has ended."""

    def report_operands(self, product: str, path: str, operands: Sequence[Any]) -> None:
        """The product that has just begun is computed from these: operands of ``scaling.operand``, weights, options."""

    def report_rounding(self, operand: str, product: str, path: str, x: Tensor, blocks: Any) -> None:
        """An input, weight or gradient was rounded for a product; ``blocks`` is of ``scaling.block_quantize``."""

    def report_copy(self, weights: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        """``copies`` were written from ``weights``, in other formats or layouts; several weights are stacked."""

    def report_launch(self, kernel: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """A kernel that torch's dispatcher does not see is launched on these tensors."""

    def report_tensor(self, kind: str, path: str, tensor: Tensor, inv_scale: Tensor | None) -> None:
        """An "activation" or "gradient" was computed; ``inv_scale`` is the inverse of its scale where it is FP8."""

    def report_offload(self, size: int) -> None:
        """A tensor of so many bytes is copied to host memory until backward."""


_listeners: tuple[Listener, ...] = ()


@assume_constant_result  # type: ignore[untyped-decorator]
def is_listening() -> bool:
    """Whether anyone listens; always False in code that torch.compile traces."""
    if _listeners:
        return not is_compiling()
    return False


def wants_tensors() -> bool:
    """Whether a listener takes tensors: to ask before making some only to report them."""
    return is_listening() and any(type(one).report_tensor is not Listener.report_tensor for one in _listeners)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Report events to ``listener`` inside the context, in addition to those who listen already."""
    global _listeners
    before, _listeners = _listeners, (*_listeners, listener)
    try:
        yield
    finally:
        _listeners = before


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Report nothing inside the context: for work that is not part of what listeners observe."""
    global _listeners
    before, _listeners = _listeners, ()
    try:
        yield
    finally:
        _listeners = before


def run_in_scope(path: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function whose work belongs to the module at ``path``."""
    if not is_listening():
        return function(*args, **kwargs)
    told = _listeners
    for listener in told:
        listener.enter_scope(path)
    try:
        return function(*args, **kwargs)
    finally:
        for listener in told:
            listener.leave_scope()


def run_product(product: str, path: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that computes one of ``PRODUCTS`` for the layer at ``path``."""
    told = _listeners
    for listener in told:
        listener.begin_product(product, path)
        listener.report_operands(product, path, args)
    try:
        return function(*args, **kwargs)
    finally:
        for listener in told:
            listener.end_product()


def report_rounding(operand: str, product: str, path: str, x: Tensor, blocks: Any) -> None:
    """An input, weight or gradient was rounded to an emulated block format."""
    if is_listening():
        for listener in _listeners:
            listener.report_rounding(operand, product, path, x, blocks)


def report_copy(weights: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
    """A weight was written in other formats or layouts."""
    if is_listening():
        for listener in _listeners:
            listener.report_copy(weights, [copy for copy in copies if copy is not None])


def report_launch(kernel: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    """A kernel is launched outside of torch's dispatcher."""
    if is_listening():
        for listener in _listeners:
            listener.report_launch(kernel, reads, writes)


def report_offload(size: int) -> None:
    """A tensor of so many bytes is copied to host memory until backward."""
    if is_listening():
        for listener in _listeners:
            listener.report_offload(size)


def report_tensor(kind: str, path: str, tensor: Tensor, inv_scale: Tensor | None = None) -> None:
    """An activation or a gradient was computed inside of fused code."""
    if is_listening():
        for listener in _listeners:
            listener.report_tensor(kind, path, tensor, inv_scale)
