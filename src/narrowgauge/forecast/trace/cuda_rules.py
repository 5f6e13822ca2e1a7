"""The choices that torch makes for CUDA tensors, applied to meta tensors: autocast, attention, dropout, softmax.

Meta tensors have no autocast and no fused kernels. What torch would choose for CUDA is chosen here, one function call
at a time:

    autocast     matrix products in the low-precision format, the functions of ``nn.keep_fp32`` in FP32. Casts of
                 parameters are cached until the outermost autocast ends, as in torch. Grouped products as in
                 ``nn.grouped_mm``
    attention    cuDNN, FlashAttention, memory-efficient or math, by what is enabled, the format, mask and head size
    dropout      one kernel that keeps a mask of bytes
    softmax      of 16-bit values in FP32, without an FP32 copy of the input
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from narrowgauge.nn.grouped_mm import grouped_product
from narrowgauge.nn.keep_fp32 import FP32_FUNCTIONS

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
_NARROW = {
    torch: "mm matmul bmm addmm addbmm baddbmm addmv addr mv chain_matmul conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d prelu einsum lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    F: "linear prelu multi_head_attention_forward",
    Tensor: "mm matmul bmm addmm addbmm baddbmm addmv addr mv prelu __matmul__ __rmatmul__",
}
LOW_PRECISION_FUNCTIONS = frozenset(getattr(owner, name) for owner, names in _NARROW.items() for name in names.split())
"""The functions that CUDA autocast runs in low precision, from its documentation."""
_ORIGINAL: dict[str, Any] = {"attention": F.scaled_dot_product_attention, "dropout": F.dropout}
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax)
_DEFAULT_ORDER = [1, 2, 0, 3, 4]
"""torch's default order of attention backends, as numbers."""


class Rules:
    """The choices for a GPU with a given compute capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.on_cast: Callable[[Tensor, Tensor], None] = lambda parameter, copy: None
        """Is called with every parameter and its low-precision copy."""
        self._narrowed: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function as it runs on CUDA."""
        if func is _ORIGINAL["attention"]:
            return self.attention(*args, **kwargs)
        if func is _ORIGINAL["dropout"]:
            return self.dropout(*args, **kwargs)
        if torch.is_autocast_enabled("cuda"):
            if func is torch._grouped_mm:
                return grouped_product(torch.get_autocast_dtype("cuda"), *args, **kwargs)
            if func in LOW_PRECISION_FUNCTIONS:
                args, kwargs = self._map(args, self._narrow), self._map(kwargs, self._narrow)
            elif func in FP32_FUNCTIONS:
                wide = _softmax_in_fp32(func, args, kwargs) if func in _SOFTMAX or func is F.cross_entropy else None
                if wide is not None:
                    return wide
                args, kwargs = self._map(args, _widen), self._map(kwargs, _widen)
        return func(*args, **kwargs)

    def forget(self) -> None:
        """Clear the cache of casts, when the outermost autocast ends."""
        self._narrowed.clear()

    def _narrow(self, tensor: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cuda")
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64) or tensor.device.type == "cpu":
            return tensor
        kept = tensor.is_leaf and tensor.requires_grad and tensor.dtype is torch.float32
        if not kept or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        key = id(tensor), dtype
        if key not in self._narrowed:
            self._narrowed[key] = tensor, tensor.to(dtype)
            self.on_cast(*self._narrowed[key])
        return self._narrowed[key][1]

    def _map(self, nest: Any, change: Any) -> Any:
        if isinstance(nest, Tensor):
            return change(nest)
        if isinstance(nest, list | tuple):
            return type(nest)(self._map(item, change) for item in nest)
        return {name: self._map(item, change) for name, item in nest.items()} if isinstance(nest, dict) else nest

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if input.device.type == "cpu" or not training or inplace or not 0 < p < 1:
            plain: Tensor = _ORIGINAL["dropout"](input, p, training, inplace)
            return plain
        return torch.native_dropout(input, p, True)[0]

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Call the backend that torch would choose."""
        if torch.is_autocast_enabled("cuda"):
            query, key, value = (self._narrow(tensor) for tensor in (query, key, value))
            attn_mask = None if attn_mask is None else self._narrow(attn_mask)
        if query.device.type == "cpu":
            plain: Tensor = _ORIGINAL["attention"](
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return plain
        backend = self._backend(query, key, attn_mask)
        learns = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None and tensor.requires_grad]
        needs = torch.is_grad_enabled() and bool(learns)
        mask = _as_bias(attn_mask, query, key)
        if backend is SDPBackend.CUDNN_ATTENTION:
            made = aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, needs, dropout_p, is_causal, False, scale=scale
            )
        elif backend is SDPBackend.FLASH_ATTENTION:
            made = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        elif backend is SDPBackend.EFFICIENT_ATTENTION:
            made = aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, needs, dropout_p, is_causal, scale=scale
            )
        else:
            made = aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        output: Tensor = made[0]
        return output

    def _backend(self, query: Tensor, key: Tensor, mask: Tensor | None) -> SDPBackend:
        """The first enabled backend that supports the format, head size and mask.

        cuDNN has no gradient for a bias, which T5 learns. That torch takes the next kernel is assumed, not checked. A
        mask whose last dimension is not contiguous is for the math backend only (seen on an H200 with T5's bias).
        """
        size, half, grouped = query.shape[-1], query.dtype in HALVES, query.shape[-3] != key.shape[-3]
        modern = self.capability >= (8, 0)
        learned = mask is not None and mask.requires_grad and torch.is_grad_enabled()
        readable = mask is None or mask.stride(-1) == 1
        cuda = torch.backends.cuda
        can = {
            SDPBackend.CUDNN_ATTENTION: (
                cuda.cudnn_sdp_enabled()
                and half
                and modern
                and size <= 128
                and not size % 8
                and not learned
                and readable
            ),
            SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled() and half and modern and size <= 256 and mask is None,
            SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled() and not grouped and readable,
            SDPBackend.MATH: cuda.math_sdp_enabled(),
        }
        order = [int(number) for number in torch._C._get_sdp_priority_order()]
        if order == _DEFAULT_ORDER and self.capability in ((9, 0), (10, 0)):
            order = [3, 1, 2, 0]  # torch prefers cuDNN on Hopper and Blackwell
        by_number = {int(backend.value): backend for backend in can}
        for number in order:
            backend = by_number.get(number)
            if backend is not None and can[backend] and query.dim() == 4:
                return backend
        if can[SDPBackend.MATH]:
            return SDPBackend.MATH
        raise RuntimeError("No available kernel. Aborting execution.")


def _as_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as fused kernels expect it: a value for each score, in the format of the queries."""
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device) if mask.dtype is torch.bool else mask
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def _softmax_in_fp32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """A softmax of 16-bit values in FP32, whose kernel converts as it reads; None for calls it does not cover."""
    x = args[0] if args else kwargs.get("input")
    given = {
        name: value for name, value in kwargs.items() if value is not None and name not in ("input", "_stacklevel")
    }
    if not isinstance(x, Tensor) or x.dtype not in HALVES or x.device.type == "cpu":
        return None
    if func is F.cross_entropy:
        target = args[1] if len(args) > 1 else given.pop("target", None)
        plain = not given.pop("label_smoothing", 0.0) and not set(given) - {"ignore_index", "reduction"}
        if not plain or len(args) > 2 or x.dim() != 2 or target is None or target.is_floating_point():
            return None
        loss: Tensor = F.nll_loss(_Softmax.apply(x, 1, True), target, **given)  # type: ignore[no-untyped-call]
        return loss
    dim = args[1] if len(args) > 1 else given.pop("dim", None)
    if given or len(args) > 2 or not isinstance(dim, int):
        return None
    soft: Tensor = _Softmax.apply(x, dim, "log" in func.__name__)  # type: ignore[no-untyped-call]
    return soft


class _Softmax(torch.autograd.Function):
    """FP32 output and 16-bit gradient. The ops support FP16 only, so BF16 tensors are viewed as FP16.

    That torch treats BF16 the same way was measured: eager GPT-2 124M had the same peak of 59.1 GiB in FP16 and in BF16
    (docs/forecast.md), which leaves no room for an FP32 gradient of the logits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, log: bool) -> Tensor:
        out: Tensor = (aten._log_softmax if log else aten._softmax)(x.view(torch.float16), dim, True)
        ctx.save_for_backward(out)
        ctx.dim, ctx.log, ctx.dtype = dim, log, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        backward = aten._log_softmax_backward_data if ctx.log else aten._softmax_backward_data
        return backward(grad, out, ctx.dim, torch.float16).view(ctx.dtype), None, None
