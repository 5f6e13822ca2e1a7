"""Which parameters of a model Muon should step, and which AdamW: decided by where they are and what they are.

Muon      matrices inside of the network: in members of a ModuleList or Sequential, such as a transformer's blocks
AdamW     embeddings and what is tied to them, heads, vectors, convolutions, stacked experts
          tables inside of blocks, which multiply nothing: position biases, the decay rates of a state space model
          matrices of one row or one column, which are vectors: gates, scales
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from narrowgauge.errors import UsageError

RULES = ("muon", "adamw")
_OTHER_NAMES = {"muon": "muon", "adamw": "adamw", "adam": "adamw"}
TABLES = ("*bias*", "*embed*", "*pos_*", "*position*", "*token*", "*_log", "*table*")
"""Last parts of the names of matrices that are tables: Swin's relative_position_bias_table, Mamba's A_log."""
_HEAD = re.compile(r"(\w+_)?heads?|classifier|score|unembed(ding)?")
"""Names of modules that are heads, unless they are inside of a block, where heads are those of attention."""
_MEMBER = re.compile(r"(^|\.)\d+\.weight$")


def split_for_muon(model: nn.Module, adamw: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return parameter groups for ``Muon``: the matrices inside of a model, and all other trained parameters.

    Inside are the members of a ``ModuleList`` or ``Sequential``, such as the blocks of a transformer; if it has none
    with matrices, the whole model but its last matrix. Embeddings and weights that are tied to them, tables, vectors,
    convolutions and stacked experts have AdamW's rule, and so has what is outside, such as a head, a head at the end
    of a ``Sequential``, and what is named so (``heads.0``). Vectors are not decayed.

    Args:
        model: The model.
        adamw: Patterns of parameter names that AdamW is to step as well, with * and ?.

    Returns:
        Up to three groups; the first has "muon" as its rule, if the model has matrices for it.

    Raises:
        UsageError: A pattern matches no parameter.
    """
    patterns = [adamw] if isinstance(adamw, str) else list(adamw)
    _check_patterns(model, patterns)
    outer = {m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    fit = {
        name: p
        for name, p in trained.items()
        if p.dim() == 2
        and min(p.shape) > 1
        and p not in outer
        and not _matches(name.rpartition(".")[2].lower(), TABLES)
        and not _matches(name, patterns)
    }
    members = {name for name in fit if any(part.isdigit() for part in name.split(".")) and not _is_named_head(name)}
    inside = members or {name for name in fit if not _is_named_head(name)}
    if members:
        inside -= _find_head(fit)
    elif len(inside) == len(fit):  # nothing is named as a head
        inside -= _find_last(fit, trained)
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trained.items() if name in inside], "rule": "muon"},
        {"params": [p for name, p in trained.items() if name not in inside and p.dim() > 1], "rule": "adamw"},
        {"params": [p for p in trained.values() if p.dim() < 2], "rule": "adamw", "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def read_rule(group: Mapping[str, Any]) -> str | None:
    """Return the rule that a parameter group names, in narrowgauge's words or those of other versions of Muon.

    These are ``use_muon`` (KellerJordan/Muon), ``kind`` (nanochat) and ``algorithm`` (Dion). Other values of ``kind``
    are labels of the user.

    Args:
        group: The parameter group.

    Returns:
        The rule; None if it names none.

    Raises:
        UsageError: It names two, or an algorithm that is neither Muon nor AdamW.
    """
    named: dict[str, str] = {}
    if group.get("use_muon") is not None:
        named["use_muon"] = RULES[0] if group["use_muon"] else RULES[1]
    for name in ("kind", "algorithm"):
        word = str(group.get(name)).lower()
        if word in _OTHER_NAMES:
            named[name] = _OTHER_NAMES[word]
        elif name == "algorithm" and group.get(name) is not None:
            raise UsageError(f'Muon: algorithm={group[name]!r} of a group is unknown; expected "muon" or "adamw"')
    if group.get("rule") is not None:
        named["rule"] = group["rule"]
    if len(set(named.values())) > 1:
        given = ", ".join(f"{name}={group[name]!r}" for name in named)
        raise UsageError(f"Muon: a group has {given}, which are different rules; keep one of them")
    return next(iter(named.values()), None)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(model: nn.Module, patterns: Iterable[str]) -> None:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UsageError(
                f"split_for_muon: adamw={pattern!r} matches no parameter; names are {', '.join(names[:4])}, ..., and a "
                "part of one needs *, as in *.mlp.gate.*"
            )


def _find_head(matrices: dict[str, nn.Parameter]) -> set[str]:
    """Return the last matrix if it is a direct member of a Sequential and of a shape that no other member has."""
    kinds = {name: (re.sub(r"\d+", "*", name), p.shape) for name, p in matrices.items()}
    last = next(reversed(matrices), "")
    is_head = len(matrices) > 1 and _MEMBER.search(last) and Counter(kinds.values())[kinds[last]] == 1
    return {last} if is_head else set()


def _find_last(matrices: dict[str, nn.Parameter], trained: dict[str, nn.Parameter]) -> set[str]:
    """Return the last matrix of a model without blocks, if its shape is its own and the model has other weights."""
    last = next(reversed(matrices), "")
    shapes = Counter(parameter.shape for parameter in trained.values() if parameter.dim() > 1)
    return {last} if last and len(shapes) > 1 and shapes[matrices[last].shape] == 1 else set()


def _is_named_head(name: str) -> bool:
    """Whether a parameter is in a module named as a head, outside of members of a list."""
    parts = name.split(".")
    first = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return any(_HEAD.fullmatch(part) for part in parts[:first])
