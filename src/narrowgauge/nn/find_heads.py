"""Finds the layers of a model that compute logits."""

from __future__ import annotations

from torch import nn

from narrowgauge.nn.products.linear import is_linear

HEAD_OUTPUTS = 8192
"""A linear layer with at least so many outputs, and four times as many outputs as inputs, computes logits."""


def find_heads(model: nn.Module, by_width: bool = True) -> dict[str, nn.Module]:
    """Return the linear layers that compute logits: the model says so, the weight is an embedding's, or, ``by_width``,
    it is that wide and no part of a list of modules, such as blocks."""
    stated = getattr(model, "get_output_embeddings", None)
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    listed = {
        id(inner) for part in model.modules() if isinstance(part, nn.ModuleList) for inner in part.modules()
    }  # fmt: skip
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not is_linear(module):
            continue
        wide = module.out_features >= max(HEAD_OUTPUTS, 4 * module.in_features) and id(module) not in listed
        guessed = id(module.weight) in embeddings or (by_width and wide)
        chosen = stated() is module if stated is not None else guessed
        if chosen:
            found[path] = module
    return found
