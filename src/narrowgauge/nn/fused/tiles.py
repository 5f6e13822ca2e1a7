"""The MLP over tiles of rows, so that its wide tensors exist for one tile at a time: long sequences in less memory.

    forward     for each tile:  u = h Wup';  a = act(u);  y[tile] = a Wdown'
    backward    for each tile:  u and a again;  grad_a, grad_u;  grad_h[tile]
                                gradients of weights and biases += those of the tile, in FP32

Only blocks whose backward runs forward again have tiles, and evaluations: otherwise u is kept anyway. Rows do not
depend on each other, so that outputs and grad_h are the same numbers as without tiles, given the same FP8 scales (but
for the order in which a GPU's product of another size may add up). Delayed scales are given. Amax and counts are
recorded tile by tile in forward, and not again in backward. If a scale is that of the tensor itself (the first step,
``scaling=current``), each tile has its own.

Dropout inside the MLP would draw other numbers tile by tile, so such a block has no tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from narrowgauge.nn.fused.adapters import AdapterGrads
from narrowgauge.nn.fused.casts import Projection
from narrowgauge.nn.fused.plan import Some
from narrowgauge.nn.fused.sublayers import Run, get_outputs
from narrowgauge.weight_copies.casts import BoundWeight

TILE_BYTES = 1 << 30
"""Most bytes of one tile of the activation's input in BF16. For Llama-3.1-8B that is 16,384 tokens; sums of gradients
then take 3% of the time of the MLP's products."""
TILE_MULTIPLE = 128
"""The rows of a tile are a multiple of this, the tile of a GEMM."""
FEWEST_TILES = 3
"""With fewer tiles, sums in FP32 would take about as much memory as tiles save."""


def choose_tile_rows(rows: int, width: int) -> int:
    """Return the rows per tile for an activation's input of [rows, width]; 0 if tiles do not pay."""
    most = max(TILE_MULTIPLE, TILE_BYTES // (2 * width) // TILE_MULTIPLE * TILE_MULTIPLE)
    tiles = -(-rows // most)
    return 0 if tiles < FEWEST_TILES else -(-rows // (tiles * TILE_MULTIPLE)) * TILE_MULTIPLE


def get_tile_rows(run: Run, rows: int) -> int:
    """Return the rows per tile of an MLP that reads so many rows; 0 for an MLP without tiles."""
    plan, dropout = run.plan, run.dropout
    is_kept = run.needed and plan.checkpoint != "full"
    if is_kept or dropout.mlp or dropout.adapters:
        return 0
    if plan.tile_rows is not None:
        return plan.tile_rows if 0 < plan.tile_rows < rows else 0
    use = run.uses.up
    return choose_tile_rows(rows, sum(get_outputs(use, number) for number in range(len(use.weights))))


def split_rows(rows: int, tile_rows: int) -> Iterator[slice]:
    """Yield the rows of each tile."""
    for start in range(0, rows, tile_rows):
        yield slice(start, min(rows, start + tile_rows))


class GradientSums:
    """Gradients of an MLP's parameters, summed over tiles in FP32."""

    def __init__(self) -> None:
        self._groups: dict[str, Some] = {}
        self._adapters: AdapterGrads = {}

    def add(self, name: str, shares: Some) -> None:
        """Add the gradients of one tile."""
        self._groups[name] = _add_all(self._groups.get(name), shares)

    def add_adapters(self, shares: AdapterGrads) -> None:
        """Add the gradients of adapters of one tile."""
        for number, pair in shares.items():
            one, other = _add_all(self._adapters.get(number), pair)
            self._adapters[number] = one, other

    def get_weights(self, name: str, use: BoundWeight) -> Some:
        """Return the gradients of a projection's weights as the optimizer reads them."""
        return tuple(None if total is None else total.to(use.gradient_dtype) for total in self._groups[name])

    def get_biases(self, name: str) -> Some:
        """Return the gradients of a projection's biases."""
        return self._groups[name]

    def get_adapters(self, run: Run, *parts: Projection) -> AdapterGrads:
        """Return the gradients of the adapters of these projections as the optimizer reads them."""
        found: AdapterGrads = {}
        for part in parts:
            found |= run.bind_adapters(part).cast_grads(self._adapters)
        return found


def _add_all(totals: tuple[Tensor | None, ...] | None, shares: tuple[Tensor | None, ...]) -> Some:
    if totals is None:
        return shares
    return tuple(
        total if total is None or share is None else total.add_(share)
        for total, share in zip(totals, shares, strict=True)
    )
