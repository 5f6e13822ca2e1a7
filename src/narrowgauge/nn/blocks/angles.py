"""The angles of rotary embedding among a block's arguments, in each form in which code passes them.

    a pair      cosines and sines, [T, P] or [B, T, P]: as two arguments, or as a tuple in one
    a table     one tensor, of complex numbers [T, P] (Meta's Llama), of cosine and sine [T, P, 2] (gpt-fast), or of
                rotations [T, P, 2, 2] (lingua)

For R rotated columns of a head, P is R, or R/2 where two columns share an angle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PAIRS = (("cos", "sin"), ("freqs_cos", "freqs_sin"), ("rope_cos", "rope_sin"))
"""Names of cosines and sines, where they are two arguments."""
TABLES = ("freqs_cis", "freq_cis", "freqs_complex", "freqs", "rope", "rope_cache", "pos_cis", "rotary_freqs")
"""Names of a table, where it is one argument."""
NAMES = ("position_embeddings", *(name for pair in PAIRS for name in pair), *TABLES)
USES = ("all", "half", "first half")
"""How many angles a head's columns have: one each, or one for two columns, of which all or the first half are given."""


def read_angles(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the cosines and sines [1 or B, T, P] among the arguments, as they are given; None if there are none."""
    given = {name: value for name in NAMES if (value := arguments.get(name)) is not None}
    pair: Any = next(((given[a], given[b]) for a, b in PAIRS if a in given and b in given), None)
    if pair is None:
        value = next(iter(given.values()), None)
        pair = _split_table(value) if isinstance(value, Tensor) else value
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
        return None
    cos, sin = (part if part.dim() == 3 else part[None] for part in pair)
    return (cos, sin) if cos.dim() == 3 and cos.shape == sin.shape and not cos.is_complex() else None


def _split_table(table: Tensor) -> tuple[Tensor, Tensor] | None:
    if table.is_complex():
        return table.real, table.imag
    if table.dim() == 3 and table.shape[-1] == 2:
        return table[..., 0], table[..., 1]
    if table.dim() == 4 and table.shape[-2:] == (2, 2):
        return table[..., 0, 0], table[..., 1, 0]
    return None


def expand_angles(given: tuple[Tensor, Tensor], use: str, pairs: bool) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all rotated columns [1 or B, T, R].

    Args:
        given: As ``read_angles`` returns them.
        use: One of ``USES``.
        pairs: Whether neighbouring columns share an angle, not the same columns of two halves.
    """
    if use == "all":
        return given
    count = given[0].shape[-1]
    cos, sin = (part[..., : count // 2] if use == "first half" else part for part in given)
    if pairs:
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
