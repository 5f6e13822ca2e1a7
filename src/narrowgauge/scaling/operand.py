"""A tensor as products read it: in BF16 or FP32, in FP8 with the inverse of its scale, or in several of these."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge import events
from narrowgauge.kernels.cast import transpose

WIDE = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""The dtypes of the formats that need no scale."""


class Operand(NamedTuple):
    """A tensor as input of a product: in BF16 (or FP32), in FP8, in transposed FP8, or in several of these."""

    hp: Tensor | None = None
    lp: Tensor | None = None
    lp_t: Tensor | None = None
    inv_scale: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of rows, which are tokens; 0 if it is empty."""
        if self.lp_t is not None:
            return self.lp_t.shape[1]
        tensor = self.hp if self.hp is not None else self.lp
        return 0 if tensor is None else len(tensor)

    def slice_rows(self, part: slice) -> Operand:
        """Return some rows without a copy."""
        return Operand(
            self.hp[part] if self.hp is not None else None,
            self.lp[part] if self.lp is not None else None,
            self.lp_t[:, part] if self.lp_t is not None else None,
            self.inv_scale,
        )

    def transposed(self) -> Operand:
        """Return the operand with a transposed FP8 copy, made now if it does not exist."""
        if self.lp_t is not None or self.lp is None:
            return self
        return self._replace(lp_t=transpose(self.lp))

    def report(self, kind: str, path: str) -> None:
        """Report the tensor to listeners, in whichever format it has."""
        tensor = self.hp if self.hp is not None else self.lp if self.lp is not None else self.lp_t
        if tensor is not None:
            events.report_tensor(kind, path, tensor, None if tensor is self.hp else self.inv_scale)
