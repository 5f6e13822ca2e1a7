"""What the interpreter reports while it follows a script. Every method does nothing; override what you need.

A line can lie on several paths, and in a loop twice: a method is called once for each path that reaches the line. The
state that it gets (``call.state``) is the one before the reported step takes effect, except in ``on_result``.
"""

from __future__ import annotations

import ast

from narrowgauge.lint.interpreter.call import Call
from narrowgauge.lint.interpreter.state import State
from narrowgauge.lint.interpreter.values import Engine, Optimizer, Scaler, Site, Tensor, Value

Operand = tuple[ast.expr, Value | None]
"""An expression and its value."""


class Observer:
    """Base class of everything that watches the interpreter."""

    # Any code

    def on_call(self, call: Call) -> None:
        """Any call, before one of the methods below is called for it."""

    def on_result(self, call: Call, value: Value | None) -> None:
        """Any call, after it took effect, with the value that it returns."""

    def on_decorator(self, node: ast.expr, value: Value | None) -> None:
        """A decorator of a function or method."""

    def on_assignment(self, node: ast.Assign, target: ast.expr) -> None:
        """An assignment statement, once for each of its targets."""

    def on_name_bound(self, target: ast.Name, value: Value | None) -> None:
        """A name gets a value."""

    def on_name_read(self, node: ast.Name, value: Value | None) -> None:
        """The value of a name is read."""

    def on_with(self, node: ast.expr, value: Value | None, state: State) -> None:
        """A ``with`` statement enters a context manager."""

    # The training step

    def on_backward(self, call: Call, loss: Tensor | None) -> None:
        """``loss.backward()`` or ``torch.autograd.backward(loss)``; None: nothing is known of the loss."""

    def on_clip(self, call: Call) -> None:
        """Gradients are clipped."""

    def on_scale(self, call: Call, scaler: Scaler) -> None:
        """``scaler.scale(loss)``."""

    def on_unscale(self, call: Call, scaler: Scaler, optimizer: Site) -> None:
        """``scaler.unscale_(optimizer)``, with a scaler that is not disabled."""

    def on_scaler_step(self, call: Call, scaler: Scaler, optimizer: Site) -> None:
        """``scaler.step(optimizer)``, with a scaler that is not disabled."""

    def on_scaler_update(self, call: Call, scaler: Scaler) -> None:
        """``scaler.update()``, with a scaler that is not disabled."""

    def on_optimizer_step(self, call: Call, optimizer: Optimizer) -> None:
        """``optimizer.step()``."""

    def on_engine_method(self, call: Call, engine: Engine, method: str) -> None:
        """A method of a narrowgauge Engine."""

    # Tensors

    def on_cast(self, call: Call, dtype: str) -> None:
        """A cast of ``call.receiver``: a module, a tensor, or an object of unknown type (None)."""

    def on_loss(self, call: Call, name: str) -> None:
        """A loss function of torch is called; ``name`` is its full name."""

    def on_operation(self, call: Call, op: str, operands: list[Operand]) -> None:
        """A function or method of torch that computes a tensor; ``op`` is its short name."""

    def on_binary(self, node: ast.BinOp, left: Value | None, right: Value | None) -> None:
        """A binary operator."""

    def on_division(self, node: ast.AST, left: Tensor, right: Value | None) -> None:
        """A tensor is divided, by an operator or a function."""

    def on_number_read(self, call: Call, tensor: Tensor) -> None:
        """The script reads a tensor's value, with ``item()`` or ``float()``."""

    def on_item_assigned(self, target: ast.Subscript, owner: Value | None, value: Value | None) -> None:
        """A part of ``owner`` is set: ``scores[mask] = -1e9``."""

    def on_attention(self, node: ast.AST, weights: ast.expr) -> None:
        """Attention weights, the softmax of ``q @ k.T``, are multiplied with the values."""

    # The end

    def on_end(self) -> None:
        """The whole script has been followed."""
