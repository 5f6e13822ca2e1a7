"""Reports which blocks of a measured model run fused, in which form, and why others do not."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from narrowgauge.nn.blocks.spec import BlockSpec
from narrowgauge.nn.convert import Conversion
from narrowgauge.nn.fused.modules import FusedBlock
from narrowgauge.nn.module_changes import find_change, original_class

ORDERS = {"pre": "norms first", "post": "norms last", "parallel": "parallel"}
ATTENTION = {"own": "the model's own attention", "plain": "torch's attention without copies", "rotary": "rotary kernel"}
NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}


def describe_conversion(model: nn.Module, conversion: Conversion) -> dict[str, Any]:
    """Return JSON data about a converted model.

    Args:
        model: The converted model.
        conversion: The report of its conversion.

    Returns:
        ``summary``: one line about formats; ``fused``: one entry for each kind of block, with its class, form, number
        and first path; ``unfused``: one line for each reason why repeated modules are not fused, or ran as written.
    """
    kinds: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for path in conversion.blocks:
        block = model.get_submodule(path)
        change = find_change(block, FusedBlock)
        kind = (original_class(block).__name__, describe_form(change.plan.spec) if change else "")
        kinds[kind] += 1
        first.setdefault(kind, path)
    fused = [
        {"class": name, "form": form, "count": count, "first": first[name, form]}
        for (name, form), count in kinds.items()
    ]
    return {
        "summary": conversion.summary(),
        "fused": fused,
        "unfused": [*conversion.explain_unfused(), *conversion.as_written.explain()],
    }


def describe_form(spec: BlockSpec) -> str:
    """Return the form in which a block is computed: its order, norm, attention and activation."""
    of_branches = [branch.norm for branch in (spec.branch1, spec.branch2) if branch.norm is not None]
    order = ORDERS.get(spec.order, spec.order) if spec.norm1 is not None else "norms of the branches only"
    if spec.norm1 is not None and of_branches:
        order += ", norms of the branches"
    kinds = {norm.kind for norm in spec.norms}
    norms = " and ".join(NORMS.get(kind, kind) for kind in sorted(kinds))
    attention = ATTENTION.get(spec.attention.kind, spec.attention.kind)
    cross = "" if spec.cross is None else ", cross-attention"
    return f"{order}, {norms}, {attention}{cross}, {spec.activation or spec.mlp}"
