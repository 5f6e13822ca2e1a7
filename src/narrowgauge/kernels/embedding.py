"""The gradient of an embedding: each token's gradient is added to the row of its id. torch sorts the tokens instead.

    out[ids[n]] += grad[n]                                    FP32, with atomic additions in the cache

Bytes: 4 read for each value of ``grad``, 4 written for each value of ``out``; 0.35 GB for GPT-2's 65,536 tokens of 768.
The order of additions differs between runs, as in torch's compiled embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.kernels import HAVE_TRITON, can_bypass_op, jit, register, use_triton
from narrowgauge.kernels.launch import launch_kernel

if HAVE_TRITON:
    import triton.language as tl

MAX_COLUMNS = 16384


def embedding_backward(grad: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Sum the rows of ``grad`` [N, D] by their ``ids`` [N]; return [vocab_size, D] in FP32."""
    return (_embedding_backward if can_bypass_op(grad, ids) else _embedding_backward_op)(grad, ids, vocab_size)


def embedding_backward_reference(grad: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    out = torch.zeros(vocab_size, grad.shape[1], dtype=torch.float32, device=grad.device)
    return out.index_add_(0, ids, grad.float())


@jit
def add_rows_kernel(grad_ptr, ids_ptr, out_ptr, width, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    word = tl.load(ids_ptr + row)
    columns = tl.arange(0, BLOCK)
    g = tl.load(grad_ptr + row * stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.atomic_add(out_ptr + word * width + columns, g, mask=columns < width, sem="relaxed")


def _embedding_backward(grad: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    length, width = grad.shape
    if not use_triton(grad) or width > MAX_COLUMNS:
        return embedding_backward_reference(grad, ids, vocab_size)
    out = torch.zeros(vocab_size, width, dtype=torch.float32, device=grad.device)
    rows = grad if grad.stride(1) == 1 else grad.contiguous()
    if length and width:
        block = max(16, 1 << (width - 1).bit_length())
        launch_kernel(
            add_rows_kernel,
            (length,),
            rows,
            ids.contiguous(),
            out,
            width,
            rows.stride(0),
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
        )
    return out


_embedding_backward_op = register(
    "embedding_backward",
    _embedding_backward,
    lambda grad, ids, vocab_size: grad.new_empty((vocab_size, grad.shape[1]), dtype=torch.float32),
)
