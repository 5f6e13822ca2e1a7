"""The gradient of an embedding: each token's is added to its word's row, where torch sorts the tokens first.

    out[ids[n]] += grad[n]                                    FP32, by atomic additions in the cache

Bytes: 4 read for each value of ``grad``, 4 written for each value of ``out``; GPT-2's 65,536 tokens of 768 are 0.35 GB.
The order of additions is not the same in every run, as in torch's compiled embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, direct, jit, register, use_triton

if HAVE_TRITON:
    import triton.language as tl

MOST_COLUMNS = 16384


def embedding_gradient(grad: Tensor, ids: Tensor, words: int) -> Tensor:
    """The sums [words, D] of the rows of ``grad`` [N, D] by their ``ids`` [N], in FP32."""
    return (_gradient if direct(grad, ids) else _gradient_op)(grad, ids, words)


def embedding_gradient_reference(grad: Tensor, ids: Tensor, words: int) -> Tensor:
    out = torch.zeros(words, grad.shape[1], dtype=torch.float32, device=grad.device)
    return out.index_add_(0, ids, grad.float())


@jit
def add_rows_kernel(grad_ptr, ids_ptr, out_ptr, width, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    word = tl.load(ids_ptr + row)
    columns = tl.arange(0, BLOCK)
    g = tl.load(grad_ptr + row * stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.atomic_add(out_ptr + word * width + columns, g, mask=columns < width, sem="relaxed")


def _gradient(grad: Tensor, ids: Tensor, words: int) -> Tensor:
    length, width = grad.shape
    if not use_triton(grad) or width > MOST_COLUMNS:
        return embedding_gradient_reference(grad, ids, words)
    out = torch.zeros(words, width, dtype=torch.float32, device=grad.device)
    rows = grad if grad.stride(1) == 1 else grad.contiguous()
    if length and width:
        block = max(16, 1 << (width - 1).bit_length())
        add_rows_kernel[(length,)](
            rows, ids.contiguous(), out, width, rows.stride(0), BLOCK=block, num_warps=max(1, min(8, block // 256))
        )
    return out


_gradient_op = register(
    "embedding_gradient",
    _gradient,
    lambda grad, ids, words: grad.new_empty((words, grad.shape[1]), dtype=torch.float32),
)
