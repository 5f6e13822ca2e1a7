"""Causal attention of documents that are packed one after another, each of which sees itself only.

With bounds b_0 = 0 <= b_1 <= ... <= b_N = B T (cu_seqlens), document n is the tokens b_n to b_{n+1} - 1 of the batch:

    output[i] = softmax(scale q[i] k[j]^T) v[j]        b_n <= j <= i < b_{n+1}

Documents may be empty. FlashAttention skips the products of different documents. With a boolean mask torch computes all
of them (H200, B=4, T=2048, 32 and 8 heads of 128, forward and backward: 3.24 ms with a mask; 2.0 ms with one document a
row, 0.93 ms with 4, 0.585 ms with 16).

On a CPU the reference runs: attention of one document after another. It too takes less time than a mask (one thread,
FP32, B=2, T=1024, 8 heads of 64, forward and backward: 620 ms with a mask, 98 ms with 8 documents a row, 55 ms with 64)
except where all is small (B=2, T=64, 4 heads of 16, 4 documents a row: 1.4 ms with a mask, 2.5 ms).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_HEAD = 192
"""FlashAttention 2 computes gradients of larger heads on some GPUs only."""
OLDEST = (8, 0)
"""The first compute capability of FlashAttention 2."""


def can_attend(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether documents can be attended to without a mask, with the kernels that torch's settings allow."""
    if device.type != "cuda":
        return device.type == "cpu"
    return (
        dtype in (torch.bfloat16, torch.float16)
        and head_size <= LARGEST_HEAD
        and head_size % 8 == 0
        and torch.version.cuda is not None
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= OLDEST
    )


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Return attention's output [B, H, T, S], stored as [B, T, H, S]; differentiable.

    Args:
        q: Queries [B, H, T, S].
        k: Keys [B, K, T, S], where K divides H.
        v: Values of the same shape.
        bounds: Where documents start in the B T tokens, and at last B T: int32 [N + 1]. Not read by the host on a GPU.
        longest: At least the length of the longest document.
        dropout: Probability of dropout of the weights.
        scale: Factor of the scores; None for 1 / sqrt(S).
    """
    attend = attend_by_flash if q.is_cuda else attend_documents_reference
    return attend(q, k, v, bounds, longest, dropout, scale)


def attend_by_flash(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, dropout: float, scale: float | None
) -> Tensor:
    """Run FlashAttention on tokens [B T, H, S], which are views if q, k and v are parts of a projection's output."""
    bounds = bounds.data  # with its own version counter: as input of a CUDA graph it changes after a forward, rightly
    output: Tensor = torch.ops.aten._flash_attention_forward(
        _join_rows(q), _join_rows(k), _join_rows(v), bounds, bounds, longest, longest, dropout, True, False, scale=scale
    )[0]
    return _split_rows(output, len(q))


def attend_documents_reference(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attend to one document after another."""
    lengths = [length for length in bounds.diff().tolist() if length]
    assert max(lengths) <= longest, f"a document of {max(lengths)} tokens, but the longest should have {longest}"
    grouped = q.shape[1] != k.shape[1]
    outputs = []
    for parts in zip(*(_join_rows(tensor).split(lengths) for tensor in (q, k, v)), strict=True):
        one, two, three = (part.transpose(0, 1)[None] for part in parts)
        mixed = F.scaled_dot_product_attention(
            one, two, three, None, dropout, is_causal=True, scale=scale, enable_gqa=grouped
        )
        outputs.append(mixed[0].transpose(0, 1))
    return _split_rows(torch.cat(outputs), len(q))


def _join_rows(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).flatten(0, 1)


def _split_rows(tensor: Tensor, rows: int) -> Tensor:
    return tensor.view(rows, -1, *tensor.shape[1:]).transpose(1, 2)
