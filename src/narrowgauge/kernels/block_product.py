"""Products of FP8 operands whose blocks have scales, a @ b.T.

    [M, K / 128]        1 x 128: a scale for 128 values along the dimension that is summed
    [N / 128, K / 128]  128 x 128
    [] or [M, 1]        one scale for the tensor, or for each row: taken as that of every block

On Hopper, cuBLAS 12.9 and later multiply such operands (through torch._scaled_mm): partial sums of 128 products are
scaled and added in FP32, so there is no choice of fast accumulation. Elsewhere operands are multiplied in FP32.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.kernels.cast_block_scales import BLOCK, count_blocks, expand_scales
from narrowgauge.kernels.dry_run import is_dry_run


def multiply_blocks(
    a: Tensor, b: Tensor, inv_a: Tensor, inv_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Return a @ b.T + bias of FP8 operands [M, K] and [N, K] divided by the scales of their blocks."""
    if not can_multiply_blocks(a.device):
        return multiply_blocks_reference(a, b, inv_a, inv_b, out_dtype, bias)
    deep = a.shape[1]
    scale_a, scale_b = _list_vectors(inv_a, a), inv_b
    if len(inv_b.shape) != 2 or len(inv_b) == len(b) or count_blocks(deep) % 4:
        scale_b = _list_vectors(inv_b, b)  # torch versions differ in how rows of square blocks are padded to 4
    made: Tensor = torch._scaled_mm(
        _pad_depth(a), _pad_depth(b).t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=out_dtype
    )
    return made if bias is None else made.add_(bias)


def multiply_blocks_reference(
    a: Tensor, b: Tensor, inv_a: Tensor, inv_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    x, y = (one.float() * expand_scales(inverse, *one.shape) for one, inverse in ((a, inv_a), (b, inv_b)))
    product = x @ y.t()
    return (product if bias is None else product + bias.float()).to(out_dtype)


def can_multiply_blocks(device: torch.device) -> bool:
    """Whether cuBLAS multiplies operands with a scale for each block. A forecast assumes Hopper."""
    return device.type == "cuda" and (is_dry_run() or has_scaled_sums(device))


@functools.cache
def has_scaled_sums(device: torch.device) -> bool:
    """Whether this GPU's cuBLAS scales partial sums: on Hopper, from version 12.9 on."""
    major, minor, *_ = (int(part) for part in (torch.version.cuda or "0.0").split("."))
    return torch.cuda.get_device_capability(device)[0] == 9 and (major, minor) >= (12, 9)


def _list_vectors(inverse: Tensor, operand: Tensor) -> Tensor:
    """Return the inverse scales of blocks of 1 x 128, [rows, blocks], stored column by column."""
    rows, columns = operand.shape
    blocks = count_blocks(columns)
    if inverse.dim() == 2 and len(inverse) != rows:
        inverse = inverse.repeat_interleave(BLOCK, 0)[:rows]
    inverse = inverse.expand(rows, blocks)
    return inverse if inverse.stride() == (1, rows) else inverse.t().contiguous().t()


def _pad_depth(x: Tensor) -> Tensor:
    """Fill the last block with zeros, which add nothing to the sum."""
    missing = -x.shape[1] % BLOCK
    return F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype) if missing else x
