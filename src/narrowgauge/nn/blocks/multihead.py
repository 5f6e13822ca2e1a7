"""Self-attention by nn.MultiheadAttention, which multiplies by its own parameters: what happens between the products.

    qkv = x in_proj_weight' + in_proj_bias;  mixed = attend(qkv);  output = mixed out_proj.weight' + out_proj.bias

Blocks call the module with one tensor as query, key and value. Masks mean what they mean for the module.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.nn.module_changes import original_class

_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


def is_self_attention(module: nn.Module) -> bool:
    """Whether a module is nn.MultiheadAttention with one projection for queries, keys and values, and no extra keys."""
    if original_class(module) is not nn.MultiheadAttention:
        return False
    whole: Any = module
    return bool(whole._qkv_same_embed_dim) and whole.bias_k is None and not whole.add_zero_attn


def is_batch_first(block: nn.Module) -> bool:
    """Whether a block's hidden state is [B, T, D], not [T, B, D] as nn.MultiheadAttention expects by default."""
    return all(part.batch_first for part in block.modules() if isinstance(part, nn.MultiheadAttention))


def read_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return _SIGNATURE.bind(module, *args, **kwargs).arguments


def reads_one_tensor(arguments: Mapping[str, Any]) -> bool:
    """Whether query, key and value are the same tensor [B, T, D] or [T, B, D]."""
    query = arguments["query"]
    return query is arguments["key"] and query is arguments["value"] and query.dim() == 3 and not query.is_nested


def attend(module: Any, qkv: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Return attention's output before the output projection, from qkv in the layout of the module's input."""
    if not module.batch_first:
        qkv = qkv.transpose(0, 1)
    batch, length, _ = qkv.shape
    parts = qkv.chunk(3, -1)
    q, k, v = (part.reshape(batch, length, module.num_heads, -1).transpose(1, 2) for part in parts)
    mask, causal = _merge_masks(module, q, arguments)
    dropout = module.dropout if module.training else 0.0
    mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
    return mixed if module.batch_first else mixed.transpose(0, 1)


def _merge_masks(module: Any, q: Tensor, arguments: Mapping[str, Any]) -> tuple[Tensor | None, bool]:
    """Return one additive mask, broadcast to [B, H, T, T], or that attention is causal without one."""
    mask, padding = arguments.get("attn_mask"), arguments.get("key_padding_mask")
    if mask is not None and padding is None and arguments.get("is_causal") and not arguments.get("need_weights", True):
        return None, True
    mask, padding = (_make_additive(one, q) for one in (mask, padding))
    if mask is not None and mask.dim() == 3:
        mask = mask.view(len(q), module.num_heads, *mask.shape[1:])
    if padding is not None:
        padding = padding[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask, False


def _make_additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a mask whose values are added to scores; in a boolean mask, True means that a key is ignored."""
    if mask is None or mask.is_floating_point():
        return mask if mask is None else mask.to(q.dtype)
    return q.new_zeros(mask.shape).masked_fill_(mask, float("-inf"))
