"""Which linear layers of an FP8 model multiply in BF16 in forward: in the first of repeated blocks, and for keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from narrowgauge.nn.blocks.projections import find_projection
from narrowgauge.nn.blocks.spec import BlockSpec
from narrowgauge.nn.matrix_inventory import is_experts
from narrowgauge.nn.recompute import count_blocks
from narrowgauge.recipe import Recipe

FIRST_FORWARD = "the recipe sets BF16 for the first block's forward"
MIN_BLOCKS_FOR_BF16 = 6
"""The fewest blocks of a row whose first block multiplies in BF16 in forward under ``first_forward=auto``. In a model
of six blocks FP8's loss is then 0.168 behind BF16's, instead of 0.348 (docs/fp8.md). What it costs shrinks with the
number of blocks: on an H200 nothing measurable in 12 blocks 768 wide, and 1.8% of a step in 8 blocks 4,096 wide."""
KEYS = "the recipe sets BF16 for attention's keys"
KEY_NAMES = {
    "k_proj", "key", "k_lin", "to_k", "wk", "k", "c_k", "kv_proj", "to_kv", "wkv", "kv_a_proj_with_mqa", "kv_b_proj",
    "qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv", "to_qkv", "wqkv", "att_proj", "W_pack",
}  # fmt: skip
"""Names of layers that compute keys, alone or beside queries and values, where no fused block says which do. Attention
that is a model's own code has such layers inside of fused blocks too (``kv_b_proj`` of DeepSeek)."""


def find_wide_forwards(
    model: nn.Module, recipe: Recipe, layers: list[str], products: Mapping[str, list[str]], keys: set[str]
) -> dict[str, str]:
    """Return the layers that multiply in BF16 in forward although the recipe computes in FP8, and why.

    Args:
        model: The model.
        recipe: Its recipe.
        layers: Paths of its linear layers, in the model's order.
        products: For a layer that is one product with others, the paths of all of them.
        keys: The layers that compute attention's keys.
    """
    found = dict.fromkeys(_find_first(model, layers, recipe.first_forward, products), FIRST_FORWARD)
    if recipe.attention_keys == "bf16":
        found |= {path: KEYS for path in layers if path in keys and path not in found}
    return found


def find_keys(specs: Mapping[str, BlockSpec], layers: Iterable[str]) -> set[str]:
    """Return the layers that compute attention's keys; in fused blocks with those that are one product with them."""
    known = {f"{path}.{name}" for path, spec in specs.items() for name in spec.linears}
    found = {path for path in layers if path.rpartition(".")[2] in KEY_NAMES and path not in known}
    for path, spec in specs.items():
        source = () if spec.cross is None else spec.cross.inputs
        found |= {f"{path}.{name}" for name in (*spec.inputs, *source)}
    return found


def _find_first(model: nn.Module, layers: list[str], first_forward: str, products: Mapping[str, list[str]]) -> set[str]:
    """Return the layers in the first of each row of repeated blocks that multiply in BF16 in forward.

    mostly-bf16 leaves out the layers with the most inputs, an MLP's last projections, if they have more than the first
    layer. auto leaves out products whose weights are all frozen: with frozen embeddings the first block's inputs do not
    change, and in FP8 such weights can be stored in one byte.
    """
    found: set[str] = set()
    for start in list_first_blocks(model, first_forward):
        inputs = {path: find_projection(model, path).shape[1] for path in layers if path.startswith(start)}
        most = max(inputs.values(), default=0)
        left_out = most if first_forward != "bf16" and most > next(iter(inputs.values()), 0) else 0
        for path, columns in inputs.items():
            weights = (find_projection(model, name).weight for name in products.get(path, [path]))
            if columns != left_out and (first_forward != "auto" or any(weight.requires_grad for weight in weights)):
                found.add(path)
    return found


def list_first_blocks(model: nn.Module, first_forward: str) -> list[str]:
    """Return the start of the paths in each first block of a row that multiplies in BF16 in forward."""
    if first_forward == "fp8":
        return []
    return [
        f"{row}.0." if row else "0."
        for row, count in count_blocks(model).items()
        if not is_experts(row)  # which stand beside each other
        and (first_forward != "auto" or count >= MIN_BLOCKS_FOR_BF16)
    ]
