"""Counts the floating-point operations of an operation, and the bytes it reads and writes.

Matrix products and convolutions are counted by torch's own formulas (``torch.utils.flop_counter``), with two FLOPs for
a multiplication and addition. Attention is counted here; of causal attention only the half that is computed. Everything
else counts one FLOP for each value it writes, as memory bounds it in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from narrowgauge.forecast.trace.trace import Op
from narrowgauge.kernels.experts.slots import TILE

SELECTED = {"embedding": 0, "index_select": 0, "gather": 0, "nll_loss_forward": 0, "nll_loss_backward": 1}
"""Operations that read only a part of one operand: its position. Their indices determine how much."""

_BY_SLOTS = {
    "narrowgauge::multiply_by_experts": 0,
    "narrowgauge::multiply_wide_by_experts": 0,
    "narrowgauge::multiply_slots_of_experts": 1,
    "narrowgauge::multiply_wide_slots_of_experts": 0,
}
"""Products of experts, and which dimension of their first operand are slots."""


def count_flops(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Mapping[str, Any], result: Any
) -> float:
    """FLOPs of a call; ``given`` are its arguments by name."""
    if "query" in given and "key" in given and "value" in given:
        return _count_attention(given["query"], given["key"], given["value"], "backward" in func._schema.name) / (
            2 if given.get("is_causal", False) else 1
        )
    if func._schema.name == "aten::_grouped_mm":
        return _count_grouped(given["self"], given["mat2"])
    if func._schema.name in _BY_SLOTS:
        return _count_by_slots(func._schema.name, given, result)
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    outputs = result if isinstance(result, tuple | list) else (result,)
    return float(sum(tensor.numel() for tensor in outputs if isinstance(tensor, Tensor)))


def _count_by_slots(name: str, given: Mapping[str, Any], result: Tensor) -> float:
    """Buffers have slots for the worst case. On average, half of an expert's last tile is empty."""
    slots = given["a"].shape[_BY_SLOTS[name]]
    empty = (TILE // 2) * (len(given["starts"]) - 1)
    used = max(slots - empty, slots // 2)
    columns = given["a"].numel() // slots
    return float(2 * used * columns * result.shape[-1])


def _count_grouped(a: Tensor, b: Tensor) -> float:
    """Each token goes to one expert: the number of experts counts only where both operands have that dimension."""
    groups = len(a) if a.dim() == b.dim() == 3 else 1
    return 2.0 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _count_attention(query: Tensor, key: Tensor, value: Tensor, backward: bool) -> float:
    """Two products in forward (scores, output); five in backward, which recomputes the scores."""
    scores = float(query.shape[:-1].numel() * key.shape[-2])
    size, mixed = query.shape[-1], value.shape[-1]
    return 2 * scores * (3 * size + 2 * mixed if backward else size + mixed)


def correct_bytes(op: Op) -> None:
    """Correct the bytes of operations that read less than their whole operands."""
    name = op.name.rpartition(".")[2]
    place = SELECTED.get(name)
    if place is not None and place < len(op.reads):
        chosen = op.reads[place]
        others = [piece for index, piece in enumerate(op.reads) if index != place]
        rows = max((prod(piece.shape) for piece in others if not piece.dtype.is_floating_point), default=1)
        width = chosen.shape[-1] if name in ("embedding", "index_select") else 1
        chosen.bytes = min(chosen.bytes, rows * width * chosen.dtype.itemsize)
    seen: set[tuple[int, int]] = set()
    kept = []
    for piece in op.reads:  # an operand given twice is read once
        if piece.block < 0 or (piece.block, piece.bytes) not in seen:
            kept.append(piece)
        seen.add((piece.block, piece.bytes))
    op.reads = kept


def count_padding_bytes(op: Op) -> int:
    """Bytes of the padded copies that torch.compile makes of 16-bit operands whose rows do not begin on 16 bytes."""
    total = 0
    for piece in op.reads:
        multiple = 16 // piece.dtype.itemsize
        if piece.dtype.itemsize == 2 and len(piece.shape) > 1 and any(size % multiple for size in piece.shape[-2:]):
            rows, columns = (-(-size // multiple) * multiple for size in piece.shape[-2:])
            total += prod(piece.shape[:-2]) * rows * columns * piece.dtype.itemsize
    return total
