"""Casts of weights for compiled graphs: ``cast_weights`` with the tables of all sites, and the rows of one.

The rows are a tensor on the CPU, with the site's row in the table of pending counts and its row in those of amax and
counts. As numbers they would be constants of a graph, and equal layers could not share it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.kernels import define_op
from narrowgauge.kernels.cast_weights import cast_delayed, make_fake, recast


def _cast_weight_by_rows(
    weights: list[Tensor],
    scale: Tensor,
    amax: Tensor,
    counts: Tensor,
    pending: Tensor,
    rows: Tensor,
    dtype: torch.dtype,
    transposed: bool,
    margin: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``cast_weight_delayed`` in a graph."""
    first, second = rows.tolist()
    return cast_delayed(weights, scale, amax[second], counts[second], pending[first], dtype, transposed, margin)


def _recast_weight_by_rows(
    weights: list[Tensor], scale: Tensor, amax: Tensor, rows: Tensor, dtype: torch.dtype, transposed: bool, margin: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``recast_weight`` in a graph."""
    return recast(weights, scale, amax[int(rows[1])], dtype, transposed, margin)


def _raise_amax_by_rows(amax: Tensor, rows: Tensor, seen: Tensor) -> None:
    """Raise a site's amax to a number on the device."""
    place = amax[int(rows[1])]
    torch.maximum(place, seen, out=place)


cast_weight_by_rows = define_op(
    "cast_weight_by_rows",
    _cast_weight_by_rows,
    lambda weights, scale, amax, counts, pending, rows, dtype, transposed, margin: make_fake(
        weights, dtype, transposed
    ),
    ("amax", "counts", "pending"),
)
recast_weight_by_rows = define_op(
    "cast_weight_again_by_rows",
    _recast_weight_by_rows,
    lambda weights, scale, amax, rows, dtype, transposed, margin: make_fake(weights, dtype, transposed),
)
raise_amax_by_rows = define_op("raise_amax_by_rows", _raise_amax_by_rows, lambda amax, rows, seen: None, ("amax",))
