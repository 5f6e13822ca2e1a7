"""Logits that are computed when somebody reads them, and not at all if only their cross-entropy is wanted.

A model's head returns ``LazyLogits``: a tensor with the shape, dtype and device of the logits that holds the hidden
state instead. What is then called on them is recorded, and results are ``LazyLogits`` again:

    views, slices of tokens         applied to the hidden state
    casts                           noted
    * or / by a number, tanh        noted: a factor or a soft cap of the logits

``F.cross_entropy`` runs the fused head and loss, with factor, cap and label smoothing. Everything else (reading values,
other functions, hooks) runs the head and the recorded calls as they were written, once, and uses their result. So
library code and training loops need no change, whichever way they compute their loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge import hardware
from narrowgauge.kernels.cross_entropy import LossForm
from narrowgauge.nn.cpu_emulation import EmulatedProducts
from narrowgauge.nn.fused.logit_steps import Step, apply_steps, combine_steps, read_step

LossFunction = Callable[[Tensor, Tensor, int, str, LossForm], Tensor]
"""Computes cross-entropy from hidden rows and targets: (rows, targets, ignore_index, reduction, form) -> loss."""


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
    note_late_read: Callable[[], None]
    """Called when logits are read after the head's parameters have changed."""


def _describe_plainly(name: str) -> Any:
    return getattr(Tensor, name).__get__


_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_cuda", "layout", "ndim", "is_sparse", "is_meta", "is_cpu",
    "is_quantized", "is_nested", "itemsize", "nbytes", "is_mps", "is_xpu",
)  # fmt: skip
METADATA = {_describe_plainly(name) for name in _PROPERTIES} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.is_floating_point,
    Tensor.element_size, Tensor.is_complex, Tensor.get_device, torch.is_floating_point, torch.numel, Tensor.__len__,
}  # fmt: skip
"""What is known without the logits."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = {Tensor.float: torch.float32, Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}
FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten}


class Recorded(NamedTuple):
    """A function that was called on logits, with its other arguments."""

    func: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def repeat(self, logits: LazyLogits) -> Tensor:
        """Call the function on computed logits."""
        value = logits.compute()
        if value._version != logits.version and self.func not in (*_VIEWS, Tensor.__getitem__):
            raise RuntimeError(
                f"logits were changed in place after {self.func.__name__} was called on them and before its result "
                "was read. narrowgauge computes logits when they are read: change a copy, or clone the result before"
            )
        return self.func(value, *self.args, **self.kwargs)


class Past(NamedTuple):
    """Where logits come from."""

    source: HeadSource
    input: Tensor
    """The head's input."""
    versions: tuple[int, ...]
    """Of the head's input and parameters, when it was called."""

    def check_unchanged(self) -> None:
        """Note if the head's parameters have changed since it was called; raise an error if its input has.

        Many loops read logits after the optimizer's step, for an accuracy. The head then returns ordinary logits from
        its next call on.
        """
        before, *of_parameters = self.versions
        if self.input._version != before:
            raise RuntimeError(
                "the head's input was changed in place before its logits were read. narrowgauge computes logits when "
                "they are read: read them (logits.detach(), for example) before"
            )
        now = [parameter._version for parameter in self.source.parameters]
        if now != of_parameters:
            self.source.note_late_read()


class LazyLogits(Tensor):
    """A tensor of logits that do not exist yet."""

    past: Past
    hidden: Tensor
    """The hidden state in the shape of these logits."""
    steps: tuple[Step, ...]
    """What was done to the logits, in order, except for views and casts."""
    parent: tuple[LazyLogits, Recorded] | None
    """The logits of which these are a function, until they are computed; None for what the head returns."""
    value: Tensor | None
    version: int
    """Of the value, when it was computed."""

    @staticmethod
    def __new__(
        cls, hidden: Tensor, past: Past, dtype: torch.dtype, steps: tuple[Step, ...], parent: Any
    ) -> LazyLogits:
        shape = (*hidden.shape[:-1], past.source.width)
        with torch._C.DisableTorchFunction():  # which may report a simulated GPU: autograd would end the process
            made: LazyLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made.hidden, made.past, made.steps, made.parent, made.value = hidden, past, steps, parent, None
        return made

    def exist(self) -> bool:
        """Whether these logits, or some that they are a function of, have been computed."""
        if self.value is not None:
            return True
        return self.parent is not None and self.parent[0].exist()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compute(self) -> Tensor:
        """Return the logits, computed at the first call."""
        if self.value is None:
            with torch.set_grad_enabled(self.requires_grad):
                if self.parent is None:
                    self.past.check_unchanged()
                    self.value = _run_head(self.hidden, self.past.source).to(self.dtype)
                else:
                    earlier, call = self.parent
                    self.value = call.repeat(earlier)
            self.parent, self.version = None, self.value._version  # frees what nobody else refers to
        return self.value

    def then(
        self,
        call: Recorded,
        hidden: Tensor | None = None,
        dtype: torch.dtype | None = None,
        step: tuple[Step, ...] = (),
    ) -> Tensor:
        """Return the result of a recorded call."""
        hidden = self.hidden if hidden is None else hidden
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad):
            return _connect(hidden, self.past, dtype or self.dtype, (*self.steps, *step), (self, call))

    # torch.compile must not trace what follows: it compiled these functions with guards that miss their arguments.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and not first.exist():
            answer = _run_lazily(first, Recorded(func, args[1:], kwargs))
            if answer is not None:
                return answer
        return func(*_compute_all(args), **_compute_all(kwargs))

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        if kind == "cpu" and dtype is not None and FORMATS[dtype] not in hardware.detect("cpu").native:
            stack.enter_context(EmulatedProducts())
        return source.head(hidden)


def _compute_all(nest: Any) -> Any:
    if isinstance(nest, LazyLogits):
        return nest.compute()
    if type(nest) in (tuple, list):
        return type(nest)(_compute_all(part) for part in nest)
    if type(nest) is dict:
        return {name: _compute_all(part) for name, part in nest.items()}
    return nest


def _run_lazily(logits: LazyLogits, call: Recorded) -> Any:
    """Return the result of a function that needs no logits, or None if it does."""
    func, args, kwargs = call
    step = read_step(func, args, kwargs)
    if step is not None:
        return logits.then(call, step=(step,))
    if func in _CASTS and not args and not kwargs:
        return logits.then(call, dtype=_CASTS[func])
    if func is Tensor.to:
        target = args[0] if len(args) == 1 and not kwargs else kwargs.get("dtype") if len(kwargs) == 1 else None
        if isinstance(target, torch.dtype) and target in _DTYPES:
            return logits.then(call, dtype=target)
        return logits if isinstance(target, torch.device) and target == logits.device else None
    if func is Tensor.contiguous and not args and not kwargs:
        return logits.then(call)
    if func in _VIEWS:
        with torch._C.DisableTorchFunctionSubclass():
            # Of a single number: in a forecast, where meta tensors count as memory, all logits would be the peak.
            shape = func(torch.empty((), device="meta").expand(logits.shape), *args, **kwargs).shape
        if shape[-1:] != (logits.past.source.width,):
            return None
        return logits.then(call, logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1]))
    if func is Tensor.__getitem__:
        return logits.then(call, logits.hidden[args[0]]) if _selects_tokens(logits, args[0]) else None
    if func is F.cross_entropy:
        return _compute_loss(logits, *args, **kwargs)
    return None


def _selects_tokens(logits: LazyLogits, index: Any) -> bool:
    """Whether an index consists of slices and numbers of tokens, and keeps all classes."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice | int) for part in parts):
        return False
    reaches_end = len([part for part in parts if part is not Ellipsis]) == logits.dim() or Ellipsis in parts
    return not reaches_end or (parts[-1] is not Ellipsis and parts[-1] == slice(None))


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
    form = combine_steps(logits.steps, label_smoothing) if 0.0 <= label_smoothing <= 1.0 else None
    if form is None or weight is not None or size_average is not None or reduce is not None:
        return None
    indices = target.dim() == 1 and not target.is_floating_point() and logits.dim() == 2
    if not indices or reduction not in ("mean", "sum") or not len(target) or len(target) != len(logits.hidden):
        return None
    logits.past.check_unchanged()
    with torch.set_grad_enabled(torch.is_grad_enabled() and logits.requires_grad):
        return logits.past.source.loss(logits.hidden, target, ignore_index, reduction, form)


def make_lazy(hidden: Tensor, source: HeadSource, dtype: torch.dtype) -> Tensor:
    """Return logits that are computed when they are read."""
    past = Past(source, hidden, tuple(tensor._version for tensor in (hidden, *source.parameters)))
    return _connect(hidden, past, dtype, (), None)


def _connect(hidden: Tensor, past: Past, dtype: torch.dtype, steps: tuple[Step, ...], parent: Any) -> Tensor:
    made: Tensor = _Connect.apply(hidden, past, dtype, steps, parent, *past.source.parameters)  # type: ignore[no-untyped-call]
    return made


class _Connect(torch.autograd.Function):
    """Connects logits that do not exist to the hidden state and the head's parameters.

    Ordinary functions use the computed logits, which have their own graph. This one serves code that autograd sees and
    Python does not, such as a user's ``autograd.Function`` with the logits as an input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        past: Past,
        dtype: torch.dtype,
        steps: tuple[Step, ...],
        parent: Any,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.source, ctx.dtype, ctx.steps = past.source, dtype, steps
        ctx.save_for_backward(hidden)
        return LazyLogits(hidden, past, dtype, steps, parent)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        needs, _, _, _, _, *others = ctx.needs_input_grad
        leaf = hidden.detach().requires_grad_(needs)
        wanted = [leaf] * needs + [p for p, needed in zip(ctx.source.parameters, others, strict=True) if needed]
        with torch.enable_grad():
            logits = apply_steps(_run_head(leaf, ctx.source).to(ctx.dtype), ctx.steps)
        found = iter(torch.autograd.grad(logits, wanted, grad))
        none = (None,) * 4
        return next(found) if needs else None, *none, *(next(found) if needed else None for needed in others)
