"""A tensor as products read it: in BF16 or FP32, in FP8 with the inverses of its scales, or in several of these.

How an FP8 tensor is scaled is data: its format is the dtype of the tensor, its granularity the shape of the scales.

    granularity   inverse scales   a scale is for          the transposed copy
    tensor        []               the whole tensor        is x_lp transposed, with the same scale
    row           [rows, 1]        one row of the copy     is cast from x, with scales for its own rows
    block         [rows, K / 128]  1 x 128 values          is cast from x, with scales for its own blocks
                  [rows / 128, K / 128]  128 x 128 values  has the same scales, transposed

Whether scales are delayed or current is a matter of the cast (``scaling/tensor.py``). Products multiply whatever pair
they get (``nn/products/gemm.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.kernels.cast import transpose
from narrowgauge.kernels.cast_block_scales import BLOCK, count_blocks

WIDE = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""The dtypes of the formats that need no scale."""


def get_granularity(inv_scale: Tensor, tensor: Tensor) -> str:
    """Return what each of a tensor's scales is for, by their shape: "tensor", "row" or "block".

    A block of 1 x 128 that is a whole row is one.
    """
    if inv_scale.dim() < 2:
        return "tensor"
    return "row" if inv_scale.shape == (tensor.shape[0], 1) else "block"


class Operand(NamedTuple):
    """A tensor as input of a product: in BF16 (or FP32), in FP8, in transposed FP8, or in several of these."""

    hp: Tensor | None = None
    lp: Tensor | None = None
    lp_t: Tensor | None = None
    inv_scale: Tensor | None = None
    inv_scale_t: Tensor | None = None
    """That of ``lp_t``, if it is not ``inv_scale``: in an operand with both copies whose rows or blocks have scales."""

    @property
    def transposed_inv_scale(self) -> Tensor | None:
        """The inverse scales of ``lp_t``."""
        return self.inv_scale if self.inv_scale_t is None else self.inv_scale_t

    @property
    def rows(self) -> int:
        """Number of rows, which are tokens; 0 if it is empty."""
        if self.lp_t is not None:
            return self.lp_t.shape[1]
        tensor = self.hp if self.hp is not None else self.lp
        return 0 if tensor is None else len(tensor)

    def slice_rows(self, part: slice) -> Operand:
        """Return some rows without a copy. If blocks of ``lp_t`` have scales, the first row must begin a block."""
        inv_scale, inv_scale_t = self.inv_scale, _slice_blocks(self.inv_scale_t, part)
        if self.has_fine_scales and inv_scale is not None:
            inv_scale = _slice_blocks(inv_scale, part) if self.lp is None else inv_scale[part]
        return Operand(
            self.hp[part] if self.hp is not None else None,
            self.lp[part] if self.lp is not None else None,
            self.lp_t[:, part] if self.lp_t is not None else None,
            inv_scale,
            inv_scale_t,
        )

    @property
    def has_fine_scales(self) -> bool:
        """Whether each row or block has a scale."""
        return self.inv_scale is not None and self.inv_scale.dim() == 2

    def transposed(self) -> Operand:
        """Return the operand with a transposed FP8 copy, made now if it does not exist."""
        if self.lp_t is not None or self.lp is None:
            return self
        assert not self.has_fine_scales, "the transposed copy has other scales: cast it from the original tensor"
        return self._replace(lp_t=transpose(self.lp))

    def report(self, kind: str, path: str) -> None:
        """Report the tensor to listeners, in whichever format it has."""
        tensor = self.hp if self.hp is not None else self.lp if self.lp is not None else self.lp_t
        inv_scale = self.transposed_inv_scale if tensor is self.lp_t else self.inv_scale
        if tensor is not None:
            events.report_tensor(kind, path, tensor, None if tensor is self.hp else inv_scale)


def _slice_blocks(inv_scale: Tensor | None, part: slice) -> Tensor | None:
    """Return the scales of some columns of a transposed copy."""
    if inv_scale is None or inv_scale.dim() < 2 or inv_scale.shape[1] == 1:
        return inv_scale
    start, stop = part.start or 0, part.stop
    assert start % BLOCK == 0, "a slice begins within a block"
    return inv_scale[:, start // BLOCK : None if stop is None else count_blocks(stop)]
