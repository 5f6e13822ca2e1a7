"""Logits that are computed when somebody reads them, and not at all if only their cross-entropy is wanted.

A model's head returns ``LazyLogits``: a tensor with the shape, dtype and device of the logits that holds the hidden
state instead. Casts, views and slices of tokens are applied to the hidden state. ``F.cross_entropy`` runs the fused
head and loss. Everything else (reading values, other functions, hooks) computes the logits as the head would have,
once, and uses them. So library code and training loops need no change, whichever way they compute their loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.nn.cpu_emulation import EmulatedProducts

LossFunction = Callable[..., Tensor]
"""Computes cross-entropy from hidden rows and targets: (rows, targets, ignore_index, reduction) -> loss."""


@dataclass(frozen=True)
class HeadSource:
    """What logits are computed from: the head as a function of hidden states, and the loss without logits."""

    head: Callable[[Tensor], Tensor]
    loss: LossFunction
    parameters: tuple[Tensor, ...]
    """The head's weight and, if there is one, its bias."""
    width: int
    """Number of logits of a token."""
    autocast: torch.dtype | None
    """The dtype of autocast when the head was called."""


def _describe_plainly(name: str) -> Any:
    return getattr(Tensor, name).__get__


_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_cuda", "layout", "ndim", "is_sparse", "is_meta", "is_cpu",
    "is_quantized", "is_nested", "itemsize", "nbytes", "is_mps", "is_xpu",
)  # fmt: skip
_METADATA = {_describe_plainly(name) for name in _PROPERTIES} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.is_floating_point,
    Tensor.element_size, Tensor.is_complex, Tensor.get_device, torch.is_floating_point, torch.numel, Tensor.__len__,
}  # fmt: skip
"""What is known without the logits."""
_CASTS = {Tensor.float: torch.float32, Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}
_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten}


class LazyLogits(Tensor):
    """A tensor of logits that do not exist yet."""

    hidden: Tensor
    source: HeadSource
    value: Tensor | None
    version: int

    @staticmethod
    def __new__(cls, hidden: Tensor, source: HeadSource, dtype: torch.dtype) -> LazyLogits:
        made: LazyLogits = Tensor._make_wrapper_subclass(
            cls,
            (*hidden.shape[:-1], source.width),
            dtype=dtype,
            device=hidden.device,
        )
        made.hidden, made.source, made.value, made.version = hidden, source, None, hidden._version
        return made

    def compute(self) -> Tensor:
        """Return the logits, computed at the first call."""
        if self.value is None:
            if self.hidden._version != self.version:
                raise RuntimeError("the head's input was changed in place before its logits were read")
            with torch.set_grad_enabled(torch.is_grad_enabled() or self.requires_grad):
                self.value = _run_head(self.hidden, self.source).to(self.dtype)
        return self.value

    def with_hidden(self, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return make_lazy(hidden, self.source, dtype or self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and first.value is None:
            answer = _run_lazily(func, first, args[1:], kwargs)
            if answer is not None:
                return answer
        return func(*_compute_all(args), **_compute_all(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_compute_all(args), **_compute_all(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.compute().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.compute().detach().clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.compute())


def _run_head(hidden: Tensor, source: HeadSource) -> Tensor:
    """Run the head as it would have run when the model called it."""
    kind, dtype = hidden.device.type, source.autocast
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None))
        if kind == "cpu" and dtype is not None:  # not every CPU has 16-bit products
            stack.enter_context(EmulatedProducts())  # type: ignore[no-untyped-call]
        return source.head(hidden)


def _compute_all(nest: Any) -> Any:
    if isinstance(nest, LazyLogits):
        return nest.compute()
    if type(nest) in (tuple, list):
        return type(nest)(_compute_all(part) for part in nest)
    if type(nest) is dict:
        return {name: _compute_all(part) for name, part in nest.items()}
    return nest


def _run_lazily(func: Any, logits: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function that needs no logits, or None if it does."""
    if func in _CASTS and not args and not kwargs:
        return logits.with_hidden(logits.hidden, _CASTS[func])
    if (
        func is Tensor.to
        and len(args) == 1
        and not kwargs
        and args[0] in (torch.float32, torch.bfloat16, logits.device)
    ):
        return logits.with_hidden(logits.hidden, args[0] if isinstance(args[0], torch.dtype) else None)
    if func is Tensor.contiguous and not args and not kwargs:
        return logits
    if func in _VIEWS:
        with torch._C.DisableTorchFunctionSubclass():
            shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
        if shape[-1:] != (logits.source.width,):
            return None
        return logits.with_hidden(logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1]))
    if func is Tensor.__getitem__:
        return _index(logits, args[0])
    if func is F.cross_entropy:
        return _compute_loss(logits, *args, **kwargs)
    return None


def _index(logits: LazyLogits, index: Any) -> Tensor | None:
    """Apply slices of tokens to the hidden state."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice | int) for part in parts):
        return None
    reaches_end = len([part for part in parts if part is not Ellipsis]) == logits.dim() or Ellipsis in parts
    if reaches_end and (parts[-1] is Ellipsis or parts[-1] != slice(None)):
        return None
    return logits.with_hidden(logits.hidden[index])


def _compute_loss(
    logits: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the cross-entropy from the hidden state, or None for a form that the fused loss does not have."""
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    indices = target.dim() == 1 and not target.is_floating_point() and logits.dim() == 2
    if not plain or not indices or reduction not in ("mean", "sum") or len(target) != len(logits.hidden):
        return None
    if not len(target) or logits.hidden._version != logits.version:
        return None
    return logits.source.loss(logits.hidden, target, ignore_index, reduction)


def make_lazy(hidden: Tensor, source: HeadSource, dtype: torch.dtype) -> Tensor:
    """Return logits that are computed when they are read."""
    made: Tensor = _Connect.apply(hidden, source, dtype, *source.parameters)  # type: ignore[no-untyped-call]
    return made


class _Connect(torch.autograd.Function):
    """Connects logits that do not exist to the hidden state and the head's parameters.

    Ordinary functions use the computed logits, which have their own graph. This one serves code that autograd sees and
    Python does not, such as a user's ``autograd.Function`` with the logits as an input.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, source: HeadSource, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        ctx.source, ctx.dtype = source, dtype
        ctx.save_for_backward(hidden)
        return LazyLogits(hidden, source, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        needs, _, _, *others = ctx.needs_input_grad
        leaf = hidden.detach().requires_grad_(needs)
        wanted = [leaf] * needs + [p for p, needed in zip(ctx.source.parameters, others, strict=True) if needed]
        with torch.enable_grad():
            logits = _run_head(leaf, ctx.source).to(ctx.dtype)
        found = iter(torch.autograd.grad(logits, wanted, grad))
        return next(found) if needs else None, None, None, *(next(found) if needed else None for needed in others)
