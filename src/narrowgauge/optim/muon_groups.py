"""Which parameters of a model Muon should step, and which AdamW: decided by where they are and what they are.

Muon      matrices inside of the network: in members of a ModuleList or Sequential, such as a transformer's blocks
AdamW     embeddings and what is tied to them, heads, vectors, convolutions, stacked experts
          tables inside of blocks, which multiply nothing: position biases, the decay rates of a state space model
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

TABLES = ("*bias*", "*embed*", "*pos_*", "*position*", "*token*", "*_log", "*table*")
"""Last parts of the names of matrices that are tables: Swin's relative_position_bias_table, Mamba's A_log."""
_MEMBER = re.compile(r"(^|\.)\d+\.weight$")


def split_for_muon(model: nn.Module, adamw: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return parameter groups for ``Muon``: the matrices inside of a model, and all other trained parameters.

    Inside are the members of a ``ModuleList`` or ``Sequential``, such as the blocks of a transformer; if it has none
    with matrices, the whole model. Embeddings and weights that are tied to them, tables, vectors, convolutions and
    stacked experts have AdamW's rule, and so has what is outside, such as a head, and a head at the end of a
    ``Sequential``. Vectors are not decayed.

    Args:
        model: The model.
        adamw: Patterns of parameter names that AdamW is to step as well, with * and ?.

    Returns:
        Up to three groups.
    """
    patterns = [adamw] if isinstance(adamw, str) else list(adamw)
    outer = {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    fit = {
        name: p
        for name, p in trained.items()
        if p.dim() == 2
        and p not in outer
        and not _matches(name.rpartition(".")[2].lower(), TABLES)
        and not _matches(name, patterns)
    }
    inside = {name for name in fit if any(part.isdigit() for part in name.split("."))} or set(fit)
    inside -= _find_head(fit)
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trained.items() if name in inside], "rule": "muon"},
        {"params": [p for name, p in trained.items() if name not in inside and p.dim() > 1], "rule": "adamw"},
        {"params": [p for p in trained.values() if p.dim() < 2], "rule": "adamw", "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _find_head(matrices: dict[str, nn.Parameter]) -> set[str]:
    """Return the last matrix if it is a direct member of a Sequential and of a shape that no other member has."""
    kinds = {name: (re.sub(r"\d+", "*", name), p.shape) for name, p in matrices.items()}
    last = next(reversed(matrices), "")
    is_head = len(matrices) > 1 and _MEMBER.search(last) and Counter(kinds.values())[kinds[last]] == 1
    return {last} if is_head else set()
