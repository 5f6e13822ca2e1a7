"""What an operation computes and moves: its kind, its floating-point operations, and the bytes it must touch.

Operations of matrix products and convolutions are counted by torch's own formulas (``torch.utils.flop_counter``), two
for a multiplication and addition; those of attention here, of causal attention only the half that is computed.
Everything else counts one operation for each value it writes: it is bound by memory whatever it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from narrowgauge.forecast.trace.trace import Op

KINDS: dict[str, str] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"), "product"),
    **dict.fromkeys(("convolution", "convolution_backward"), "convolution"),
    "gradient_norms": "optimizer",
    **dict.fromkeys(("softmax_statistics", "grad_logits", "grad_logits_fp8", "rescale"), "loss"),
    **dict.fromkeys(
        (
            *(
                f"{name}{end}"
                for name in ("cast", "cast_transpose", "cast_transpose_packed")
                for end in ("", "_unrecorded")
            ),
            *("cast_weight", "cast_weight_delayed", "cast_weight_again", "transpose", "max_abs"),
        ),
        "cast",
    ),
    **dict.fromkeys(("pack", "_to_copy", "copy_", "clone", "cat", "stack"), "copy"),
    **dict.fromkeys(
        ("activation", "swiglu_backward", "gelu", "silu", "relu", "gelu_backward", "silu_backward"), "activation"
    ),
}
_PARTS = {"attention": "attention", "norm": "norm", "softmax": "loss", "nll": "loss", "embedding": "embedding",
          "adam": "optimizer", "foreach": "optimizer"}  # fmt: skip
SELECTED = {"embedding": 0, "index_select": 0, "gather": 0, "nll_loss_forward": 0, "nll_loss_backward": 1}
"""Operations that read only some of an operand: which one. The rest they read or write tells how much."""


def kind_of(name: str) -> str:
    """What sort of work an operation is."""
    return KINDS.get(name) or next((kind for part, kind in _PARTS.items() if part in name), "pointwise")


def count(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Mapping[str, Any], result: Any) -> float:
    """Floating-point operations of a call; ``given`` are its arguments by name."""
    if "query" in given and "key" in given and "value" in given:
        return _attention(given["query"], given["key"], given["value"], "backward" in func._schema.name) / (
            2 if given.get("is_causal", False) else 1
        )
    if func._schema.name == "aten::_grouped_mm":
        return _grouped(given["self"], given["mat2"])
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result))
    outputs = result if isinstance(result, tuple | list) else (result,)
    return float(sum(tensor.numel() for tensor in outputs if isinstance(tensor, Tensor)))


def _grouped(a: Tensor, b: Tensor) -> float:
    """Every token meets one expert: the number of experts counts only where each has an operand of its own."""
    groups = len(a) if a.dim() == b.dim() == 3 else 1
    return 2.0 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _attention(query: Tensor, key: Tensor, value: Tensor, backward: bool) -> float:
    """Two products forward (scores, mixture); five backward, as the scores are made again."""
    scores = float(query.shape[:-1].numel() * key.shape[-2])
    size, mixed = query.shape[-1], value.shape[-1]
    return 2 * scores * (3 * size + 2 * mixed if backward else size + mixed)


def correct_bytes(op: Op) -> None:
    """Count what is really read where that is less than the operands."""
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


def padded_bytes(op: Op) -> int:
    """Copies that torch.compile makes of a 16-bit product's operands where their rows do not begin on 16 bytes."""
    total = 0
    for piece in op.reads:
        multiple = 16 // piece.dtype.itemsize
        if piece.dtype.itemsize == 2 and len(piece.shape) > 1 and any(size % multiple for size in piece.shape[-2:]):
            rows, columns = (-(-size // multiple) * multiple for size in piece.shape[-2:])
            total += prod(piece.shape[:-2]) * rows * columns * piece.dtype.itemsize
    return total
