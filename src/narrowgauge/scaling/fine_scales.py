"""Casts a tensor at its site with a scale for each row or block, always from the tensor itself.

Amax and counts are recorded.
"""

from __future__ import annotations

from torch import Tensor

from narrowgauge.kernels.cast_block_scales import cast_block_scales
from narrowgauge.kernels.cast_row_scales import cast_row_scales
from narrowgauge.kernels.cast_rows import record_rows
from narrowgauge.scaling.operand import Operand
from narrowgauge.scaling.tensor import ScaleTables, ScalingRule, Site, TensorScales


def cast_finely(
    x: Tensor,
    site: Site,
    scales: TensorScales | ScalingRule,
    transposed: bool,
    *,
    record: bool,
    margin: int = 0,
    tables: ScaleTables | None = None,
    square: bool = False,
) -> Operand:
    """Cast a BF16 or FP32 tensor [N, D] to FP8, and if ``transposed`` its transpose too, with scales of its own.

    Args:
        x: The tensor.
        site: Its site, which has the format and the granularity.
        scales: The scales that the site belongs to.
        transposed: Whether the operand has the transposed copy.
        record: Whether to record amax and counts of the rows.
        margin: Headroom: scales are divided by 2**margin.
        tables: The inputs of a compiled graph with the scales; by default the tables themselves.
        square: Whether blocks are 128 x 128, as those of weights, instead of 1 x 128.
    """
    if site.granularity == "row":
        made = cast_row_scales(x, site.dtype, transposed, margin)
    else:
        made = cast_block_scales(x, site.dtype, transposed, margin, square)
    if record:
        tables = scales.tables if tables is None and isinstance(scales, TensorScales) else tables
        assert tables is not None
        record_rows(made.lp, made.amax, made.saturated, made.flushed, *tables.locate(site), False)
    if not transposed:
        return Operand(None, made.lp, None, made.inv_scale)
    return Operand(None, made.lp, made.lp_t, made.inv_scale, made.inv_scale_t)
