"""Reads the input of a head in the formats of its products, some rows at a time: no copy has all rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.kernels import cast
from narrowgauge.scaling.operand import Operand

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


class InputReader(NamedTuple):
    """The input, and how its parts are made from it."""

    x: Tensor
    given: Operand
    """Formats that exist already."""
    scale: Tensor | None
    """Of all rows; None if no product reads FP8, or FP8 is given."""
    inv_scale: Tensor | None
    wide: torch.dtype | None
    """The format of products that do not read FP8."""

    def read(self, part: slice) -> Operand:
        """Return some of the rows."""
        found = self.given.slice_rows(part)
        if self.scale is not None:
            found = Operand(found.hp, cast.cast(self.x[part], self.scale, E4M3), None, self.inv_scale)
        return found if self.wide is None or found.hp is not None else found._replace(hp=self.x[part].to(self.wide))

    def read_transposed(self, part: slice) -> Operand:
        """Return some of the rows as columns, in FP8."""
        if self.scale is None:
            found = self.given.slice_rows(part).transposed()
            return Operand(None, None, found.lp_t, found.inv_scale)
        return Operand(None, None, cast.cast_transpose(self.x[part], self.scale, E4M3)[1], self.inv_scale)


def pad_rows(x: Operand, targets: Tensor, multiple: int, ignore_index: int) -> tuple[Operand, Tensor]:
    """Add rows of zeros with ignored targets, to a multiple of rows."""
    more = -len(targets) % multiple
    if not more:
        return x, targets

    def below(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        wide = t if t.dtype is BF16 else t.view(torch.uint8)  # a zero in FP8 is a zero byte
        return F.pad(wide, (0, 0, 0, more)).view(t.dtype)

    return Operand(below(x.hp), below(x.lp), None, x.inv_scale), F.pad(targets, (0, more), value=ignore_index)


def cut(whole: slice, size: int) -> list[slice]:
    """Divide a range of rows into pieces of a size; the last one may be smaller."""
    return [slice(start, min(start + size, whole.stop)) for start in range(whole.start, whole.stop, size)]
