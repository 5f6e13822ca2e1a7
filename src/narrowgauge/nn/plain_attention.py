"""Says in one line if attention does not run in a fused kernel: torch then takes its plain implementation, silently.

Fused kernels do not support every shape and mask. T5's position bias is transposed in memory, for example. Plain
attention gives the same result, but is slower, and its memory grows with the square of the length.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from narrowgauge.errors import SlowRecipeWarning
from narrowgauge.nn.eager_modes import EagerFunctionMode


class NoticesPlainAttention(EagerFunctionMode):
    """A mode that warns at the first call that no fused kernel supports. For one forward, as it costs time."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not self.found:
            reason = _describe_unsupported(*args, **kwargs)
            self.found = reason is not None
            if reason is not None:
                warnings.warn(
                    f"attention runs in torch's plain implementation, which takes more time and memory: no fused "
                    f"kernel supports {reason}; name a backend in the recipe (attention=efficient) to get an error",
                    SlowRecipeWarning,
                    stacklevel=2,
                )
        return func(*args, **kwargs)


def _describe_unsupported(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *more: Any, **kwargs: Any
) -> str | None:
    """Return what torch's choice was about if it is plain attention, or None."""
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype

    def cast(part: Any) -> Any:  # as autocast does
        floating = isinstance(part, Tensor) and part.is_floating_point()
        return part.detach().to(dtype).requires_grad_(part.requires_grad) if floating else part

    if torch._fused_sdp_choice(*map(cast, (query, key, value, attn_mask)), *more, **kwargs) != SDPBackend.MATH.value:
        return None
    shapes = f"queries {list(query.shape)} and keys {list(key.shape)}"
    if not isinstance(attn_mask, Tensor):
        return f"{shapes} in {str(dtype).removeprefix('torch.')}"
    return f"{shapes} with a mask {list(attn_mask.shape)} (strides {list(attn_mask.stride())})"
