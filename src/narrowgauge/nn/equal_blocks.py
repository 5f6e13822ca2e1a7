"""Finds equal blocks that make up most of a model, so that torch.compile compiles one of them instead of all.

Equal blocks are neighbours in a ModuleList or Sequential, of one class, with parameters of the same names, shapes and
dtypes. They may still differ in what their code reads (a window of attention, a number of the layer): then
torch.compile notices by its guards, and makes one more graph.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from narrowgauge.nn.module_changes import original_class

SMALLEST_GROUP = 3
"""Fewer blocks than these take little longer to compile as part of the model."""
SMALLEST_SHARE = 0.9
"""Share of a model's matrices that must be in equal blocks; embeddings and heads do not count."""


def find_equal_blocks(model: nn.Module, heads: Collection[nn.Module] = ()) -> dict[str, nn.Module]:
    """Return the equal blocks of a model by path; none if they are not most of its matrices.

    Args:
        model: The model.
        heads: Layers that compute logits.
    """
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        members = list(module.named_children())
        described = [_describe(member) for _, member in members]
        for place, (name, member) in enumerate(members):
            if described[place] is not None and described.count(described[place]) >= SMALLEST_GROUP:
                found[f"{path}.{name}" if path else name] = member
    covered = _list_matrices(found.values(), ())
    whole = _list_matrices([model], heads) | covered
    return found if sum(covered.values()) >= SMALLEST_SHARE * sum(whole.values()) else {}


def _describe(block: nn.Module) -> Any:
    """Return what equal blocks have in common, or None for a module that is no block."""
    if not any(True for _ in block.children()):
        return None
    parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters())
    return (original_class(block), parameters) if parameters else None


def _list_matrices(parts: Collection[nn.Module], heads: Collection[nn.Module]) -> dict[int, int]:
    """Return the sizes of matrices by their ids."""
    left_out = {id(p) for part in parts for m in part.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    left_out |= {id(p) for head in heads for p in head.parameters()}
    matrices = (p for part in parts for p in part.parameters() if p.dim() > 1 and id(p) not in left_out)
    return {id(p): p.numel() for p in matrices}
